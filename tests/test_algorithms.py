from __future__ import annotations

import itertools
import re

import pytest

from helpers import TENSOR_CORES, Persistent
from invpool.abi import DIRECTIONS, argument_names, parameter_list
from invpool.algorithms import ALGORITHMS, Algorithm, Launch, best_plan, choose, find_algorithm
from invpool.algorithms.three_pass import ThreePassPlan
from invpool.cost import Cost
from invpool.errors import PlanError
from invpool.gpu import DEFAULT_ARCHS, DEFAULT_SHARED_BYTES, KNOWN_GPUS, known_gpu
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


def test_the_algorithms_are_found() -> None:
    assert {"one_pass", *TENSOR_CORES, "three_pass", "recompute"} <= set(ALGORITHMS)


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
            assert 32 <= launch.threads <= 1024
            assert launch.blocks(100) * launch.items_per_block * launch.threads >= 100
            assert launch.threads % 32 == 0
            cost = algorithm.cost(spec, plan, gpu, 100)
            assert gpu.blocks_per_sm(launch.threads, launch.shared_bytes, cost.registers) >= 1
            layout = algorithm.layout(spec, plan)
            assert layout.regions[0].offset % 16 == 0
            for before, after in itertools.pairwise(layout.regions):
                assert before.end == after.offset
            assert layout.bytes * launch.items_per_block <= launch.shared_bytes


@pytest.mark.parametrize("name", ["recompute", "three_pass"])
def test_the_staged_item_is_all_of_it(name: str) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    for spec in GRID[::3]:
        for plan in algorithm.legal(spec, H200, "forward"):
            staged = algorithm.layout(spec, plan).regions[0]
            assert staged.elements - staged.pad == spec.H * spec.K
            assert algorithm.launch(spec, plan).threads >= spec.H


def test_one_pass_takes_every_shape_on_every_gpu() -> None:
    algorithm = find_algorithm("one_pass")
    for spec, gpu in itertools.product(GRID, KNOWN_GPUS.values()):
        for direction in DIRECTIONS:
            assert algorithm.legal(spec, gpu, direction), (spec, gpu.name)
    for H, K in ((8192, 4096), (8192, 1), (2000, 3)):
        for dtype in DTYPES:
            assert choose(PoolSpec(H, K, dtype), known_gpu("t4")).algorithm.name == "one_pass"  # type: ignore[arg-type]


def test_one_pass_mma_is_for_what_tensor_cores_take() -> None:
    """Wherever it is legal it fits; where it cannot be, the reason is a limit of the hardware, by name."""
    algorithm = find_algorithm("one_pass_mma")
    for spec, gpu, direction in itertools.product(GRID[::2], KNOWN_GPUS.values(), DIRECTIONS):
        plans = algorithm.legal(spec, gpu, direction)
        if spec.dtype == "float64" or gpu.arch == "sm_75":
            assert not plans, (spec, gpu.name)
        elif spec.H <= 137 and spec.K <= 97 and gpu.shared_per_block > 200 * 1024:
            assert plans, (spec, gpu.name)
    reasons = {
        (PoolSpec(33, 4, "float64"), "h200"): "float64 wants another algorithm",
        (PoolSpec(33, 4), "t4"): "needs sm_80 or newer, not sm_75 (t4)",
        (PoolSpec(1025, 3), "h200"): "17 strips of 64 rows, one a warp; legal: at most 16",
        (PoolSpec(137, 168), "h200"): "needs about 234 registers for each of 288 threads; a thread has at most 255",
        (
            PoolSpec(137, 400),
            "h200",
        ): "bytes of shared memory a block, h200 has 232448; lower items, set prefetch=False",
    }
    for (spec, gpu_name), reason in reasons.items():
        with pytest.raises(PlanError, match=re.escape(reason)):
            choose(spec, known_gpu(gpu_name), "one_pass_mma")


