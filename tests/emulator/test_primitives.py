"""The PTX primitives: numbers against NumPy, faults that are planted, what is counted, and what nvcc makes of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from emulator.pools import cut_off
from invpool.compile import Target, compile_source
from invpool.emulator import EmulatedKernel, Launched, Output
from invpool.errors import CompilerNotFoundError, EmulationError, SanitizerError
from invpool.render import inline_header

HEAD = f"""
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif
using Scalar = float;
{inline_header("include/primitives.cuh")}
"""


def kernel(body: str, parameters: str, build: str = "plain", portable_switch: bool = False) -> EmulatedKernel:
    source = f'{HEAD}extern "C" __global__ void k({parameters}) {{\n  const int t = threadIdx.x;\n{body}}}\n'
    return EmulatedKernel(source, build=build, portable_switch=portable_switch)


def line_of(body: str, text: str) -> int:
    """The line of the source at which a text of the body stands."""
    before = HEAD.count("\n") + 2
    return next(before + number for number, line in enumerate(body.splitlines(), 1) if text in line)


def run(
    body: str,
    parameters: str,
    arguments: list[Any],
    threads: int = 32,
    build: str = "plain",
    portable_switch: bool = False,
    **options: Any,
) -> Launched:
    """One block of the kernel."""
    return kernel(body, parameters, build, portable_switch).launch(1, threads, 0, arguments, **options)


RUNS = {
    "fibers": {},
    "portable switch": {"portable_switch": True},
    "threads": {"engine": "threads"},
    "address": {"build": "address"},
    "thread": {"build": "thread"},
    "count": {"build": "count"},
}
every_run = pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)


# ---- conversions and exp2

CONVERT = """  const Halves pair = pack_halves(x[2 * t], x[2 * t + 1]);
  halves[t] = pair;
  back[2 * t] = low_half(pair);
  back[2 * t + 1] = high_half(pair);
"""
CONVERT_PARAMETERS = "const float* x, unsigned* halves, float* back"


def hard_numbers() -> np.ndarray:
    """Every fp16 number, what lies halfway to the next, the float32 neighbours of that; limits of float32 too."""
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (every[:-1] + every[1:]) / 2
    numbers = [every, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(0))]
    edges = [65519.996, 65520, 65536, 3e38, np.inf, np.nan, 1e-45, 1e-38, 2**-24, 2**-25, 2.0**-25 * 1.0001, 0.0]
    positive = np.concatenate([*numbers, np.array(edges, np.float32)])
    return np.concatenate([positive, -positive])


def test_packing_rounds_to_nearest_and_unpacking_is_exact() -> None:
    x = hard_numbers()
    x = np.resize(x, -(-len(x) // 2048) * 2048)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    for part in range(0, len(x), 2048):
        piece, expected = x[part : part + 2048], want[part : part + 2048]
        outputs = [Output((1024,), np.uint32), Output((2048,), np.float32)]
        halves, back = run(CONVERT, CONVERT_PARAMETERS, [piece, *outputs], 1024).outputs
        got = halves.view(np.float16)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(got.view(np.uint16)[number], expected.view(np.uint16)[number])
        assert (got.view(np.uint16)[~number] == 0x7FFF).all()  # PTX: the canonical NaN
        np.testing.assert_array_equal(back, got.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(back[number]), np.signbit(got[number]))


def test_fast_exp2() -> None:
    special = np.float32([0, 1e-45, np.inf, -np.inf, np.nan, -126])
    x = np.concatenate([np.linspace(-130, 130, 1018, dtype=np.float32), special])
    body = "  out[t] = fast_exp2(x[t]);\n"
    (out,) = run(body, "const float* x, float* out", [x, Output((1024,), np.float32)], 1024).outputs
    with np.errstate(over="ignore"):
        want = np.exp2(x.astype(np.float64)).astype(np.float32)
    want[want < 2.0**-126] = 0
    np.testing.assert_allclose(out, want, rtol=3e-7)
    assert out[-1] == np.float32(2**-126)
    assert list(out[-6:-2]) == [1, 1, np.inf, 0]


# ---- matrices

LOAD = """  __shared__ __align__(16) unsigned tile[8 * 4 * 4];  // four matrices of eight rows of four words
  for (int i = t; i < 128; i += 32) tile[i] = x[i];
  __syncwarp();
  Halves m[4];
  LOAD(m, tile + 4 * t);
  for (int i = 0; i < 4; ++i) out[32 * i + t] = m[i];
