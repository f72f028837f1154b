"""Fixtures: a cache of the session's own, and packages generated once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import fake_compiler
from invpool.algorithms import choose
from invpool.binding import TableRow, import_package, package_files, staged_package
from invpool.cache import CACHE_VARIABLE, KernelCache
from invpool.generate import Planned, build_kernels
from invpool.gpu import known_gpu
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec

# The tensors are small and the workers as many as the cores: threads of torch's own would wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing of the person's own cache is read or written; INVPOOL_TEST_CACHE keeps kernels between runs."""
    root = Path(os.environ.get("INVPOOL_TEST_CACHE") or tmp_path_factory.mktemp("cache"))
    os.environ[CACHE_VARIABLE] = str(root)
    return root


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Binds a package whose code is fake: its CPU op, files and manifest are real."""
    root = tmp_path_factory.mktemp("packages")
    cache = KernelCache(root / "cache", fake_compiler)

    def make(spec: PoolSpec, folder: Path | None = None, algorithm: str = "three_pass") -> Path:
        gpu = known_gpu("h200")
        kernels = build_kernels(spec, Planned(((0, choose(spec, gpu, algorithm)),)), ("sm_90",), cache)
        files = package_files(spec, gpu.name, kernels, (TableRow(0, 0, 1),))
        place = folder or root / spec.slug
        if not place.exists():
            with staged_package(place, files):
                pass
        return place

    return make


@pytest.fixture(scope="session")
def make_op(make_package: Callable[..., Path]) -> Callable[[PoolSpec], GeneratedOp]:
    """The op of such a package."""
    return lambda spec: import_package(make_package(spec)).op
