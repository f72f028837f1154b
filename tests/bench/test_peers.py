"""Peers that run anywhere are the operation itself; which of them a spec has; how the quickest tile is found."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from helpers import REPO, random_input
from invpool.bench.figures import through_autograd
from invpool.bench.peers import Pool, eager, eager_mean, fastest, peers
from invpool.bench.timing import Failure, Timing
from invpool.reference import norm_error, pool_ref
from invpool.spec import PoolSpec


@pytest.mark.parametrize("pool", [eager, eager_mean])
@pytest.mark.parametrize(("H", "K"), [(1, 1), (7, 5), (16, 33)])
def test_eager_forms_are_the_operation(pool: Pool, H: int, K: int) -> None:
    x, g = random_input(H, K, "bhk"), torch.randn(3, H, dtype=torch.float64)
    truth = pool_ref(x, g)
    out, dx = through_autograd(pool, x, g)
    assert norm_error(out, truth.out) < 1e-13
    assert norm_error(dx, truth.dx) < 1e-13


def test_each_spec_has_the_peers_of_its_class() -> None:
    def names(spec: PoolSpec, which: str) -> list[str]:
        return [peer.name for peer in peers(spec, which)]  # type: ignore[arg-type]

    assert names(PoolSpec(9, 8), "fast") == ["eager", "eager_mean", "triton_tf32x3"]
    assert names(PoolSpec(9, 8, precision="tf32"), "fast") == ["eager", "eager_mean", "triton_tf32"]
    assert names(PoolSpec(9, 8, "bfloat16"), "fast") == ["eager", "eager_mean", "triton_native"]
    assert names(PoolSpec(9, 8, "float64"), "fast") == ["eager", "eager_mean"]
    assert set(names(PoolSpec(9, 8), "all")) - set(names(PoolSpec(9, 8), "fast")) == {
        "triton_tf32", "triton_ieee", "compile", "compile_mean",
    }  # fmt: skip
    assert names(PoolSpec(9, 8), "none") == []
    with pytest.raises(ValueError, match="peers are 'some'; legal: none, fast, all"):
        names(PoolSpec(9, 8), "some")


def test_the_quickest_that_works_is_taken() -> None:
    outcomes = {"a": Failure("too large"), "b": Timing.of([5.0, 5.0]), "c": Timing.of([4.0, 4.0])}
    assert fastest(outcomes) == "c"
    with pytest.raises(RuntimeError, match="no tile works: too large"):
        fastest({"a": Failure("too large")})
    with pytest.raises(RuntimeError, match="there is none to try"):
        fastest({})


def test_measuring_needs_no_triton_to_be_imported() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import invpool.bench.figures, invpool.bench.own, invpool.bench.peers, invpool.bench.timing"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env={"PYTHONPATH": f"{REPO}/gen"}
    )
    assert done.returncode == 0, done.stderr
