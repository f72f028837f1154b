"""Every template, direction and branch under AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer."""

from __future__ import annotations

import pytest

from emulator.pools import GPU, guarded, inputs, three_pass_family
from helpers import choice_with
from invpool.check import tolerance
from invpool.emulator.pool import EmulatedPool
from invpool.reference import composite_errors, norm_error, pool_ref
from invpool.spec import PoolSpec

# (spec, plan knobs, kind of input, elements that x is off an aligned address): each names what it is there for.
CASES = {
    "whole warps, one tile": (PoolSpec(64, 32), {"k_tile": 32, "columns": 4}, "normal", 0),
    "part of a warp, tail tile, rest of the columns": (PoolSpec(37, 21), {"k_tile": 8, "columns": 8}, "normal", 0),
    "centred items": (PoolSpec(37, 21), {"k_tile": 16, "columns": 2}, "shifted", 0),
    "masked": (PoolSpec(37, 12, masked=True), {"k_tile": 8, "columns": 4}, "normal", 0),
    "masked and centred, one column": (PoolSpec(33, 9, masked=True), {"k_tile": 8, "columns": 1}, "shifted", 0),
    "rows in shared memory, own row not in registers": (
        PoolSpec(36, 20),
        {"shared_order": "row", "k_tile": 8, "columns": 4},
        "large",
        0,
    ),
    "padded rows": (PoolSpec(40, 16), {"shared_order": "padded", "k_tile": 16, "columns": 8}, "normal", 0),
    "x off its alignment": (PoolSpec(36, 16), {"k_tile": 16, "columns": 4}, "normal", 1),
    "time-major": (PoolSpec(36, 10, layout="bkh"), {"k_tile": 8, "columns": 4}, "shifted", 3),
    "float64": (PoolSpec(34, 11, "float64"), {"k_tile": 8, "columns": 2}, "normal", 0),
    "16 bits": (PoolSpec(40, 24, "float16"), {"k_tile": 16, "columns": 4}, "normal", 0),
    "16 bits off their alignment": (PoolSpec(35, 24, "bfloat16", masked=True), {"k_tile": 8}, "shifted", 1),
    "one variate of one step": (PoolSpec(1, 1), {"k_tile": 8, "columns": 1}, "normal", 0),
}

