"""Overfit a constant signal through the op: if this does not reach the floor, the gradient is wrong.

A stack of layers turns a constant input into activations [B,H,K]; they are pooled, and a *frozen* head
reads mean and log-deviation of a Gaussian from the pooled vector. Nothing behind the op can learn, so the
negative log-likelihood falls only if the gradient that comes through the op is right. It starts above 0.6 and
must be below -0.9 after 250 steps, on the same curve as the PyTorch composite's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import invpool
from invpool.generate import Request, generate
from invpool.reference import composite

STEPS = 250
START_ABOVE = 0.6
END_BELOW = -0.9
SIGNAL = 1.25


class Stack(nn.Module):
    """constant[B,K,4] -> (mean, log-deviation)[B] through H variates of K steps."""

    def __init__(self, pool: Callable[[Tensor], Tensor], H: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, H), nn.Tanh(), nn.Linear(H, H), nn.Tanh())
        self.pool = pool
        self.head = nn.Linear(H, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = self.head(self.pool(self.layers(x).mT)).unbind(-1)
        return mean, log_deviation


def losses(
    pool: Callable[[Tensor], Tensor], H: int, K: int, device: torch.device | str, items: int = 8, steps: int = STEPS
) -> list[float]:
    """The negative log-likelihood at each step, without its constant: log(sigma) + (y - mu)^2 / (2 sigma^2)."""
    torch.manual_seed(0)
    model = Stack(pool, H).to(device)
    phase = torch.linspace(0, 6.28, K)[None, :, None] + torch.arange(4)
    x = (torch.ones(items, 1, 1) * torch.cos(phase)).to(device)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    curve = []
    for _ in range(steps + 1):
        mean, log_deviation = model(x)
        loss = (log_deviation + 0.5 * ((SIGNAL - mean) / log_deviation.exp()) ** 2).mean()
        curve.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where generated packages lie")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)  # the matrices are small: more threads would mostly wait for each other
    spec = invpool.PoolSpec(128, 32)
    folder = options.build / spec.slug
    generate(Request(spec, folder))
    ours = losses(invpool.load(folder), spec.H, spec.K, options.device)
    theirs = losses(composite, spec.H, spec.K, options.device)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"overfit through {spec.slug} on {options.device}: loss {ours[0]:.3f} -> {ours[-1]:.3f} in {STEPS} steps")
    print(f"  the composite's curve: {theirs[0]:.3f} -> {theirs[-1]:.3f}; never more than {apart:.1e} apart")
    if not (ours[0] > START_ABOVE and ours[-1] < END_BELOW and apart < 1e-4):
        raise SystemExit(f"expected from above {START_ABOVE} to below {END_BELOW}, within 1e-4 of the composite")


if __name__ == "__main__":
    main()
