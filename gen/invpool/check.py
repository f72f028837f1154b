"""Proof of a generated op on a device: forward and backward against float64, by one tolerance rule.

Tolerance of a norm error: max(2 x the same-dtype PyTorch composite, floor), both against float64; the
floor is 3e-7 (out) and 5e-7 (dx) for float32, 1e-12 for float64, scaled by eps for 16-bit types, and
1e-3 for precision tf32. An error passes as ``err <= tol``, so NaN never does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from invpool.reference import composite_errors, norm_error, pool_ref
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec

_FLOORS: Final = {"out": 3e-7, "dx": 5e-7}
# The looser check that the hand-written ancestor had: six entries by central differences.
_DIFFERENCES: Final = 6
_DIFFERENCE_RELATIVE: Final = 5e-2
_DIFFERENCE_ABSOLUTE: Final = 5e-3
_ITEMS: Final = 8
# The tolerance rule compares the norms of two errors: over few numbers these scatter by more than its factor of 2.
_FEWEST_ROWS: Final = 512
# No check needs more elements than this in any tensor it forms; B shrinks for wide items.
_ELEMENT_BUDGET: Final = 1 << 24


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, its error, what is allowed and where that comes from."""

    name: str
    error: float
    tolerance: float
    against: str

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Proof:
    """All findings of one op on one device. ``device`` is the GPU's name, or ``cpu`` for the closed form."""

    device: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def worst(self, prefix: str) -> Finding:
        """The finding nearest to its tolerance among those whose name starts so."""
        chosen = [finding for finding in self.findings if finding.name.startswith(prefix)]
        # NaN compares false with everything: it must come out on top, not vanish.
        return max(chosen, key=lambda f: (f.error != f.error, f.error / f.tolerance))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN or infinity: such a number becomes null."""
        findings = []
        for finding in self.findings:
            fields = dataclasses.asdict(finding) | {"ok": finding.ok}
            for name in ("error", "tolerance"):
                fields[name] = fields[name] if math.isfinite(fields[name]) else None
            findings.append(fields)
        return {"device": self.device, "ok": self.ok, "findings": findings}


def tolerance(spec: PoolSpec, what: str, composite_error: float) -> float:
    """The allowed norm error of ``out`` or ``dx``."""
    if spec.precision == "tf32":
        return 1e-3
    if spec.dtype == "float64":
        return max(2 * composite_error, 1e-12)
    eps = torch.finfo(getattr(torch, spec.dtype)).eps / torch.finfo(torch.float32).eps
    return max(2 * composite_error, _FLOORS[what] * eps)


def make_inputs(spec: PoolSpec, items: int, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Three kinds of x, by name, in the spec's layout and dtype: made on the CPU, so every device sees the same.

    ``normal``: standard normal. ``large``: scores large enough that one variate takes all. ``shifted``:
    an un-normalised series, 100 +- 0.05 (1 +- 0.05 where the dtype has 16 bits).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (items, spec.H, spec.K) if spec.layout == "bhk" else (items, spec.K, spec.H)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    level = 1.0 if spec.element_bytes == 2 else 100.0
    kinds = {"normal": noise, "large": 4.0 * noise, "shifted": level + 0.05 * noise}
    dtype = getattr(torch, spec.dtype)
    return {name: value.to(dtype).to(device) for name, value in kinds.items()}


def make_odd_items(spec: PoolSpec, items: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """x of items that few threads of a block see what all of them have to know of: for those who look for races.

    Variates of 1 +- 0.0005 near each other, but for one that is not, in all of its steps (which samples show) or in one
    step (which they do not). The last item holds numbers beyond those of fp16.
    """
    kinds = {name: x.clone() for name, x in make_inputs(spec, items, device, seed).items()}
    odd = kinds["shifted"] / kinds["shifted"].abs().max()
    variates = odd if spec.layout == "bhk" else odd.mT
    variates[::2, spec.H // 2, min(1, spec.K - 1)] *= 3
    variates[1::2, spec.H // 2] *= -1
    odd[-1] = (1.0 if spec.dtype == "float16" else 3e4) * kinds["normal"][-1]
    return odd


def _poison(like: Tensor) -> None:
    """Leaves NaN where the next allocation of this size will lie, so that an unwritten output shows."""
    torch.full_like(like, float("nan"))


def _run(op: GeneratedOp, x: Tensor, g: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    _poison(g)
    out = op(leaf, None, mask)
    _poison(x)
    (dx,) = torch.autograd.grad(out, leaf, g)
    return out.detach(), dx


def _items(spec: PoolSpec) -> int:
    return max(1, min(max(_ITEMS, _FEWEST_ROWS // spec.H), _ELEMENT_BUDGET // (spec.H * max(spec.H, spec.K))))


# Forward and backward of some kernels: (x, g, mask) -> (out, dx).
Run = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def check_against_float64(run: Run, spec: PoolSpec, device: torch.device | str, seed: int = 0) -> list[Finding]:
    """out and dx of each kind of input by the tolerance rule."""
    items = _items(spec)
    generator = torch.Generator().manual_seed(seed + 1)
    dtype = getattr(torch, spec.dtype)
    g = torch.randn(items, spec.H, generator=generator, dtype=torch.float64).to(dtype).to(device)
    mask = None
    if spec.masked:
        mask = (torch.rand(items, spec.H, generator=generator) < 0.7).to(device)
        mask[0] = False  # an item of which nothing takes part
    findings = []
    for kind, x in make_inputs(spec, items, device, seed).items():
        truth = pool_ref(x, g, spec.layout, mask=mask)
        out_today, dx_today = composite_errors(x, g, truth, spec.layout, mask)
        out, dx = run(x, g, mask)
        for what, got, exact, today in (("out", out, truth.out, out_today), ("dx", dx, truth.dx, dx_today)):
            against = "float64" if 2 * today < tolerance(spec, what, 0.0) else f"float64 (composite {today:.1e})"
            findings.append(Finding(f"{what} {kind}", norm_error(got, exact), tolerance(spec, what, today), against))
    return findings


def check_by_differences(op: GeneratedOp, spec: PoolSpec, device: torch.device | str, seed: int = 0) -> Finding:
    """Six entries of dx by central differences of the float64 forward at random positions.

    The error is the worst |dx - difference| - absolute tolerance, relative to the difference.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    x = make_inputs(spec, 1, device, seed)["normal"]
    g = torch.ones(1, spec.H, dtype=x.dtype, device=x.device)
    _, dx = _run(op, x, g, None)
    step = 1e-4
    worst = 0.0
    for position in torch.randint(x.numel(), (_DIFFERENCES,), generator=generator).tolist():
        sides = []
        for sign in (step, -step):
            moved = x.double().flatten().clone()
            moved[position] += sign
            sides.append(pool_ref(moved.view_as(x), g, spec.layout).out.sum().item())
        difference = (sides[0] - sides[1]) / (2 * step)
        got = dx.flatten()[position].item()
        excess = abs(got - difference) - _DIFFERENCE_ABSOLUTE
        worst = max(worst, excess / max(abs(difference), _DIFFERENCE_ABSOLUTE)) if excess == excess else excess
    against = f"central differences, 6 entries, absolute {_DIFFERENCE_ABSOLUTE}"
    return Finding("dx differences", max(worst, 0.0) if worst == worst else worst, _DIFFERENCE_RELATIVE, against)