"""
MOVE = "  out[t] = transpose_matrix(x[t]);\n"
WORDS = "const unsigned* x, unsigned* out"


@every_run
@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrices(transposed: bool, how: dict) -> None:
    body = LOAD.replace("LOAD", "load_matrices_transposed" if transposed else "load_matrices")
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    launched = run(body, WORDS, [x.view(np.uint32), Output((4, 8, 4), np.uint32)], **how)
    want = x.transpose(0, 2, 1) if transposed else x
    np.testing.assert_array_equal(launched.outputs[0].view(np.uint16), want)
    assert (launched.points[-1].line, launched.points[-1].executions) == (line_of(body, "load_matrices"), 1)


@every_run
def test_transpose_matrix(how: dict) -> None:
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    (out,) = run(MOVE, WORDS, [x.view(np.uint32), Output((8, 4), np.uint32)], **how).outputs
    np.testing.assert_array_equal(out.view(np.uint16), x.T)


# a[16,16] and b[16,8] are fp16; c[16,8] is float32. A warp an item.
MULTIPLY = """  const int g = t % 32 / 4, q = t % 4, item = t / 32;
  const unsigned* a = as + 128 * item;
  const Halves m[4] = {a[8 * g + q], a[8 * g + 64 + q], a[8 * g + 4 + q], a[8 * g + 64 + 4 + q]};
  const unsigned short* b = bs + 128 * item + g;
  const auto pair = [&](int k) { return unsigned(b[8 * k]) | unsigned(b[8 * k + 8]) << 16; };
  const float* c = cs + 128 * item;
  float d[4] = {c[8 * g + 2 * q], c[8 * g + 2 * q + 1], c[8 * g + 64 + 2 * q], c[8 * g + 64 + 2 * q + 1]};
  MULTIPLY(d, m, pair(2 * q), pair(2 * q + 8));
  float* out = outs + 128 * item;
  out[8 * g + 2 * q] = d[0];
  out[8 * g + 2 * q + 1] = d[1];
  out[8 * g + 64 + 2 * q] = d[2];
  out[8 * g + 64 + 2 * q + 1] = d[3];
"""
MULTIPLY_PARAMETERS = "const unsigned* as, const unsigned short* bs, const float* cs, float* outs"
ITEMS = 3


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str = "multiply_add", **how: Any) -> np.ndarray:
    arguments = [a.view(np.uint32), b.view(np.uint16), c, Output(c.shape, np.float32)]
    return run(MULTIPLY.replace("MULTIPLY", name), MULTIPLY_PARAMETERS, arguments, 32 * len(a), **how).outputs[0]


def factors(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    a, b = (draw.standard_normal((ITEMS, 16, n)).astype(np.float16) for n in (16, 8))
    return a, b, draw.standard_normal((ITEMS, 16, 8)).astype(np.float32)


@every_run
@pytest.mark.parametrize("name", ["multiply_add", "multiply"])
def test_products_of_matrices(name: str, how: dict) -> None:
    a, b, c = factors()
    want = a.astype(np.float64) @ b.astype(np.float64) + (c if name == "multiply_add" else 0)
    np.testing.assert_array_equal(multiply(a, b, c, name, **how), cut_off(want))


def bfloats(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bf16 numbers, as their bits, and what they are: torch rounds to the nearest, ties to even."""
    rounded = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16), rounded.double().numpy()


@every_run
@pytest.mark.parametrize("name", ["multiply_add_bfloats", "multiply_bfloats"])
def test_products_of_matrices_of_bfloats(name: str, how: dict) -> None:
    a, b, c = factors()
    (a_bits, a), (b_bits, b) = bfloats(1e9 * a.astype(float)), bfloats(1e9 * b.astype(float))  # far beyond fp16
    want = a @ b + (c if name == "multiply_add_bfloats" else 0)
    np.testing.assert_array_equal(multiply(a_bits, b_bits, c, name, **how), cut_off(want))


