"""GPU tests: real cubins, a real stream. Skipped as a whole where there is no GPU; tools/gpu_tests.py forbids skips."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import invpool
from invpool.algorithms import find_algorithm
from invpool.generate import Request, generate
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def gpu_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Generates a package by the main job itself, once a session; it is proved on this GPU on the way."""
    root = tmp_path_factory.mktemp("gpu_packages")

    def make(spec: PoolSpec, algorithm: str = "one_pass") -> Path:
        folder = root / find_algorithm(algorithm).name / spec.slug
        if not folder.exists():
            result = generate(Request(spec, folder, algorithm=algorithm))
            assert result.kernel_proof is not None
            assert result.kernel_proof.ok
        return folder

    return make


@pytest.fixture(scope="session")
def gpu_op(gpu_package: Callable[..., Path]) -> Callable[..., GeneratedOp]:
    return lambda spec, algorithm="one_pass": invpool.load(gpu_package(spec, algorithm))