def test_one_pass_mma_launches_a_warp_a_strip_and_a_wave_of_blocks() -> None:
    algorithm = find_algorithm("one_pass_mma")
    for spec, gpu, direction in itertools.product(GRID[:40:3], (known_gpu("a10"), H200), DIRECTIONS):
        for plan in algorithm.legal(spec, gpu, direction)[::5]:
            launch, layout = algorithm.launch(spec, plan), algorithm.layout(spec, plan)
            strips = algorithm.strips(spec, plan)  # type: ignore[attr-defined]
            assert launch.threads == 32 * strips * plan.items
            assert (strips - 1) * 16 * plan.row_blocks < spec.H <= strips * 16 * plan.row_blocks
            assert launch.most_blocks == gpu.wave(launch.threads, launch.shared_bytes, plan.registers)
            assert launch.blocks(10**6) == launch.most_blocks
            assert launch.blocks(1) == 1
            assert plan == algorithm.fitted(spec, plan, gpu)
            assert algorithm.plan_from_knobs(direction, plan.knobs) == plan
            # ldmatrix and cp.async want 16 bytes, and every item of a block has the same layout.
            assert all(region.offset % 16 == 0 for region in layout.regions)
            assert launch.shared_bytes % (16 * plan.items) == 0
            assert ("Fetched" in {region.label for region in layout.regions}) == plan.prefetch


@pytest.mark.parametrize(
    ("spec", "direction", "knobs", "reason"),
    [
        (PoolSpec(128, 32), "forward", {"row_blocks": 3}, "row_blocks is 3; legal: 1, 2, 4"),
        (PoolSpec(128, 32), "forward", {"columns": 8}, "columns is 8; legal: 16, 32"),
        (PoolSpec(128, 32), "backward", {"columns": 32}, "columns is 32; legal: 16"),
        (PoolSpec(128, 32), "forward", {"prefetch": 1}, "prefetch is 1; legal: False, True"),
        (PoolSpec(128, 32), "forward", {"items": True}, "items is True; legal: 1, 2, 4, 8"),
        (PoolSpec(128, 32), "forward", {"most_blocks": 0}, "most_blocks is 0; it must be at least 1"),
        (PoolSpec(128, 32), "forward", {"row_blocks": 1, "columns": 32}, "lower columns or raise row_blocks"),
        (PoolSpec(16, 32), "forward", {"row_blocks": 2}, "strips of 32 rows for 16 variates; lower row_blocks"),
        (PoolSpec(128, 32), "forward", {"items": 2}, "items share a block only where a warp holds one"),
        (PoolSpec(128, 32), "backward", {"row_blocks": 4, "registers": 128}, "registers a thread, the plan allows 128"),
        (PoolSpec(7, 1000), "forward", {"row_blocks": 1, "items": 8}, "lower items, set prefetch=False"),
    ],
)
def test_reasons_of_one_pass_mma(spec: PoolSpec, direction: str, knobs: dict[str, object], reason: str) -> None:
    algorithm = find_algorithm("one_pass_mma")
    plan = algorithm.plan_from_knobs(direction, knobs)  # type: ignore[arg-type]
    assert reason in (algorithm.reject(spec, plan, H200) or "legal")


def test_one_pass_streamed_takes_every_shape_on_tensor_cores() -> None:
    algorithm = find_algorithm("one_pass_streamed")
    for spec, gpu, direction in itertools.product(GRID[::7], KNOWN_GPUS.values(), DIRECTIONS):
        takes = spec.dtype != "float64" and gpu.arch != "sm_75" and spec.K <= 1024
        assert bool(algorithm.legal(spec, gpu, direction)) == takes, (spec, gpu.name)


def test_one_pass_wgmma_is_for_one_architecture() -> None:
    algorithm = find_algorithm("one_pass_wgmma")
    for spec, gpu, direction in itertools.product(GRID[::2], KNOWN_GPUS.values(), DIRECTIONS):
        plans = algorithm.legal(spec, gpu, direction)
        if spec.dtype == "float64" or gpu.arch != "sm_90" or spec.K > 128:
            assert not plans, (spec, gpu.name)
        elif spec.H <= 321:
            assert plans, (spec, gpu.name)
    reasons = {
        (PoolSpec(33, 4, "float64"), "h200"): "float64 wants another algorithm",
        (PoolSpec(33, 4), "b200"): "needs sm_90, whose own features it uses, not sm_100 (b200)",
        (PoolSpec(137, 129), "h200"): "a strip's operand of more than 128 steps does not fit registers",
        (PoolSpec(1000, 96), "h200"): "bytes of shared memory a block, h200 has 232448",
    }
    for (spec, gpu_name), reason in reasons.items():
        with pytest.raises(PlanError, match=re.escape(reason)):
            choose(spec, known_gpu(gpu_name), "one_pass_wgmma")
    assert algorithm.arch_target("sm_90") == "sm_90a"


