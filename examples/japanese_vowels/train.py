"""Speaker classification on JapaneseVowels: GRU -> inverted-attention pooling -> linear, beside a mean-pool head."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import invpool
from invpool.generate import Request, generate

WIDTH = 128
STEPS = 25
DATA = Path(__file__).parent / "data" / "japanese_vowels.npz"


class Classifier(nn.Module):
    """x[B,25,12] -> scores[B,9]; ``pool`` takes the trunk's [B,25,128] to [B,128]."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.trunk = nn.GRU(12, WIDTH, batch_first=True)
        self.pool = pool
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.trunk(x)[0]))


def load_data(device: torch.device | str) -> dict[str, Tensor]:
    """Time-major x, normalised by the training items' channel statistics, and the speakers."""
    with np.load(DATA) as stored:
        data = {name: torch.from_numpy(stored[name]) for name in stored.files}
    mean, std = data["x_train"].mean((0, 2), keepdim=True), data["x_train"].std((0, 2), keepdim=True)
    for name in ("x_train", "x_test"):
        data[name] = ((data[name] - mean) / std).mT.contiguous()
    return {name: value.to(device) for name, value in data.items()}


def train(pool: Callable[[Tensor], Tensor], data: dict[str, Tensor], epochs: int, seed: int = 0) -> dict[str, float]:
    """Trains one classifier; returns test accuracy, last loss and seconds."""
    torch.manual_seed(seed)
    model = Classifier(pool).to(data["x_train"].device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    order = torch.Generator().manual_seed(seed)
    start, loss = time.perf_counter(), torch.zeros(())
    for _ in range(epochs):
        for batch in torch.randperm(len(data["y_train"]), generator=order).split(54):
            items = batch.to(data["y_train"].device)
            loss = nn.functional.cross_entropy(model(data["x_train"][items]), data["y_train"][items])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        hits = model(data["x_test"]).argmax(-1) == data["y_test"]
    return {
        "accuracy": hits.double().mean().item(),
        "loss": loss.item(),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where generated packages lie")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    spec = invpool.PoolSpec(WIDTH, STEPS, layout="bkh")
    folder = options.build / spec.slug
    generate(Request(spec, folder))
    if options.device == "cpu":
        torch.set_num_threads(1)  # the matrices are small: more threads would mostly wait for each other
    data = load_data(options.device)
    heads = {"inverted attention": invpool.load(folder), "mean over time": lambda x: x.mean(1)}
    print(f"JapaneseVowels on {options.device}, {options.epochs} epochs, 270 training and 370 test items")
    for name, pool in heads.items():
        result = train(pool, data, options.epochs)
        print(
            f"  {name:<20} test accuracy {100 * result['accuracy']:.1f} %  "
            f"last loss {result['loss']:.4f}  {result['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