def test_packing_bfloats_rounds_to_nearest() -> None:
    every = np.arange(0x7F80, dtype=np.uint32)[::8] << 16
    halfway = np.concatenate([every, every + 0x8000, every + 0x7FFF, every + 0x8001]).view(np.float32)
    x = np.resize(np.concatenate([halfway, -halfway, [np.inf, -np.inf]]).astype(np.float32), 32 * 1024)
    want, _ = bfloats(x)
    body = (
        CONVERT.replace("pack_halves", "pack_bfloats")
        .replace("low_half", "low_bfloat")
        .replace("high_half", "high_bfloat")
    )
    for part in range(0, len(x), 2048):
        outputs = [Output((1024,), np.uint32), Output((2048,), np.float32)]
        pairs, back = run(body, CONVERT_PARAMETERS, [x[part : part + 2048], *outputs], 1024).outputs
        np.testing.assert_array_equal(pairs.view(np.uint16), want[part : part + 2048])
        np.testing.assert_array_equal(back.view(np.uint32), want[part : part + 2048].astype(np.uint32) << 16)


def test_products_of_subnormal_and_large_numbers_are_exact() -> None:
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    draw = np.random.default_rng(0)
    a, b = draw.choice(every, (ITEMS, 16, 16)), draw.choice(every, (ITEMS, 16, 8))
    a[0], b[1] = 2.0**-24, 2.0**-24
    c = np.zeros((ITEMS, 16, 8), np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(multiply(a, b, c), cut_off(want))


def test_what_is_no_number_stays_in_its_row_or_column() -> None:
    a, b, c = factors()
    a[0, 3, 5] = np.nan
    b[1, 7, 2] = np.inf
    a[1, :, 7] = np.abs(a[1, :, 7]) + np.float16(1)
    c[2, 9, 4] = -np.inf
    out = multiply(a, b, c)
    finite = np.isfinite(out)
    want = np.ones_like(finite)
    want[0, 3] = want[1, :, 2] = want[2, 9, 4] = False
    np.testing.assert_array_equal(finite, want)
    assert np.isnan(out[0, 3]).all()
    assert (out[1, :, 2] == np.inf).all()
    assert out[2, 9, 4] == -np.inf


# ---- copies

COPY = """  __shared__ __align__(16) float tile[2][256];
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 4; k += BYTES / 4) copy_async<BYTES>(tile[i] + 4 * t + k, x + 256 * i + 4 * t + k);
    commit_copies();
  }
  wait_copies<1>();
  for (int k = 0; k < 4; ++k) out[4 * t + k] = tile[0][4 * t + k];
  wait_copies<0>();
  __syncthreads();
  for (int k = 0; k < 4; ++k) out[256 + 4 * t + k] = tile[1][255 - 4 * t - k];
"""
FLOATS = "const float* x, float* out"
NUMBERS = np.arange(512, dtype=np.float32)


def copy(body: str, bytes: int = 16, **how: Any) -> np.ndarray:
    arguments = [NUMBERS, Output((512,), np.float32)]
    return run(body.replace("BYTES", str(bytes)), FLOATS, arguments, 64, **how).outputs[0]


@every_run
@pytest.mark.parametrize("bytes", [4, 8, 16])
def test_copies_arrive(bytes: int, how: dict) -> None:
    out = copy(COPY, bytes, **how)
    np.testing.assert_array_equal(out, np.concatenate([NUMBERS[:256], NUMBERS[:255:-1]]))


def test_many_copies_arrive_in_order() -> None:
    body = """  __shared__ float tile[2][64];
  float sum = 0;
  copy_async<4>(&tile[0][t], x + t);
  commit_copies();
  for (int i = 1; i <= 2000; ++i) {
    copy_async<4>(&tile[i % 2][t], x + t + i % 400);
    commit_copies();
    wait_copies<1>();
    sum += tile[1 - i % 2][t];
  }
  out[t] = sum;
"""
    (out,) = run(body, FLOATS, [NUMBERS, Output((64,), np.float32)], 64).outputs
    np.testing.assert_array_equal(out, 2000 * np.arange(64) + 5 * 399 * 200)


@pytest.mark.parametrize(
    ("wrong", "elements"),
    [
        (COPY.replace("  wait_copies<1>();\n", ""), 256),
        (COPY.replace("wait_copies<1>", "wait_copies<2>"), 256),
        (COPY.replace("wait_copies<0>", "wait_copies<1>"), 256),
        (COPY.replace("    commit_copies();\n", ""), 512),
        (COPY.replace("wait_copies<1>", "wait_copies<2>").replace("wait_copies<0>", "wait_copies<2>"), 512),
    ],
    ids=["no wait", "one group too few", "the last group", "never committed", "never waited for"],
)
def test_read_before_a_copy_has_arrived_is_poison(wrong: str, elements: int) -> None:
    with pytest.raises(EmulationError, match=f"argument 1: {elements} of 512 elements are poison"):
        copy(wrong)


def test_ignored_wait_shows() -> None:
    with pytest.raises(EmulationError, match="argument 1: 256 of 512 elements are poison"):
        copy(COPY, ignore_line=line_of(COPY, "wait_copies<0>"))


def test_what_a_copy_replaces_is_gone_when_it_begins() -> None:
    body = "  __shared__ float tile[64];\n  tile[t] = 1;\n  copy_async<4>(tile + t, x + t);\n  out[t] = tile[t];\n"
    with pytest.raises(EmulationError, match="512 of 512 elements are poison"):
        copy(body)


def test_copies_of_one_block_do_not_reach_the_next() -> None:
    body = """  __shared__ float tile[64];
  copy_async<4>(tile + t, x + t);
  if (blockIdx.x == 1) commit_copies();
  wait_copies<0>();
  if (blockIdx.x == 1) out[t] = tile[t];
"""
    for seed in range(4):
        launched = kernel(body, FLOATS).launch(2, 64, 0, [NUMBERS, Output((64,), np.float32)], seed=seed)
        np.testing.assert_array_equal(launched.outputs[0], NUMBERS[:64])


@pytest.mark.parametrize("build", ["plain", "address"])
@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("copy_async<16>(tile + 1, x)", "the shared address is not a multiple of 16 bytes"),
        ("copy_async<8>(tile, x + 1)", "the global address is not a multiple of 8 bytes"),
        ("copy_async<16>(out, x)", "its 16 bytes are not all in the block's shared memory"),
        ("load_matrices(m, tile + 2)", "the address of its row is not a multiple of 16 bytes"),
        ("load_matrices_transposed(m, x)", "its 16 bytes are not all in the block's shared memory"),
        ("group_barrier(16, 64)", "its name is 16; legal: 1 to 15"),
        ("group_barrier(1, 40)", "it waits for 40 threads; legal: multiples of 32, up to the block's 64"),
    ],
)
def test_illegal_operands_are_named(call: str, why: str, build: str) -> None:
    body = f"  __shared__ __align__(16) float tile[64];\n  [[maybe_unused]] Halves m[4];\n  if (t == 9) {call};\n"
    planted = kernel(body, FLOATS, build)
    for _ in range(2):
        with pytest.raises(EmulationError, match="thread 9 of block 0 was stopped in ") as caught:
            planted.launch(1, 64, 0, [NUMBERS, NUMBERS.copy()])
        name = re.split("[<(]", call)[0]
        assert f"{name} at kernel.cu:{line_of(body, call)}: {why}" in str(caught.value)


