from __future__ import annotations

import itertools

import pytest

from invpool.abi import DIRECTIONS, argument_names, parameter_list
from invpool.algorithms import ALGORITHMS, Algorithm, best_plan, choose, find_algorithm
from invpool.algorithms.three_pass import ThreePassPlan
from invpool.errors import PlanError
from invpool.gpu import DEFAULT_SHARED_BYTES, KNOWN_GPUS, known_gpu
from invpool.spec import DTYPES, PoolSpec

H200 = known_gpu("h200")
GRID = [
    PoolSpec(H, K, dtype, layout)
    for (H, K), dtype, layout in itertools.product(
        [(1, 1), (7, 96), (33, 4), (128, 32), (137, 97), (321, 96), (862, 20), (1024, 48), (1025, 3), (3, 20000)],
        DTYPES,
        ("bhk", "bkh"),
    )
]


def test_both_algorithms_are_found() -> None:
    assert {"three_pass", "recompute"} <= set(ALGORITHMS)


def test_reference_footprint() -> None:
    """The hand-written ancestor: (H*K + H) floats forward, (H*K + 2H) backward, no opt-in, nothing padded."""
    algorithm, spec = find_algorithm("three_pass"), PoolSpec(128, 32)
    for direction, floats in (("forward", 128 * 32 + 128), ("backward", 128 * 32 + 2 * 128)):
        plan = ThreePassPlan(direction, shared_order="transposed")  # type: ignore[arg-type]
        layout = algorithm.layout(spec, plan)
        assert layout.bytes == 4 * floats
        assert sum(region.pad for region in layout.regions) == 0
        assert not algorithm.needs_opt_in(spec, plan)  # type: ignore[attr-defined]
        assert algorithm.launch(spec, plan).shared_bytes <= DEFAULT_SHARED_BYTES
        assert algorithm.launch(spec, plan).threads == 128
        for gpu in KNOWN_GPUS.values():
            assert algorithm.reject(spec, plan, gpu) is None
    assert (16.5 * 1024, 17 * 1024) == (4 * (128 * 32 + 128), 4 * (128 * 32 + 2 * 128))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_legal_plans_keep_every_limit(name: str, direction: str) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    for spec, gpu in itertools.product(GRID[::3], (known_gpu("t4"), known_gpu("a10"), H200)):
        for plan in algorithm.legal(spec, gpu, direction):  # type: ignore[arg-type]
            launch = algorithm.launch(spec, plan)
            assert launch.shared_bytes <= gpu.shared_per_block
            assert spec.H <= launch.threads <= 1024
            assert launch.threads % 32 == 0
            cost = algorithm.cost(spec, plan, gpu, 100)
            assert gpu.blocks_per_sm(launch.threads, launch.shared_bytes, cost.registers) >= 1
            layout = algorithm.layout(spec, plan)
            assert layout.regions[0].offset % 16 == 0
            for before, after in itertools.pairwise(layout.regions):
                assert before.end == after.offset
            assert layout.regions[0].elements - layout.regions[0].pad == spec.H * spec.K


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_padding_removes_every_conflict_and_only_where_there_is_one(name: str) -> None:
    algorithm = ALGORITHMS[name]
    for K in range(1, 70):
        spec = PoolSpec(64, K)
        conflicts = {
            order: algorithm.access_wavefronts(spec, ThreePassPlan("forward", order))["own"]  # type: ignore[attr-defined, arg-type]
            for order in ("row", "padded", "transposed")
        }
        assert conflicts["transposed"] == 1
        # Padded for the widest access that divides K, which by scalars is at most 4-way.
        assert conflicts["padded"] <= min(4, conflicts["row"]) or conflicts["row"] == conflicts["padded"]
    assert algorithm.access_wavefronts(PoolSpec(64, 32), ThreePassPlan("forward", "row"))["own"] == 32  # type: ignore[attr-defined]


def test_the_default_lies_in_the_tuned_space() -> None:
    for spec, gpu in itertools.product(GRID[::5], (H200, known_gpu("t4"))):
        try:
            choice = choose(spec, gpu)
        except PlanError:
            continue
        for direction in DIRECTIONS:
            assert choice.plan(direction) in choice.algorithm.legal(spec, gpu, direction)