ONE_PASS_CASES = {
    "several tiles and chunks": (PoolSpec(70, 40), {"rows": 32, "k_step": 16}, "normal", 0),
    "odd items": (PoolSpec(37, 21), {"rows": 16, "thread_rows": 2, "k_step": 16}, "odd", 0),
    "centred, part of a tile": (PoolSpec(37, 21), {"rows": 16, "thread_rows": 2, "k_step": 16}, "shifted", 0),
    "items share a block, masked": (PoolSpec(7, 20, masked=True), {"rows": 8, "items": 4, "k_step": 16}, "shifted", 1),
    "wide pieces": (PoolSpec(64, 16), {"rows": 64, "thread_rows": 8}, "large", 0),
    "16 bits off their alignment": (PoolSpec(35, 24, "bfloat16"), {"rows": 32, "k_step": 32}, "normal", 1),
    "float64, time-major": (PoolSpec(20, 11, "float64", "bkh"), {"rows": 16, "thread_rows": 4}, "normal", 1),
}
MMA_CASES = {
    "one strip, half of a block": (PoolSpec(9, 20), {"row_blocks": 1}, "normal", 0),
    "one strip, shifted, a row of odd length": (PoolSpec(16, 7), {"row_blocks": 1}, "shifted", 1),
    "four strips of odd items": (PoolSpec(50, 20), {"row_blocks": 1}, "odd", 0),
    "two strips, half a circle each": (PoolSpec(32, 16), {"row_blocks": 1, "prefetch": False}, "normal", 0),
    "two strips of two blocks": (PoolSpec(50, 32), {"row_blocks": 2}, "large", 0),
    "three strips, masked, a tail of steps": (PoolSpec(40, 17, masked=True), {"row_blocks": 1}, "shifted", 0),
    "three strips, time-major": (PoolSpec(45, 24, layout="bkh"), {"row_blocks": 1, "prefetch": False}, "normal", 3),
    "four strips, odd steps off their alignment": (PoolSpec(61, 33), {"row_blocks": 1}, "normal", 1),
    "four strips, time-major, masked": (PoolSpec(56, 10, layout="bkh", masked=True), {"row_blocks": 1}, "large", 2),
    "five strips": (PoolSpec(70, 40), {"row_blocks": 1, "prefetch": False}, "normal", 0),
    "five strips, shifted": (PoolSpec(80, 9), {"row_blocks": 1}, "shifted", 1),
    "two strips of four blocks, wide tiles": (PoolSpec(100, 16), {"row_blocks": 4, "columns": 32}, "normal", 0),
    "three strips of four blocks": (PoolSpec(130, 8), {"row_blocks": 4}, "normal", 0),
    "items of a warp each": (PoolSpec(7, 20), {"row_blocks": 1, "items": 4}, "normal", 1),
    "items of a warp each, masked and shifted": (PoolSpec(13, 5, masked=True), {"items": 2}, "shifted", 0),
    "items of a warp of two blocks": (PoolSpec(21, 6, layout="bkh"), {"row_blocks": 2, "items": 2}, "large", 1),
    "few variates, read at once": (PoolSpec(8, 40, masked=True), {"items": 2, "prefetch": False}, "normal", 1),
    "few variates, time-major": (PoolSpec(5, 21, layout="bkh"), {"row_blocks": 1}, "odd", 0),
    "float16": (PoolSpec(35, 24, "float16"), {"row_blocks": 1}, "normal", 1),
    "bfloat16, time-major": (PoolSpec(34, 11, "bfloat16", "bkh"), {"row_blocks": 2, "prefetch": False}, "large", 1),
    "one variate of one step": (PoolSpec(1, 1), {"row_blocks": 1}, "shifted", 0),
}
# Windows with all steps and with some, held and not; pairs of tiles once; warps across columns.
STREAMED_CASES = {
    "windows, a tail of rows and steps": (PoolSpec(37, 21), {"window": 16, "warps": 2, "across": 1}, "normal", 1),
    "mirrored tiles": (PoolSpec(40, 17, masked=True), {"window": 32, "warps": 2, "mirror": True}, "shifted", 0),
    "one window, read at once": (PoolSpec(15, 7, layout="bkh"), {"prefetch": False}, "large", 3),
    "warps across": (PoolSpec(70, 24), {"window": 64, "warps": 2, "across": 2, "mirror": False}, "normal", 0),
    "some steps, held": (PoolSpec(34, 130, "bfloat16"), {"chunk": 64, "hold": True, "across": 1}, "normal", 1),
    "some steps, staged again": (PoolSpec(34, 130), {"chunk": 96, "hold": False, "across": 1}, "shifted", 0),
    "some steps, spread": (PoolSpec(33, 131, layout="bkh"), {"chunk": 64, "across": 2, "spread": True}, "normal", 1),
    "windows of two blocks, float16": (PoolSpec(65, 24, "float16"), {"row_blocks": 2, "window": 32}, "normal", 1),
    "a window for one variate": (PoolSpec(1, 1), {"window": 16}, "shifted", 0),
    "begun anew": (PoolSpec(70, 24), {"window": 32, "warps": 2, "across": 1, "mirror": False}, "odd", 0),
    "begun anew, some steps": (PoolSpec(40, 130), {"chunk": 64, "across": 2, "hold": True, "spread": True}, "odd", 0),
}
WGMMA_CASES = {
    "a strip, a tail of rows and steps": (PoolSpec(33, 21), {"groups": 1, "prefetch": True}, "normal", 1),
    "a strip, read at once, masked": (PoolSpec(40, 17, masked=True), {"groups": 1, "prefetch": False}, "shifted", 0),
    "a pair of strips": (PoolSpec(70, 20), {"groups": 1, "prefetch": True}, "normal", 1),
    "a pair of strips, time-major": (PoolSpec(100, 11, layout="bkh"), {"groups": 1, "prefetch": False}, "shifted", 2),
    "a warpgroup a strip": (PoolSpec(70, 9, masked=True), {"groups": 2, "prefetch": True}, "large", 0),
    "a pair of strips of odd items": (PoolSpec(70, 20), {"groups": 1, "prefetch": True}, "odd", 0),
    "a warpgroup for two of three strips": (PoolSpec(137, 18), {"groups": 2, "prefetch": False}, "normal", 1),
    "three warpgroups": (PoolSpec(137, 8, layout="bkh"), {"groups": 3, "prefetch": True}, "normal", 3),
    "warpgroups of float16": (PoolSpec(70, 24, "float16"), {"groups": 2, "prefetch": True}, "normal", 1),
    "a pair in bfloat16": (PoolSpec(66, 11, "bfloat16", "bkh"), {"groups": 1, "prefetch": True}, "large", 1),
    "a pair whose weights are rounded": (PoolSpec(100, 20, "bfloat16"), {"groups": 1, "prefetch": True}, "normal", 1),
    "rounded weights of centred items, masked": (PoolSpec(75, 9, "bfloat16", masked=True), {"groups": 1}, "shifted", 0),
    "rounded weights of odd items": (PoolSpec(128, 20, "bfloat16", "bkh"), {"groups": 1}, "odd", 0),
    "a strip for one variate": (PoolSpec(1, 1), {"groups": 1}, "shifted", 0),
}
SUBJECTS = [(algorithm, case) for algorithm in three_pass_family() for case in CASES]
OF_ALGORITHM = {
    "one_pass": ONE_PASS_CASES,
    "one_pass_mma": MMA_CASES,
    "one_pass_streamed": STREAMED_CASES,
    "one_pass_wgmma": WGMMA_CASES,
}
SUBJECTS += [(algorithm, case) for algorithm, cases in OF_ALGORITHM.items() for case in cases]
QUICK = (
    *("centred items", "centred, part of a tile", "four strips, odd steps off their alignment"),
    *("windows, a tail of rows and steps", "a pair of strips", "begun anew"),
)