@every_run
def test_illegal_operands_are_named_in_every_run(how: dict) -> None:
    body = """  __shared__ __align__(16) float tile[64];
  tile[t] = 0;
  if (t == 9) copy_async<16>(tile, x + 1);
  __syncthreads();
"""
    with pytest.raises(EmulationError, match="thread 9 of block 0 was stopped in copy_async at"):
        run(body, FLOATS, [NUMBERS, NUMBERS.copy()], 64, **how)


def test_copies_out_of_bounds_are_found() -> None:
    wrong = COPY.replace("x + 256 * i", "x + 260 * i")
    with pytest.raises(SanitizerError, match="AddressSanitizer: heap-buffer-overflow") as caught:
        copy(wrong, build="address")
    assert f"kernel.cu:{line_of(wrong, 'copy_async')}" in str(caught.value)


def test_rows_out_of_bounds_are_found() -> None:
    body = LOAD.replace("LOAD", "load_matrices").replace("tile + 4 * t", "tile + 4 * t + 4")
    with pytest.raises((SanitizerError, EmulationError), match="global-buffer-overflow|not all in the block's shared"):
        run(body, WORDS, [np.zeros(128, np.uint32), Output((128,), np.uint32)], build="address")


def test_missing_barrier_behind_a_copy_is_a_race() -> None:
    wrong = COPY.replace("  __syncthreads();\n", "")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race") as caught:
        copy(wrong, build="thread")
    # Whichever of the two comes first: a copy writes at any time from when it is asked for to when it is waited for.
    assert any(f"kernel.cu:{line_of(wrong, text)}" in str(caught.value) for text in ("copy_async", "wait_copies<0>"))
    assert f"kernel.cu:{line_of(wrong, 'out[256')}" in str(caught.value)


