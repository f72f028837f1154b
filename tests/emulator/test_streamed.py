"""``one_pass_streamed`` under chosen plans, against float64: every path of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from emulator.pools import GPU, guarded, inputs
from invpool.abi import Direction
from invpool.algorithms import Choice, find_algorithm
from invpool.algorithms.one_pass_streamed import StreamedPlan
from invpool.check import tolerance
from invpool.emulator.pool import EmulatedPool
from invpool.reference import composite_errors, norm_error, pool_ref
from invpool.spec import PoolSpec

STREAMED = find_algorithm("one_pass_streamed")
SMALL: dict[str, Any] = {"window": 16, "warps": 1, "row_blocks": 1, "columns": 16, "registers": 255}
ONE: dict[str, Any] = {"window": 32, "warps": 2, "row_blocks": 1, "columns": 16, "registers": 255}
TALL: dict[str, Any] = {"window": 32, "warps": 1, "row_blocks": 2, "columns": 32, "registers": 255}
WIDE: dict[str, Any] = {"window": 64, "warps": 4, "row_blocks": 1, "columns": 32, "registers": 255}
CHUNKS: dict[str, Any] = {"window": 32, "warps": 2, "row_blocks": 1, "columns": 32, "registers": 255, "chunk": 32}
LONG: dict[str, Any] = {**CHUNKS, "chunk": 96, "hold": False}
MIRROR: dict[str, Any] = {**ONE, "mirror": True}
SHARED: dict[str, Any] = {**ONE, "window": 64, "warps": 1, "across": 4}
SPREAD: dict[str, Any] = {**CHUNKS, "columns": 16, "warps": 1, "across": 2, "spread": True}
AT_ONCE = {"prefetch": False}


def _plan(spec: PoolSpec, direction: Direction, knobs: dict[str, Any]) -> StreamedPlan:
    plan = STREAMED.plan_from_knobs(direction, knobs)
    assert STREAMED.reject(spec, plan, GPU) is None
    return plan


def _check(spec: PoolSpec, pool: EmulatedPool, x: Tensor, g: Tensor, mask: Tensor | None, what: str) -> None:
    truth = pool_ref(x, g, spec.layout, mask=mask)
    out_today, dx_today = composite_errors(x, g, truth, spec.layout, mask)
    state = pool.forward(x, mask, orders=2)
    dx = pool.backward(x, g, state, mask, orders=2)
    # Of two items, chance makes a tenth of the composite's error: (130, 300) is at 2.06 times it.
    assert norm_error(state["out"], truth.out) <= 1.1 * tolerance(spec, "out", out_today), what
    assert norm_error(dx, truth.dx) <= 1.1 * tolerance(spec, "dx", dx_today), what


CASES = [
    (PoolSpec(1, 1), SMALL, SMALL),
    (PoolSpec(17, 16), SMALL, {**SMALL, **AT_ONCE}),
    (PoolSpec(33, 5), SMALL, ONE),
    (PoolSpec(33, 5, layout="bkh", masked=True), ONE, SMALL),
    (PoolSpec(65, 64), ONE, TALL),
    (PoolSpec(65, 64, layout="bkh"), WIDE, ONE),
    (PoolSpec(65, 64), ONE, CHUNKS),
    (PoolSpec(65, 64, layout="bkh", masked=True), {**CHUNKS, **AT_ONCE}, CHUNKS),
    (PoolSpec(65, 65), {**CHUNKS, "hold": False}, {**CHUNKS, **AT_ONCE}),
    (PoolSpec(65, 64, "float16"), TALL, ONE),
    (PoolSpec(65, 64, "float16", "bkh", masked=True), ONE, TALL),
    (PoolSpec(64, 130, "bfloat16"), {**CHUNKS, "chunk": 64}, {**CHUNKS, "chunk": 64}),
    (PoolSpec(63, 97, "bfloat16", "bkh"), CHUNKS, LONG),
    (PoolSpec(37, 40, precision="tf32"), ONE, ONE),
    (PoolSpec(137, 97), WIDE, WIDE),
    (PoolSpec(137, 33, masked=True), {**MIRROR, **AT_ONCE}, ONE),
    (PoolSpec(97, 40, layout="bkh"), {**TALL, "mirror": True}, ONE),
    (PoolSpec(32, 8, "bfloat16"), MIRROR, ONE),
    (PoolSpec(128, 32), SHARED, SHARED),
    (PoolSpec(70, 100, masked=True), CHUNKS, SPREAD),
    (PoolSpec(33, 97, "bfloat16", "bkh"), CHUNKS, {**SPREAD, "row_blocks": 2, **AT_ONCE}),
    (PoolSpec(65, 64, layout="bkh"), {**MIRROR, "across": 2}, {**TALL, "window": 64, "across": 2}),
    (PoolSpec(70, 97), {**CHUNKS, "columns": 16, "across": 2}, {**CHUNKS, "columns": 16, "across": 2}),
    (PoolSpec(137, 97, layout="bkh"), {**WIDE, "row_blocks": 2}, LONG | {"chunk": 48}),
]
SLOW = [
    (PoolSpec(321, 96), WIDE, WIDE),
    (PoolSpec(130, 300), LONG, LONG),
    (PoolSpec(130, 300, layout="bkh"), {**LONG, "hold": True}, {**LONG, "chunk": 240}),
    (PoolSpec(40, 1001), {**LONG, "chunk": 128}, {**LONG, "chunk": 192}),
    (PoolSpec(130, 300), LONG, {**SPREAD, "window": 64, "across": 4, "chunk": 96, "warps": 2, "hold": False}),
    (PoolSpec(40, 1001, "bfloat16", "bkh"), {**LONG, "chunk": 128, "hold": True}, {**LONG, "chunk": 240}),
]


@pytest.mark.parametrize(
    ("spec", "forward", "backward"),
    [
        pytest.param(*case, id=f"{case[0].slug}-{number}", marks=[pytest.mark.slow] if case in SLOW else [])
        for number, case in enumerate(CASES + SLOW)
    ],
)
def test_against_float64(spec: PoolSpec, forward: dict[str, Any], backward: dict[str, Any]) -> None:
    pool = EmulatedPool(spec, Choice(STREAMED, _plan(spec, "forward", forward), _plan(spec, "backward", backward)))
    for shift, kind in enumerate(("normal", "large", "shifted")):
        x, g, mask = inputs(spec, kind, items=max(2, 256 // spec.H))
        _check(spec, pool, guarded(x, shift), guarded(g, shift), mask, kind)


def _hard(spec: PoolSpec) -> dict[str, Tensor]:
    """Inputs that leave the plain way somewhere, all of two items [2,H,K]."""
    normal = torch.randn(2, spec.H, spec.K, generator=torch.Generator().manual_seed(3))
    spike, late = normal.clone(), normal.clone()
    spike[:, spec.H // 2] *= 1000
    nearly = normal * 0.05 + 100  # centred until the last variate says no
    nearly[:, -1] = normal[:, -1]
    late[1, -1] *= 1e4
    tops = 1e18 if spec.dtype != "float16" else 1e4
    return {
        "constant": torch.full_like(normal, 0.01),
        "tiny": normal * 1e-6,
        "spike": spike,
        "late": late if spec.dtype != "float16" else spike,
        "off": normal * 0.05 + 100,
        "nearly": nearly,
        "huge": normal * tops,
        "zero": torch.zeros_like(normal),
    }


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(ONE, TALL), (CHUNKS, CHUNKS), (TALL, ONE), (MIRROR, ONE), (SHARED, SHARED)],
)
@pytest.mark.parametrize("kind", ["tiny", "spike", "late", "off", "nearly", "huge", "zero"])
def test_hard_inputs(kind: str, forward: dict[str, Any], backward: dict[str, Any]) -> None:
    spec = PoolSpec(65, 64)
    pool = EmulatedPool(spec, Choice(STREAMED, _plan(spec, "forward", forward), _plan(spec, "backward", backward)))
    x = _hard(spec)[kind]
    _check(spec, pool, x, torch.randn(2, 65, generator=torch.Generator().manual_seed(1)), None, kind)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_of_any_size(size: float) -> None:
    spec = PoolSpec(33, 5)
    pool = EmulatedPool(spec, Choice(STREAMED, _plan(spec, "forward", ONE), _plan(spec, "backward", ONE)))
    x, g, _ = inputs(spec, "normal", items=2)
    _check(spec, pool, x, g * size, None, "normal")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("knobs", [ONE, CHUNKS], ids=["one", "chunks"])
def test_what_is_not_finite_stays_within_its_item(knobs: dict[str, Any], value: float) -> None:
    spec = PoolSpec(40, 64)
    pool = EmulatedPool(spec, Choice(STREAMED, _plan(spec, "forward", knobs), _plan(spec, "backward", knobs)))
    x, g, _ = inputs(spec, "normal", items=2)
    clean = pool.forward(x)
    clean_dx = pool.backward(x, g, clean)
    x[0, 39, 3] = value
    state = pool.forward(x)
    dx = pool.backward(x, g, state)
    assert torch.equal(state["out"][1], clean["out"][1])
    assert torch.equal(dx[1], clean_dx[1])


def test_what_is_rejected_says_what_would_fit() -> None:
    spec = PoolSpec(862, 720)
    for knobs, reason in (
        ({**CHUNKS, "chunk": 40}, "multiple of 32"),
        ({**CHUNKS, "columns": 16}, "must be window (32)"),
        ({**ONE, "hold": False}, "hold=False needs a chunk"),
        ({**ONE, "across": 3}, "across is 3"),
        ({**WIDE, "warps": 8}, "lower window, warps or chunk"),
    ):
        assert reason in str(STREAMED.reject(spec, STREAMED.plan_from_knobs("forward", knobs), GPU))
    too_long = STREAMED.plan_from_knobs("backward", {**ONE, "window": 16, "row_blocks": 1})
    assert "set chunk to 256 or less" in str(STREAMED.reject(spec, too_long, GPU))


def test_every_item_has_a_plan() -> None:
    for H, K in ((1, 1024), (8192, 1), (8192, 1024), (883, 720)):
        for dtype in ("float32", "bfloat16"):
            for layout in ("bhk", "bkh"):
                spec = PoolSpec(H, K, dtype, layout)
                for direction in ("forward", "backward"):
                    assert STREAMED.legal(spec, GPU, direction), (spec.slug, direction)