def _pool(algorithm: str, spec: PoolSpec, knobs: dict, build: str) -> EmulatedPool:
    # A persistent kernel has fewer blocks than items here, so that they go from one to the next.
    return EmulatedPool(spec, choice_with(spec, algorithm, knobs, GPU, one_block=True), build)


@pytest.mark.parametrize("build", ["address", "thread"])
@pytest.mark.parametrize(
    ("algorithm", "case"),
    [pytest.param(algorithm, case, marks=[] if case in QUICK else [pytest.mark.slow]) for algorithm, case in SUBJECTS],
)
def test_nothing_is_found_and_the_numbers_are_right(case: str, algorithm: str, build: str) -> None:
    spec, knobs, kind, shift = OF_ALGORITHM.get(algorithm, CASES)[case]
    pool = _pool(algorithm, spec, knobs, build)
    x, g, mask = inputs(spec, kind, items=3)
    x, g = guarded(x, shift), guarded(g, shift)
    truth = pool_ref(x, g, spec.layout, mask=mask)
    out_today, dx_today = composite_errors(x, g, truth, spec.layout, mask)
    state = pool.forward(x, mask)
    dx = pool.backward(x, g, state, mask)
    assert norm_error(state["out"], truth.out) <= 2 * tolerance(spec, "out", out_today)
    assert norm_error(dx, truth.dx) <= 2 * tolerance(spec, "dx", dx_today)