def test_one_pass_wgmma_launches_warpgroups_and_a_wave_of_blocks() -> None:
    algorithm = find_algorithm("one_pass_wgmma")
    for spec, direction in itertools.product(GRID[:40], DIRECTIONS):
        for plan in algorithm.legal(spec, H200, direction)[::3]:
            launch, layout = algorithm.launch(spec, plan), algorithm.layout(spec, plan)
            assert launch.threads == 128 * plan.groups
            assert plan.groups <= algorithm.strips(spec) == -(-spec.H // 64)  # type: ignore[attr-defined]
            assert launch.most_blocks == H200.wave(launch.threads, launch.shared_bytes, plan.registers)
            assert plan == algorithm.fitted(spec, plan, H200)
            assert algorithm.plan_from_knobs(direction, plan.knobs) == plan
            assert all(region.offset % 16 == 0 for region in layout.regions)
            assert ("Fetched" in {region.label for region in layout.regions}) == plan.prefetch


@pytest.mark.parametrize(
    ("spec", "knobs", "reason"),
    [
        (PoolSpec(128, 32), {"groups": 5}, "groups is 5; legal: 1, 2, 3, 4"),
        (PoolSpec(128, 32), {"groups": True}, "groups is True; legal: 1, 2, 3, 4"),
        (PoolSpec(128, 32), {"prefetch": 1}, "prefetch is 1; legal: False, True"),
        (PoolSpec(128, 32), {"registers": 255}, "registers is 255; legal: 80, 96, 128, 168"),
        (PoolSpec(128, 32), {"most_blocks": 0}, "most_blocks is 0; it must be at least 1"),
        (PoolSpec(128, 32), {"groups": 3}, "3 warpgroups for 2 strips of 64 rows; lower groups"),
        (
            PoolSpec(256, 32),
            {"groups": 4, "registers": 168},
            "168 registers for 512 threads; lower registers or groups",
        ),
    ],
)
def test_reasons_of_one_pass_wgmma(spec: PoolSpec, knobs: dict[str, object], reason: str) -> None:
    algorithm = find_algorithm("one_pass_wgmma")
    for direction in DIRECTIONS:
        plan = algorithm.plan_from_knobs(direction, knobs)
        assert reason in (algorithm.reject(spec, plan, H200) or "legal")


def test_archs_that_an_algorithm_cannot_serve_pass_it_over() -> None:
    spec = PoolSpec(128, 32)
    assert choose(spec, H200).algorithm.name == "one_pass_wgmma"
    assert choose(spec, H200, archs=("sm_90",)).algorithm.name == "one_pass_wgmma"
    for archs in (("sm_90", "sm_80"), ("sm_90", "sm_100"), DEFAULT_ARCHS):
        assert choose(spec, H200, archs=archs).algorithm.name in ("one_pass_mma", "one_pass_streamed")
    for gpu in KNOWN_GPUS.values():
        if gpu.arch != "sm_90":
            assert choose(spec, gpu, archs=(gpu.arch,)).algorithm.name != "one_pass_wgmma"
    assert choose(spec, H200, archs=("sm_90", "sm_75")).algorithm.name in ("one_pass", "three_pass")
    assert choose(spec, known_gpu("t4")).algorithm.name in ("one_pass", "three_pass")
    with pytest.raises(PlanError, match="one_pass_wgmma: needs sm_90, whose own features it uses, not sm_100, sm_80"):
        choose(spec, H200, "one_pass_wgmma", archs=("sm_100", "sm_90", "sm_80"))
    with pytest.raises(PlanError, match="one_pass_mma: needs sm_80 or newer, not sm_75"):
        choose(spec, H200, "one_pass_mma", archs=("sm_75", "sm_90"))


def test_one_pass_keeps_a_row_of_state_and_no_scratch() -> None:
    algorithm, spec = find_algorithm("one_pass"), PoolSpec(862, 96)
    for direction in DIRECTIONS:
        best = best_plan(algorithm, spec, H200, direction, 16)
        assert best is not None
        assert best[1].scratch_bytes == 0
    assert "attn" not in algorithm.state(spec)


@pytest.mark.parametrize("name", ["recompute", "three_pass"])
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
        assert choose(spec, H200).algorithm.name != "recompute"


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
        choose(PoolSpec(900, 96), H200, "three_pass")
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
        choose(PoolSpec(1025, 3), H200, "three_pass")


def test_unknown_algorithm_and_knob() -> None:
    with pytest.raises(
        ValueError, match="'two_pass'; legal: one_pass, one_pass_mma, one_pass_streamed, one_pass_wgmma, recompute"
    ):
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


@pytest.mark.parametrize(
    ("launch", "text", "blocks"),
    [
        (Launch(32, 0), "B", [1, 10, 1000]),
        (Launch(32, 0, 4, 3), "ceil(B / 4) * 3", [3, 9, 750]),
        (Launch(32, 0, most_blocks=10), "min(B, 10)", [1, 10, 10]),
        (Launch(32, 0, 4, 3, 100), "min(ceil(B / 4) * 3, 100)", [3, 9, 100]),
    ],
)
def test_the_grid_of_a_launch(launch: Launch, text: str, blocks: list[int]) -> None:
    assert launch.grid_text == text
    assert [launch.blocks(batch) for batch in (1, 10, 1000)] == blocks
    uncapped = Launch(32, 0, launch.items_per_block, launch.blocks_per_item)
    assert [launch.tasks(batch) for batch in (1, 10, 1000)] == [uncapped.blocks(batch) for batch in (1, 10, 1000)]


def test_a_persistent_plan_is_fitted_to_the_gpu_it_is_made_for() -> None:
    algorithm, spec = Persistent(), PoolSpec(128, 32)
    for gpu in (H200, known_gpu("t4")):
        for direction in DIRECTIONS:
            best = best_plan(algorithm, spec, gpu, direction)
            assert best is not None
            plan, cost = best
            launch = algorithm.launch(spec, plan)
            wave = gpu.blocks_per_sm(launch.threads, launch.shared_bytes, cost.registers) * gpu.sm_count
            assert plan.knobs["most_blocks"] == launch.most_blocks == launch.blocks(10**6) == wave
            assert algorithm.plan_from_knobs(direction, plan.knobs) == plan
            # Nothing but the speed depends on the cap.
            assert algorithm.reject(spec, plan, known_gpu("b200")) is None


def test_cost_of_a_persistent_kernel() -> None:
    def time(blocks: int, tasks: int | None) -> float:
        work = 1_000_000 * (blocks if tasks is None else tasks)
        return Cost(work, False, 0, 0, 0, 0, 0, 0, 256, blocks, 32, tasks=tasks).terms(H200)["fma"]

    wave = H200.wave(256, 0, 32)
    assert wave == 8 * 132
    one = time(1, None)
    assert one == time(1, 1)
    # One wave takes the time of all its blocks on one SM; so does every round after it, the last one too.
    assert time(wave, wave) == time(wave, None)
    assert time(wave, 3 * wave) == pytest.approx(3 * time(wave, None))
    assert time(wave, 3 * wave + 1) == time(wave, 4 * wave)
    # The same as so many waves of blocks.
    for tasks in (wave // 2, wave, wave + 1, 5 * wave):
        assert time(min(tasks, wave), tasks) == pytest.approx(time(tasks, None))
    # A cap of less than a wave: the rounds are shorter, there are more of them, and none of them is idle.
    assert time(132 * 5, 132 * 10) == pytest.approx(10 * one)
    assert time(wave, 132 * 10) == pytest.approx(16 * one)
    # A cap made for a larger GPU: its blocks come in waves.
    assert time(2 * wave, 4 * wave) == pytest.approx(time(wave, 4 * wave))
    assert time(0, 0) == 0


def test_abi_order() -> None:
    assert argument_names("forward", ("lse",)) == ("x", "out", "lse", "scale", "mask", "B")
    assert argument_names("backward", ("lse",)) == ("x", "out", "lse", "g", "dx", "scale", "mask", "B")
    three_pass, one_pass = find_algorithm("three_pass"), find_algorithm("one_pass")
    assert three_pass.state(PoolSpec(3, 3)) == ("lse", "attn")
    assert three_pass.state(PoolSpec(3, 3, "float16")) == ("out_acc", "lse", "attn")
    assert one_pass.state(PoolSpec(3, 3)) == ("out_acc", "lse", "lse_low")
    state = ("out_acc", "lse", "attn")
    assert argument_names("forward", state) == ("x", "out", "out_acc", "lse", "attn", "scale", "mask", "B")
    assert argument_names("backward", state) == ("x", "out", "lse", "attn", "g", "dx", "scale", "mask", "B")
    assert "const Scalar* __restrict__ attn" in parameter_list("backward", state)
    assert "    Scalar* __restrict__ attn" in parameter_list("forward", state)
    assert parameter_list("forward", state).endswith("long long B")
