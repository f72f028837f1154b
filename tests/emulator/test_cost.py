"""Cost of a plan against what the emulator counts: exact for bytes and barriers, 5 % for the rest."""

from __future__ import annotations

import pytest
import torch

from emulator.pools import GPU, inputs, three_pass_family
from helpers import choice_with
from invpool.abi import DIRECTIONS, Direction, argument_names
from invpool.algorithms import Choice, best_plan, choose, find_algorithm
from invpool.emulator import EmulatedKernel, Output
from invpool.emulator.pool import EmulatedPool
from invpool.layout import wavefronts
from invpool.spec import PoolSpec

CASES = {
    "default spec": (PoolSpec(128, 32), None),
    "wide columns, tail tile": (PoolSpec(64, 40), {"shared_order": "transposed", "k_tile": 16, "columns": 8}),
    "rows, part of a warp": (PoolSpec(37, 21), {"shared_order": "row", "k_tile": 8, "columns": 8}),
    "rows of whole packs": (PoolSpec(36, 20), {"shared_order": "row", "k_tile": 8, "columns": 4}),
    "padded rows": (PoolSpec(40, 16), {"shared_order": "padded", "k_tile": 16, "columns": 8}),
    "16 bits, time-major": (PoolSpec(64, 72, "float16", "bkh"), {"k_tile": 32, "columns": 4}),
    "float64, masked": (PoolSpec(33, 12, "float64", masked=True), {"k_tile": 8, "columns": 2}),
}
ITEMS = 2


def measured(algorithm: str, spec: PoolSpec, knobs: dict | None, direction: Direction):
    """(cost, counters, DRAM bytes) of one launch over items that are not centred and of which everything takes part."""
    found = find_algorithm(algorithm)
    plans = []
    for d in DIRECTIONS:
        best = best_plan(found, spec, GPU, d)
        assert best is not None
        wanted = [p for p in found.legal(spec, GPU, d) if knobs.items() <= p.knobs.items()] if knobs else [best[0]]
        plans.append(wanted[0])
    return count(spec, Choice(found, *plans), direction)


def count(spec: PoolSpec, choice: Choice, direction: Direction):
    """The same of plans that are given."""
    found, pool = choice.algorithm, EmulatedPool(spec, choice, "count")
    x, g, mask = inputs(spec, "normal", ITEMS)
    mask = None if mask is None else torch.ones_like(mask)
    state, launched = pool.run("forward", {"x": x, "mask": mask})
    if direction == "backward":
        _, launched = pool.run("backward", {**state, "x": x, "g": g, "mask": mask})
    counters = launched.counters
    assert counters is not None
    dram = 0
    for name, traffic in zip(argument_names(direction, found.state(spec)), counters.arguments, strict=True):
        if name == "attn":  # larger than a cache by the time it is read again
            dram += traffic.read_bytes + traffic.write_bytes
        else:
            dram += traffic.bytes_read_at_all + traffic.bytes_written_at_all
    return found.cost(spec, pool.choice.plan(direction), GPU, ITEMS), counters, dram


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("algorithm", three_pass_family())
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if i < 2 else [pytest.mark.slow]) for i, name in enumerate(CASES)]
)
def test_cost_is_what_is_counted(case: str, algorithm: str, direction: Direction) -> None:
    spec, knobs = CASES[case]
    cost, counters, dram = measured(algorithm, spec, None if algorithm == "one_pass" else knobs, direction)
    assert cost.dram_bytes == dram
    assert cost.barriers == counters.barriers
    if algorithm == "one_pass":
        # Parts of warps that load tiles of few rows are counted whole; passes of memory are an estimate there.
        assert cost.fma == pytest.approx(counters.issued.fma_class, rel=0.1)
        assert cost.mufu == pytest.approx(counters.issued.transcendental, rel=0.1)
        return
    assert cost.fma == pytest.approx(counters.issued.fma_class, rel=0.05)
    assert cost.mufu == pytest.approx(counters.issued.transcendental, rel=0.05)
    assert cost.shared_wavefronts == pytest.approx(counters.shared_wavefronts, rel=0.05)
    assert cost.global_wavefronts == pytest.approx(counters.global_wavefronts, rel=0.05)