def test_recompute_is_never_the_default() -> None:
    for spec in GRID[::4]:
        try:
            assert choose(spec, H200).algorithm.name != "recompute"
        except PlanError:
            assert spec.H > 1024 or spec.H * spec.K * spec.scalar_bytes > 200_000


def test_cost_foretells_the_regression() -> None:
    """What made an epoch take 88 s instead of 17: H*H*K extra additions an item, seen before any run."""
    spec = PoolSpec(128, 32)
    cost = {}
    for name in ("three_pass", "recompute"):
        for direction in DIRECTIONS:
            best = best_plan(ALGORITHMS[name], spec, H200, direction, 16384)
            assert best is not None
            cost[name, direction] = best[1]
    for direction in DIRECTIONS:
        slow, fast = cost["recompute", direction], cost["three_pass", direction]
        assert slow.fma - fast.fma == 4 * 16384 * 128 * 128 * 32
        assert slow.seconds(H200) > 1.5 * fast.seconds(H200)
        assert slow.scratch_bytes == fast.scratch_bytes == 16384 * 128 * 128 * 4


def test_no_legal_plan_says_limit_need_and_what_fits() -> None:
    with pytest.raises(PlanError) as caught:
        choose(PoolSpec(900, 96), H200)
    text = str(caught.value)
    assert "needs 349200 bytes of shared memory a block, h200 has 232448" in text
    assert "K <= 62 at H=900 or H <= 592 at K=96 would fit" in text
    for H, K in ((900, 62), (592, 96)):
        choose(PoolSpec(H, K), H200, "three_pass")
    for H, K in ((900, 63), (593, 96)):
        with pytest.raises(PlanError):
            choose(PoolSpec(H, K), H200, "three_pass")


def test_rows_beyond_a_block() -> None:
    with pytest.raises(PlanError, match="one thread a row and a block has at most 1024"):
        choose(PoolSpec(1025, 3), H200)


def test_unknown_algorithm_and_knob() -> None:
    with pytest.raises(ValueError, match="'two_pass'; legal: recompute, three_pass"):
        find_algorithm("two_pass")
    with pytest.raises(ValueError, match="no plan parameter tile"):
        find_algorithm("three_pass").plan_from_knobs("forward", {"tile": 3})


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"columns": 3}, "columns is 3; legal: 1, 2, 4, 8"),
        ({"k_tile": 0}, "k_tile is 0; legal"),
        ({"shared_order": "zigzag"}, "shared_order is 'zigzag'; legal: row, padded, transposed"),
        ({"registers": 64, "columns": 8}, "needs about 78 registers a thread, the plan allows 64"),
    ],
)
def test_reasons_for_rejection(knobs: dict[str, object], reason: str) -> None:
    algorithm = find_algorithm("three_pass")
    plan = algorithm.plan_from_knobs("forward", knobs)
    assert reason in (algorithm.reject(PoolSpec(128, 32), plan, H200) or "legal")


def test_plans_survive_being_recorded() -> None:
    algorithm = find_algorithm("three_pass")
    for plan in algorithm.legal(PoolSpec(33, 5), H200, "backward"):
        assert algorithm.plan_from_knobs("backward", plan.knobs) == plan


def test_abi_order() -> None:
    f32, f16 = PoolSpec(3, 3), PoolSpec(3, 3, "float16")
    assert argument_names(f32, "forward", False) == ("x", "out", "lse", "scale", "mask", "B")
    assert argument_names(f32, "backward", False) == ("x", "out", "lse", "g", "dx", "scale", "mask", "B")
    assert argument_names(f32, "forward", True) == ("x", "out", "lse", "attn", "scale", "mask", "B")
    assert argument_names(f16, "forward", True) == ("x", "out", "out_acc", "lse", "attn", "scale", "mask", "B")
    assert argument_names(f16, "backward", True) == ("x", "out", "lse", "attn", "g", "dx", "scale", "mask", "B")
    assert "const Scalar* __restrict__ attn" in parameter_list(f32, "backward", True)
    assert "    Scalar* __restrict__ attn" in parameter_list(f32, "forward", True)
    assert parameter_list(f32, "forward", True).endswith("long long B")
