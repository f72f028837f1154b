"""What several test files share: specs, inputs, and a way to run Python elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from invpool.compile import Compiled, Resources, Target

REPO = Path(__file__).parent.parent

# Exact oracles of the operation: x (one item, H x K), g, out, dx.
ORACLES: dict[str, tuple[list[list[float]], list[float], list[float], list[list[float]]]] = {
    "two variates, one step": (
        [[1.0], [2.0]],
        [1.0, 1.0],
        [1.7310585786, 1.8807970780],
        [[0.1781571726], [2.1234483461]],
    ),
    "two variates, one-sided gradient": (
        [[1.0], [2.0]],
        [1.0, 0.0],
        [1.7310585786, 1.8807970780],
        [[0.2689414214], [0.9276705119]],
    ),
    "three variates, two steps": (
        [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
        [1.0, 1.0, 1.0],
        [0.7005560463, 0.7005560463, 0.7517449217],
        [[0.4082155127, 0.3505434311], [0.3505434311, 0.4082155127], [0.8703640903, 0.8703640903]],
    ),
}


def random_input(
    H: int, K: int, layout: str, items: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (items, H, K) if layout == "bhk" else (items, K, H)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def run_python(code: str, *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300) -> str:
    """Runs a script in a fresh interpreter and returns what it printed; fails with its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fake_compiler(source: str, target: Target) -> Compiled:
    """Code that no GPU would run, at once: for tests of everything around it."""
    code = f"{target.name}:{len(source)}".encode()
    return Compiled(code, Resources(64, 0, 0, 0, 0) if target.kind == "cubin" else None)