def test_missing_barrier_before_a_copy_is_a_race() -> None:
    body = """  __shared__ float tile[64];
  tile[t] = 1;
  __syncthreads();
  const float value = tile[63 - t];
  BARRIER
  copy_async<4>(tile + t, x + t);
  commit_copies();
  __syncthreads();
  wait_copies<0>();
  out[t] = tile[t] + value;
"""
    arguments = [NUMBERS, Output((64,), np.float32)]
    run(body.replace("BARRIER", "__syncthreads();"), FLOATS, arguments, 64, build="thread")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        run(body.replace("BARRIER", ""), FLOATS, arguments, 64, build="thread")


def test_missing_barrier_before_load_matrices_is_a_race() -> None:
    body = LOAD.replace("LOAD", "load_matrices").replace("  __syncwarp();\n", "")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race") as caught:
        run(body, WORDS, [np.zeros(128, np.uint32), Output((128,), np.uint32)], build="thread")
    assert f"kernel.cu:{line_of(body, 'load_matrices')}" in str(caught.value)


# ---- warps that are not whole


@pytest.mark.parametrize("build", ["plain", "address", "thread"])
@pytest.mark.parametrize("call", ["multiply_add(d, m, 0, 0)", "transpose_matrix(0)", "load_matrices(m, tile)"])
def test_a_missing_lane_is_named(call: str, build: str) -> None:
    body = f"""  __shared__ __align__(16) unsigned tile[4];
  if (t == 0) for (int i = 0; i < 4; ++i) tile[i] = 0;
  __syncthreads();
  [[maybe_unused]] float d[4] = {{}};
  [[maybe_unused]] Halves m[4] = {{}};
  if (t != 37) {call};
"""
    with pytest.raises(EmulationError, match="not reached by all lanes of its mask") as caught:
        run(body, FLOATS, [NUMBERS, NUMBERS.copy()], 64, build=build)
    name = call.partition("(")[0]
    line = line_of(body, call)
    assert f"threads 32-36, 38-63: wait in {name} at kernel.cu:{line} with mask 0xffffffff" in str(caught.value)
    assert "threads 0-31, 37: returned" in str(caught.value)


def test_lanes_at_two_calls_do_not_meet() -> None:
    body = """  if (t < 16) {
    out[t] = low_half(transpose_matrix(0));
  } else {
    out[t] = low_half(transpose_matrix(0));
  }
"""
    with pytest.raises(EmulationError, match="not reached by all lanes of its mask"):
        run(body, FLOATS, [NUMBERS, NUMBERS.copy()])


@pytest.mark.parametrize("engine", ["fibers", "threads"])
def test_a_part_of_a_warp_cannot_multiply(engine: str) -> None:
    body = "  float d[4] = {};\n  const Halves m[4] = {};\n  multiply(d, m, 0, 0);\n"
    with pytest.raises(EmulationError, match="not reached by all lanes|not all 32 lanes"):
        run(body, FLOATS, [NUMBERS, NUMBERS.copy()], 16, engine=engine)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_products_are_cut_off(sign: float) -> None:
    """1 + 1.5 * 2^-24 is nearest to 1 + 2^-23, but an H200's tensor cores give 1."""
    body = """  float d[4] = {x[t], x[t], x[t], x[t]};
  const Halves given = pack_halves(x[t] * 0x1.8p-14f, 0.0f);
  const Halves m[4] = {given, given, 0, 0};
  multiply_add(d, m, pack_halves(0x1p-12f, 0.0f), 0);
  out[t] = d[0];
"""
    out = np.full(32, np.nan, np.float32)
    run(body, FLOATS, [np.full(32, sign, np.float32), out], 32)
    assert (out == sign).all()