TENSOR_CORE_CASES: dict[str, tuple[str, PoolSpec, dict[str, object] | None]] = {
    "default spec": ("one_pass_mma", PoolSpec(128, 32), None),
    "three strips, tails": ("one_pass_mma", PoolSpec(37, 21), {"row_blocks": 1}),
    "16 bits, time-major": ("one_pass_mma", PoolSpec(64, 24, "float16", "bkh"), {"row_blocks": 2}),
    "items of a warp each, masked": ("one_pass_mma", PoolSpec(7, 20, masked=True), {"items": 2}),
    "default spec, streamed": ("one_pass_streamed", PoolSpec(128, 32), None),
    "some steps, staged again": (
        "one_pass_streamed",
        PoolSpec(70, 130, layout="bkh", masked=True),
        {"chunk": 64, "hold": False},
    ),
    "mirrored, 16 bits": ("one_pass_streamed", PoolSpec(65, 24, "float16"), {"window": 32, "mirror": True}),
    "default spec, by warpgroups": ("one_pass_wgmma", PoolSpec(128, 32), None),
    "three strips for two warpgroups": (
        "one_pass_wgmma",
        PoolSpec(137, 21, layout="bkh", masked=True),
        {"groups": 2, "prefetch": False},
    ),
    "one strip, 16 bits": ("one_pass_wgmma", PoolSpec(64, 24, "float16"), {"groups": 1}),
}
# Operations foretold over those counted, least and most: (multiply-adds), (transcendental ones).
NEAR = {
    "one_pass_mma": ((0.45, 1.7), (0.35, 1.3)),
    "one_pass_streamed": ((0.45, 2.0), (0.7, 1.4)),
    "one_pass_wgmma": ((0.75, 1.7), (0.9, 1.2)),
}
QUICK = ("default spec", "default spec, by warpgroups")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TENSOR_CORE_CASES]
)
def test_cost_on_tensor_cores(case: str, direction: Direction) -> None:
    """Exact for the bytes alone. Operations are an estimate, barriers and passes of memory not foretold yet."""
    algorithm, spec, knobs = TENSOR_CORE_CASES[case]
    choice = choice_with(spec, algorithm, knobs, GPU) if knobs else choose(spec, GPU, algorithm)
    cost, counters, dram = count(spec, choice, direction)
    assert cost.dram_bytes + spec.scalar_bytes == dram  # the scale
    assert cost.barriers is None
    (least_fma, most_fma), (least_mufu, most_mufu) = NEAR[algorithm]
    assert least_fma < cost.fma / counters.issued.fma_class < most_fma
    assert least_mufu < cost.mufu / counters.issued.transcendental < most_mufu


def test_the_ablation_costs_what_it_is_kept_to_show() -> None:
    (_, means_once, _), (_, means_anew, _) = (
        measured(name, PoolSpec(64, 40), CASES["wide columns, tail tile"][1], "backward")
        for name in ("three_pass", "recompute")
    )
    assert means_anew.operations.fma_class > 2 * means_once.operations.fma_class
    assert means_anew.shared.read_bytes > 2 * means_once.shared.read_bytes


# ---- the counters themselves, where the right number is known

STRIDED = """
struct alignas(16) Four { float lane[4]; };
extern "C" __global__ void strided(const float* x, float* out, long long stride) {
  __shared__ float tile[4096];
  const int t = threadIdx.x;
  for (int i = t; i < 4096; i += blockDim.x) tile[i] = x[0];
  __syncthreads();
  float sum = 0;
  sum += tile[t * stride];
  const Four four = *reinterpret_cast<const Four*>(tile + t * 4 * stride);
  out[t] = sum * four.lane[0] + four.lane[1];
}
"""


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 16, 31])
def test_bank_conflicts_are_counted_by_the_layout_rule(stride: int) -> None:
    kernel = EmulatedKernel(STRIDED, build="count")
    launched = kernel.launch(1, 32, 0, [torch.ones(1), Output((32,), torch.float32), stride])
    counters = launched.counters
    assert counters is not None
    fill = 4096 // 32
    expected = (
        fill + wavefronts([4 * stride * t for t in range(32)], 4) + wavefronts([16 * stride * t for t in range(32)], 16)
    )
    assert counters.shared_wavefronts == expected
    assert (counters.shared.writes, counters.shared.write_bytes) == (4096, 4 * 4096)
    assert (counters.shared.reads, counters.shared.read_bytes) == (64, 32 * 4 + 32 * 16)
    x, out, _ = counters.arguments
    assert (x.reads, x.bytes_read_at_all, x.writes) == (4096, 4, 0)
    assert (out.writes, out.write_bytes, out.bytes_written_at_all, out.reads) == (32, 128, 128, 0)
    assert counters.global_wavefronts == fill + 1
    assert counters.barriers == 1


def test_a_product_that_is_added_is_one_multiply_add() -> None:
    body = """
extern "C" __global__ void operations(const float* x, float* out) {
  const float a = x[0], b = x[1], c = x[2];
  float sum = a * b + c;      // fma
  sum -= a * c;               // fma
  sum += b;                   // add
  sum = sum * b;              // multiply
  sum *= 2;                   // multiply
  sum = exp(sum) / log(b);    // exp, log, divide
  out[threadIdx.x] = fmax(-sum, a * b + a * c);  // extremum, multiply, fma
}
"""
    x = torch.tensor([0.5, 1.5, 2.0])
    launched = EmulatedKernel(body, build="count").launch(3, 2, 0, [x, Output((2,), torch.float32)])
    counters = launched.counters
    assert counters is not None
    ops = counters.operations
    assert (ops.fma, ops.add, ops.multiply, ops.divide, ops.exp, ops.log, ops.extremum) == (18, 6, 18, 6, 6, 6, 6)
    # Two threads take the place of a warp of 32.
    assert counters.issued.exp == 3 * 32
    a, b, c = (value.double() for value in x)
    value = torch.exp(((a * b + c) - a * c + b) * b * 2) / torch.log(b)
    torch.testing.assert_close(
        launched.outputs[0].double(), torch.maximum(-value, a * b + a * c).expand(2), rtol=1e-6, atol=0
    )


def test_counting_does_not_change_a_bit() -> None:
    spec = PoolSpec(33, 17)
    plans = [best_plan(find_algorithm("three_pass"), spec, GPU, d)[0] for d in DIRECTIONS]
    choice = Choice(find_algorithm("three_pass"), *plans)
    x, g, _ = inputs(spec, "shifted")
    plain, counting = EmulatedPool(spec, choice), EmulatedPool(spec, choice, "count")
    state = plain.forward(x)
    for name, value in counting.forward(x).items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(counting.backward(x, g, state), plain.backward(x, g, state))
