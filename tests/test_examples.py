from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import invpool
from helpers import REPO, run_python
from invpool.reference import composite
from invpool.spec import PoolSpec

sys.path += [str(REPO / "examples" / "overfit"), str(REPO / "examples" / "japanese_vowels")]
import overfit
import train


def test_overfit_through_a_frozen_head(make_package: Callable[..., Path]) -> None:
    """Above 0.6 to below -0.9 in 250 steps, on the composite's curve: wrong gradients do neither."""
    spec = PoolSpec(128, 32)
    op = invpool.load(make_package(spec))
    ours = overfit.losses(op, 128, 32, "cpu", items=2)
    theirs = overfit.losses(composite, 128, 32, "cpu", items=2)
    assert ours[0] > overfit.START_ABOVE
    assert ours[-1] < overfit.END_BELOW
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    stopped = overfit.losses(lambda x: op(x).detach() + 0 * x.sum(), 128, 32, "cpu", items=2, steps=25)
    assert stopped[-1] > overfit.START_ABOVE  # the head is frozen: without the op's gradient nothing falls


def test_vowels_learn_with_either_head(make_package: Callable[..., Path]) -> None:
    data = train.load_data("cpu")
    assert {name: tuple(value.shape) for name, value in data.items()} == {
        "x_train": (270, 25, 12),
        "y_train": (270,),
        "x_test": (370, 25, 12),
        "y_test": (370,),
    }
    op = invpool.load(make_package(PoolSpec(128, 25, layout="bkh")))
    for pool in (op, lambda x: x.mean(1)):
        assert train.train(pool, data, epochs=6)["accuracy"] > 0.5  # nine speakers: chance is 0.11


@pytest.mark.parametrize("script", ["overfit/overfit.py", "japanese_vowels/train.py"])
def test_scripts_explain_themselves(script: str, tmp_path: Path) -> None:
    path = str(REPO / "examples" / script)
    code = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({path!r}, run_name='__main__')"
    assert "--build" in run_python(code, cwd=tmp_path)