# ---- named barriers. Two groups of two warps each, which do not wait for each other.

GROUPS = """  __shared__ float tile[128];
  const int group = t / 64;
  for (int i = 0; i < 2 + 3 * group; ++i) {
    tile[t] = x[t] + i;
    group_barrier(1 + group, 64);  // written
    out[t] = tile[64 * group + 63 - t % 64];
    group_barrier(1 + group, 64);  // read
  }
"""


def in_groups(body: str, **how: Any) -> Launched:
    return run(body, FLOATS, [NUMBERS, Output((128,), np.float32)], 128, **how)


@every_run
def test_groups_wait_for_their_own(how: dict) -> None:
    launched = in_groups(GROUPS, **how)
    t = np.arange(128)
    np.testing.assert_array_equal(launched.outputs[0], t // 64 * 64 + 63 - t % 64 + np.where(t < 64, 1, 4))
    assert [(p.operation, p.line, p.executions) for p in launched.points] == [
        ("group_barrier", line_of(GROUPS, text), 7) for text in ("// written", "// read")
    ]


def test_warps_of_a_group_may_wait_at_different_places() -> None:
    body = """  if (t < 64) {
    group_barrier(3, 128);
  } else {
    group_barrier(3, 128);
  }
  out[t] = x[t];
"""
    assert [p.executions for p in in_groups(body).points] == [1, 1]


@pytest.mark.parametrize("text", ["// written", "// read"])
def test_ignored_group_barrier_is_a_race(text: str) -> None:
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        in_groups(GROUPS, build="thread", ignore_line=line_of(GROUPS, text))


def test_a_group_barrier_does_not_order_another_group() -> None:
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        in_groups(GROUPS.replace("tile[64 * group + 63 - t % 64]", "tile[127 - t]"), build="thread")


@pytest.mark.parametrize("build", ["plain", "address", "thread"])
@pytest.mark.parametrize(
    ("call", "heading"),
    [
        ("group_barrier(1, t < 64 ? 64 : 128)", "threads disagree on how many a named barrier waits for"),
        ("group_barrier(1, 64)", "a named barrier was not reached by exactly the threads that it waits for"),
        ("if (t < 96) group_barrier(1, 128)", "a named barrier was not reached by exactly the threads that it waits"),
        ("if (t != 70) group_barrier(1 + t / 64, 64)", "a named barrier was not reached by exactly the threads that"),
        ("if (t % 64 < 16) group_barrier(1, 32)", "a named barrier was not reached by exactly the threads that"),
    ],
    ids=["different counts", "too many", "a warp is missing", "a thread is missing", "parts of warps"],
)
def test_a_group_barrier_that_cannot_be_completed_is_named(call: str, heading: str, build: str) -> None:
    body = f"  {call};\n  out[t] = 0;\n"
    with pytest.raises(EmulationError, match=heading) as caught:
        in_groups(body, build=build)
    assert re.search(rf"wait at group_barrier at kernel.cu:{line_of(body, call)}, number \d, for", str(caught.value))


def test_counts_that_differ_are_named_on_threads() -> None:
    with pytest.raises(EmulationError, match="threads disagree on how many"):
        in_groups("  if (t < 64) group_barrier(1, t < 32 ? 32 * 2 : 32 * 3);\n", engine="threads")


# ---- all of them together: c = a b^T of each item, 64x64 each, in two stages

PIPELINE = """  constexpr int kStride = 24;  // numbers from a row of 16 to the next: eight rows lie in different banks
  __shared__ __align__(16) unsigned short as[2][64 * kStride], bs[2][64 * kStride];
  const unsigned short* a = a_all + 64 * 64 * blockIdx.x;
  const unsigned short* b = b_all + 64 * 64 * blockIdx.x;
  const auto load = [&](int step) {
    const int row = t / 2, piece = t % 2 * 8;
    copy_async<16>(as[step % 2] + kStride * row + piece, a + 64 * row + 16 * step + piece);
    copy_async<16>(bs[step % 2] + kStride * row + piece, b + 64 * row + 16 * step + piece);
    commit_copies();
  };
  float d[8][4];
  const int warp = t / 32, lane = t % 32;
  load(0);
  for (int step = 0; step < 4; ++step) {
    if (step < 3) {
      load(step + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    group_barrier(1, 128);
    Halves left[4];
    load_matrices(left, as[step % 2] + kStride * (16 * warp + lane % 16) + lane / 16 * 8);
    for (int n = 0; n < 8; n += 2) {
      Halves right[4];
      load_matrices(right, bs[step % 2] + kStride * (8 * n + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 8);
      for (int i = 0; i < 2; ++i) {
        if (step == 0) {
          multiply(d[n + i], left, right[2 * i], right[2 * i + 1]);
        } else {
          multiply_add(d[n + i], left, right[2 * i], right[2 * i + 1]);
        }
      }
    }
    group_barrier(1, 128);
  }
  float* c = c_all + 64 * 64 * blockIdx.x + 64 * (16 * warp + lane / 4) + 2 * (lane % 4);
  for (int n = 0; n < 8; ++n) {
    for (int i = 0; i < 4; ++i) c[8 * n + i % 2 + i / 2 * 8 * 64] = d[n][i];
  }
"""
PIPELINE_PARAMETERS = "const unsigned short* a_all, const unsigned short* b_all, float* c_all"


def product(**how: Any) -> tuple[np.ndarray, Launched]:
    """What c should be, and the launch."""
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((3, 64, 64)).astype(np.float16) for _ in range(2))
    options = {name: how.pop(name) for name in tuple(how) if name not in ("build", "portable_switch")}
    arguments = [a.view(np.uint16), b.view(np.uint16), Output((3, 64, 64), np.float32)]
    launched = kernel(PIPELINE, PIPELINE_PARAMETERS, **how).launch(3, 128, 0, arguments, **options)
    return a.astype(np.float64) @ b.astype(np.float64).transpose(0, 2, 1), launched