def check_gradcheck(op: GeneratedOp, spec: PoolSpec, device: torch.device | str) -> Finding:
    """torch's own gradcheck of a float64 op: along a random direction where the item is large."""
    x = make_inputs(spec, 1, device)["normal"].requires_grad_()
    fast = x.numel() > 256
    passed = torch.autograd.gradcheck(op, (x,), fast_mode=fast, raise_exception=False)
    return Finding("gradcheck", 0.0 if passed else float("inf"), 0.0, "torch.autograd.gradcheck")


def prove(op: GeneratedOp, device: torch.device | str, seed: int = 0, name: str | None = None) -> Proof:
    """Everything that must hold of an op on a device.

    On ``cpu`` it is the closed form that is checked, which says nothing about the kernels, unless the op
    is an emulated one. ``name`` is what the proof calls the device: the GPU's name or ``cpu`` unless given.
    """
    spec = PoolSpec(**op.manifest["spec"])
    findings: list[Finding] = []
    # The closed form knows no plans; of kernels, those of every batch size are proved, whatever size the proof has.
    runs_kernels = torch.device(device).type in op.kernel_devices
    for row, start in enumerate(op.row_starts if runs_kernels else op.row_starts[:1]):
        with op.only_row(row):
            found = check_against_float64(functools.partial(_run, op), spec, device, seed)
            found.append(check_by_differences(op, spec, device, seed))
            if spec.dtype == "float64":
                found.append(check_gradcheck(op, spec, device))
        where = f", plans from B={start}" if row > 0 else ""
        findings += [dataclasses.replace(finding, name=finding.name + where) for finding in found]
    if name is None:
        name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return Proof(name, tuple(findings))
