"""Every algorithm, element type and layout, over H and K chosen pairwise, against float64.

The quick part takes an eighth of the pairs for each combination, all pairs among them; the slow part another eighth,
the long part the rest.
INVPOOL_MATRIX=full takes every H with every K: one long run.
"""

from __future__ import annotations

import itertools
import os

import pytest

from emulator.pools import default_choice, guarded, inputs, random_choice
from helpers import TENSOR_CORES
from invpool.algorithms import ALGORITHMS
from invpool.check import tolerance
from invpool.emulator.pool import EmulatedPool
from invpool.errors import PlanError
from invpool.reference import composite_errors, norm_error, pool_ref
from invpool.spec import DTYPES, LAYOUTS, PoolSpec

SIZES = (1, 2, 3, 5, 17, 31, 32, 33, 63, 65, 127, 128, 257)
# Each H with two K and each K with two H, small with large as well as near with near.
PAIRS = [
    (SIZES[i], SIZES[(step * i + shift) % len(SIZES)]) for step, shift in ((1, 0), (5, 4)) for i in range(len(SIZES))
]
PAIRS.remove((257, 257))  # needs more shared memory than a block of any GPU has
COMBINATIONS = [
    combination
    for combination in itertools.product(sorted(ALGORITHMS), DTYPES, LAYOUTS)
    if combination[0] not in TENSOR_CORES or combination[1] != "float64"
]
STRIDE = 8
FEWEST_ROWS = 512  # as in invpool.check
# Of items of few numbers, some that are nearly tied make up the norm of dx: over sixteen times as many rows
# one_pass_mma is at 1.4 times the composite's error, over 512 anywhere from 0.7 to 2.3.
FEWEST_ROWS_OF_TINY_ITEMS = 8192


def _cases() -> list:
    cases = []
    pairs = list(itertools.product(SIZES, SIZES)) if os.environ.get("INVPOOL_MATRIX") == "full" else PAIRS
    for number, (algorithm, dtype, layout) in enumerate(COMBINATIONS):
        for position, (H, K) in enumerate(pairs):
            turn = (position - number) % STRIDE
            # One in three is masked, whatever the stride picks.
            spec = PoolSpec(H, K, dtype, layout, masked=(position // STRIDE + number) % 3 == 0)
            marks = [] if turn == 0 else [pytest.mark.slow] if turn == 1 else [pytest.mark.long]
            cases.append(pytest.param(algorithm, spec, position, id=f"{algorithm}-{spec.slug}", marks=marks))
    return cases


def test_the_pairs_cover_every_size() -> None:
    assert len(PAIRS) == 25
    assert len(set(PAIRS)) == 25
    assert {h for h, _ in PAIRS} == {k for _, k in PAIRS} == set(SIZES)


@pytest.mark.parametrize(("algorithm", "spec", "position"), _cases())
def test_against_float64(algorithm: str, spec: PoolSpec, position: int) -> None:
    try:
        choice = default_choice(spec, algorithm) if position % 2 else random_choice(spec, algorithm)
    except (PlanError, IndexError):
        # random_choice has nothing to draw from either: the item must be larger than a block's shared memory, or, in
        # one_pass_mma's backward and both directions of one_pass_wgmma, its rows than a thread's registers.
        longest = {"one_pass_mma": 224 if spec.H > 16 else 257, "one_pass_wgmma": 128}.get(algorithm, 257)
        assert algorithm not in ("one_pass", "one_pass_streamed")
        assert spec.K > longest or spec.H * (spec.K + 2) * spec.scalar_bytes > 227 * 1024
        return
    pool = EmulatedPool(spec, choice)
    kinds = ("normal", "large", "shifted")
    for shift, kind in enumerate(kinds):
        tiny = (spec.H <= 3 or spec.H * spec.K <= 64) and spec.dtype == "float32" and algorithm in TENSOR_CORES
        rows = FEWEST_ROWS_OF_TINY_ITEMS if tiny else FEWEST_ROWS
        x, g, mask = inputs(spec, kind, items=max(2, rows // spec.H))
        x, g = guarded(x, shift), guarded(g, shift)  # a view may start at any element
        truth = pool_ref(x, g, spec.layout, mask=mask)
        out_today, dx_today = composite_errors(x, g, truth, spec.layout, mask)
        state = {name: guarded(value) for name, value in pool.forward(x, mask, orders=2).items()}
        dx = pool.backward(x, g, state, mask, orders=2)
        plans = f"{kind}: {choice.forward}; {choice.backward}"
        assert norm_error(state["out"], truth.out) <= tolerance(spec, "out", out_today), plans
        assert norm_error(dx, truth.dx) <= tolerance(spec, "dx", dx_today), plans


@pytest.mark.parametrize(
    ("algorithm", "H"),
    [
        ("one_pass", 1025),
        ("one_pass_mma", 768),
        ("one_pass_streamed", 1025),
        ("one_pass_wgmma", 1025),
        ("recompute", 1000),
        ("three_pass", 1000),
    ],
)
def test_sums_over_many_variates_keep_their_digits(algorithm: str, H: int) -> None:
    """Summed in one chain, so many terms cost dx more than twice the composite's error."""
    spec = PoolSpec(H, 1)
    pool = EmulatedPool(spec, default_choice(spec, algorithm))
    x, g, _ = inputs(spec, "normal", items=1)
    truth = pool_ref(x, g)
    dx = pool.backward(x, g, pool.forward(x))
    assert norm_error(dx, truth.dx) <= 4e-7