@every_run
def test_a_pipelined_product(how: dict) -> None:
    want, launched = product(**how, orders=2)
    np.testing.assert_allclose(launched.outputs[0], want, rtol=1e-6, atol=1e-5)


def test_a_pipelined_product_is_counted() -> None:
    counters = product(build="count")[1].counters
    assert counters is not None
    assert counters.operations.mma == 3 * 4 * 4 * 8
    # A warp and step: a once and b four times, in four passes; two copies, eight lanes' in two, as their four rows of
    # 32 bytes, 48 apart, meet in a bank.
    assert counters.shared.reads == 3 * 4 * 128 * 5
    assert counters.shared_wavefronts == 3 * 4 * 4 * (5 * 4 + 2 * 4 * 2)


@pytest.mark.parametrize("point", range(2))
def test_a_barrier_that_is_missing_in_a_pipeline_is_a_race(point: int) -> None:
    lines = [number for number, line in enumerate(PIPELINE.splitlines(), 1) if "group_barrier" in line]
    first = line_of(PIPELINE, "group_barrier")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        product(build="thread", ignore_line=first + lines[point] - lines[0])


# ---- counting


def count(body: str, parameters: str, arguments: list[Any], threads: int = 32) -> Any:
    counters = run(body, parameters, arguments, threads, build="count").counters
    assert counters is not None
    return counters


def test_products_are_counted_by_warp() -> None:
    body = MULTIPLY.replace("MULTIPLY", "multiply_add")
    a, b, c = factors()
    arguments = [a.view(np.uint32), b.view(np.uint16), c, Output(c.shape, np.float32)]
    counters = count(body, MULTIPLY_PARAMETERS, arguments, 32 * ITEMS)
    assert (counters.operations.mma, counters.issued.mma) == (ITEMS, ITEMS)
    assert counters.issued.fma_class == 0


def test_exponentials_are_counted_and_conversions_are_not() -> None:
    body = "  out[t] = fast_exp2(low_half(pack_halves(x[t], x[t])));\n"
    counters = count(body, FLOATS, [NUMBERS, Output((40,), np.float32)], 40)
    assert (counters.operations.exp, counters.issued.exp) == (40, 64)
    assert counters.issued.fma_class == 0


@pytest.mark.parametrize(
    ("row", "passes"),
    [("4 * t", 4), ("32 * (t % 8) + 4 * (t / 8)", 32), ("36 * (t % 8) + 4 * (t / 8)", 4), ("4 * (t % 8)", 4), ("0", 4)],
    ids=["dense", "rows of 128 bytes", "padded rows", "one matrix four times", "one row"],
)
def test_load_matrices_takes_a_pass_for_each_matrix_without_conflicts(row: str, passes: int) -> None:
    body = f"""  DYNAMIC_SHARED(bytes);
  Halves m[4];
  load_matrices(m, reinterpret_cast<unsigned*>(bytes) + {row});
  out[t] = m[0];
"""
    launched = kernel(body, "unsigned* out", "count").launch(1, 32, 2048, [np.zeros(32, np.uint32)])
    counters = launched.counters
    assert counters is not None
    assert (counters.shared.reads, counters.shared.read_bytes) == (32, 512)
    assert counters.shared_wavefronts == passes


@pytest.mark.parametrize("bytes", [4, 8, 16])
def test_copies_are_counted(bytes: int) -> None:
    body = """  __shared__ __align__(16) unsigned char tile[512];
  copy_async<BYTES>(tile + BYTES * t, reinterpret_cast<const char*>(x) + BYTES * t);
  commit_copies();
  wait_copies<0>();
"""
    counters = count(body.replace("BYTES", str(bytes)), "const float* x", [NUMBERS])
    assert (counters.shared.writes, counters.shared.write_bytes) == (32, 32 * bytes)
    assert (counters.arguments[0].reads, counters.arguments[0].bytes_read_at_all) == (32, 32 * bytes)
    assert counters.shared_wavefronts == counters.global_wavefronts == bytes * 32 // 128
    assert counters.shared.reads == 0


# ---- nvcc

ALL = """  __shared__ __align__(16) unsigned tile[256];
  copy_async<16>(tile + 4 * t, x + 4 * t);
  copy_async<8>(tile + 4 * t, x + 4 * t);
  copy_async<4>(tile + 4 * t, x + 4 * t);
  commit_copies();
  wait_copies<2>();
  group_barrier(5, 64);
  Halves a[4], b[4];
  load_matrices(a, tile + 4 * t);
  load_matrices_transposed(b, tile + 4 * t);
  float d[4];
  multiply(d, a, b[0], b[1]);
  multiply_add(d, a, b[2], transpose_matrix(b[3]));
  const Halves pair = pack_halves(fast_exp2(d[0]), d[1]);
  out[t] = low_half(pair) + d[2];
  out[64 + t] = high_half(pair) + d[3];
"""
INSTRUCTIONS = {
    "cp.async.cg.shared.global": 1,
    "cp.async.ca.shared.global": 2,
    "cp.async.commit_group": 1,
    "cp.async.wait_group 2": 1,
    "bar.sync": 1,
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": 1,
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": 1,
    "movmatrix.sync.aligned.m8n8.trans.b16": 1,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": 2,
    "cvt.rn.f16x2.f32": 1,
    "cvt.f32.f16": 2,
    "ex2.approx.ftz.f32": 1,
}


def cuda_source() -> str:
    return f'{HEAD}extern "C" __global__ void k({FLOATS}) {{\n  const int t = threadIdx.x;\n{ALL}}}\n'


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvcc_makes_the_instructions_that_are_meant(arch: str) -> None:
    try:
        ptx = compile_source(cuda_source(), Target.ptx(arch)).code.decode()
        compiled = compile_source(cuda_source(), Target(arch))
    except CompilerNotFoundError:
        pytest.skip("no nvcc here")
    assert {name: ptx.count(name) for name in INSTRUCTIONS} == INSTRUCTIONS
    assert compiled.resources is not None
    assert (compiled.resources.spill_stores, compiled.resources.stack) == (0, 0)


def test_the_kernel_of_all_primitives_runs_here_too() -> None:
    launched = kernel(ALL.replace("wait_copies<2>", "wait_copies<0>"), FLOATS).launch(
        1, 64, 0, [np.zeros(256, np.float32), Output((128,), np.float32)]
    )
    np.testing.assert_array_equal(launched.outputs[0], np.repeat(np.float32([1, 0]), 64))
