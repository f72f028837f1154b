"""The PTX of sm_90: numbers against NumPy, faults that are planted, what is counted, and what nvcc makes of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator.pools import cut_off
from invpool.compile import Target, compile_source, find_nvcc, nvcc_argv
from invpool.emulator import EmulatedKernel, Launched, Output
from invpool.errors import CompilerNotFoundError, EmulationError, SanitizerError
from invpool.render import inline_header

HEAD = f"""
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif
using Scalar = float;
{inline_header("include/hopper.cuh")}
"""
FLOATS = "const float* x, float* out"
NUMBERS = np.arange(1024, dtype=np.float32)


def source(body: str, parameters: str = FLOATS) -> str:
    return f'{HEAD}extern "C" __global__ void k({parameters}) {{\n  const int t = threadIdx.x;\n{body}}}\n'


def kernel(body: str, parameters: str = FLOATS, build: str = "plain", portable_switch: bool = False) -> EmulatedKernel:
    return EmulatedKernel(source(body, parameters), build=build, portable_switch=portable_switch)


def line_of(body: str, text: str) -> int:
    """The line of the source at which a text of the body stands."""
    before = HEAD.count("\n") + 2
    return next(before + number for number, line in enumerate(body.splitlines(), 1) if text in line)


RUNS = {
    "fibers": {},
    "portable switch": {"portable_switch": True},
    "threads": {"engine": "threads"},
    "address": {"build": "address"},
    "thread": {"build": "thread"},
    "count": {"build": "count"},
}
every_run = pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)


# ---- bulk copies: two stages of 256 numbers each, four times; a thread reads what another wrote last time

STAGES = """  __shared__ __align__(128) float tile[2][256];
  __shared__ Barrier full[2];
  if (t == 0) {
    for (int i = 0; i < 2; ++i) barrier_init(&full[i], 1);
  }
  __syncthreads();  // initialised
  const auto load = [&](int step) {
    barrier_expect(&full[step % 2], 1024);
    for (int i = 0; i < 2; ++i) copy_bulk(tile[step % 2] + 128 * i, x + 256 * step + 128 * i, 512, &full[step % 2]);
  };
  if (t == 0) load(0);
  for (int step = 0; step < 4; ++step) {
    if (t == 0 && step < 3) load(step + 1);
    barrier_wait(&full[step % 2], step / 2 % 2);
    for (int i = t; i < 256; i += 64) out[256 * step + i] = tile[step % 2][255 - i];
    __syncthreads();  // read
  }
"""


def stages(body: str = STAGES, **how: Any) -> Launched:
    options = {name: how.pop(name) for name in tuple(how) if name not in ("build", "portable_switch")}
    return kernel(body, **how).launch(1, 64, 0, [NUMBERS, Output((1024,), np.float32)], **options)


@every_run
def test_bulk_copies_arrive(how: dict) -> None:
    out = stages(**how).outputs[0]
    np.testing.assert_array_equal(out.reshape(4, 256), NUMBERS.reshape(4, 256)[:, ::-1])


@every_run
def test_bulk_copies_of_dynamic_memory_arrive_in_several_blocks(how: dict) -> None:
    body = """  DYNAMIC_SHARED(bytes);
  Barrier* const full = reinterpret_cast<Barrier*>(bytes);
  float* const tile = reinterpret_cast<float*>(bytes + 128);
  const int piece = 256 * blockIdx.x;
  if (t < 2) barrier_init(full + t, 33);
  __syncthreads();
  // A warp copies a row each, before the last thread says how much that makes.
  if (t < 32) {
    copy_bulk(tile + 8 * t, x + piece + 8 * t, 32, full);
    barrier_expect(full, 0);
  }
  if (t == 63) barrier_expect(full, 1024);
  barrier_wait(full + 1, 1);  // the phase before the first has ended
  barrier_wait(full, 0);
  for (int i = t; i < 256; i += 64) out[piece + i] = tile[255 - i];
"""
    options = {name: how[name] for name in how if name not in ("build", "portable_switch")}
    built = kernel(body, **{name: how[name] for name in how if name not in options})
    orders = {} if how.get("engine") else {"orders": 3}
    out = built.launch(4, 64, 128 + 1024, [NUMBERS, Output((1024,), np.float32)], **options, **orders).outputs[0]
    np.testing.assert_array_equal(out.reshape(4, 256), NUMBERS.reshape(4, 256)[:, ::-1])


ONCE = """  __shared__ __align__(16) float tile[64];
  __shared__ Barrier full;
  if (t == 5) {
    barrier_init(&full, 1);
    barrier_expect(&full, 256);
    copy_bulk(tile, x, 256, &full);
  }
  __syncthreads();
  barrier_wait(&full, 0);
  out[t] = tile[63 - t];
"""


def once(body: str = ONCE, **options: Any) -> np.ndarray:
    return kernel(body).launch(2, 64, 0, [NUMBERS, Output((64,), np.float32)], **options).outputs[0]


def test_a_thread_that_does_not_wait_reads_poison_or_races() -> None:
    np.testing.assert_array_equal(once(), NUMBERS[63::-1])
    with pytest.raises(EmulationError, match="argument 1: .* of 64 elements are poison"):
        once(ONCE.replace("barrier_wait", "if (t == 63) __syncwarp(1u << 31), barrier_wait"))
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        stages(STAGES.replace("barrier_wait(", "if (t != 7) barrier_wait("), build="thread")


@every_run
def test_copies_that_nobody_waits_for_are_named(how: dict) -> None:
    want = "block . ended before anybody had waited for the 256 bytes that thread 5 asked for in copy_bulk at kernel.cu"
    options = {name: how[name] for name in how if name not in ("build", "portable_switch")}
    built = kernel(ONCE, **{name: how[name] for name in how if name not in options})
    with pytest.raises(EmulationError, match=want):
        built.launch(1, 64, 0, [NUMBERS, NUMBERS.copy()], ignore_line=line_of(ONCE, "_wait("), **options)


@pytest.mark.parametrize("how", [RUNS["fibers"], RUNS["portable switch"], RUNS["address"], RUNS["thread"]])
@pytest.mark.parametrize(
    ("right", "wrong", "numbers"),
    [
        ("full, 256)", "full, 272)", "parity 0, in phase 0: 1 of 1 arrivals, 272 bytes expected, 256 copied"),
        ("full, 256)", "full, 240)", "parity 0, in phase 0: 1 of 1 arrivals, 240 bytes expected, 256 copied"),
        ("full, 1)", "full, 2)", "parity 0, in phase 0: 1 of 2 arrivals, 256 bytes expected, 256 copied"),
        ("full, 0)", "full, t / 32)", "parity 1, in phase 1: 0 of 1 arrivals, 0 bytes expected, 0 copied"),
    ],
    ids=["too few bytes", "too many bytes", "a missing arrival", "another parity"],
)
def test_a_phase_that_cannot_end_is_named(right: str, wrong: str, numbers: str, how: dict) -> None:
    body = ONCE.replace(right, wrong)
    with pytest.raises(EmulationError, match="a barrier in shared memory does not end the phase") as caught:
        kernel(body, **how).launch(1, 64, 0, [NUMBERS, NUMBERS.copy()])
    threads = "threads 32-63" if "parity 1" in numbers else "threads 0-63"
    where = f"wait at barrier_wait at kernel.cu:{line_of(body, 'barrier_wait')}"
    assert f"{threads}: {where} for {numbers}" in str(caught.value)


@every_run
def test_one_thread_can_copy_and_wait_without_barriers(how: dict) -> None:
    body = """  __shared__ __align__(16) float tile[64];
  __shared__ Barrier full;
  if (t == 5) {
    barrier_init(&full, 1);
    for (int i = 0; i < 4; ++i) {
      fence_async();
      barrier_expect(&full, 256);
      copy_bulk(tile, x + 64 * i, 256, &full);
      barrier_wait(&full, i % 2);
      for (int k = 0; k < 64; ++k) out[64 * i + k] = tile[k];
    }
  }
"""
    options = {name: how[name] for name in how if name not in ("build", "portable_switch")}
    built = kernel(body, **{name: how[name] for name in how if name not in options})
    out = built.launch(1, 32, 0, [NUMBERS, Output((256,), np.float32)], **options).outputs[0]
    np.testing.assert_array_equal(out, NUMBERS[:256])


@pytest.mark.parametrize("build", ["plain", "address"])
@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("copy_bulk(tile + 1, x, 16, &full)", "the shared address is not a multiple of 16 bytes"),
        ("copy_bulk(tile, x + 2, 16, &full)", "the global address is not a multiple of 16 bytes"),
        ("copy_bulk(tile, x, 24, &full)", "it is to copy 24 bytes; legal: multiples of 16, up to 1048575"),
        ("copy_bulk(tile, x, 0, &full)", "it is to copy 0 bytes"),
        ("copy_bulk(out, x, 16, &full)", "its 16 bytes are not all in the block's shared memory"),
        ("copy_bulk(tile, tile, 16, &full)", "the global address is one of shared memory"),
        ("copy_bulk(tile, x, 16, &empty)", "its barrier has not been initialised"),
        ("copy_bulk(tile, x, 16, &gone)", "the memory of its barrier has been overwritten"),
        ("barrier_expect(&empty, 16)", "its barrier has not been initialised"),
        ("barrier_expect(&done, 16)", "all 1 arrivals of its barrier's phase have come already: 32 bytes expected, 0"),
        ("barrier_expect(&full, 1 << 20)", "it lets its barrier's phase wait for 1048576 bytes; legal: 0 to 1048575"),
        ("barrier_wait(&empty, 0)", "its barrier has not been initialised"),
        ("barrier_wait(&full, 2)", "the parity is 2; legal: 0 and 1"),
        ("barrier_init(&full, 0)", "it is to wait for 0 arrivals; legal: 1 to 1048575"),
        ("barrier_init((Barrier*)(tile + 1), 1)", "the address of its barrier is not a multiple of 8 bytes"),
        ("barrier_init((Barrier*)out, 1)", "its 8 bytes are not all in the block's shared memory"),
    ],
)
def test_illegal_operands_are_named(call: str, why: str, build: str) -> None:
    body = f"""  __shared__ __align__(16) float tile[64];
  __shared__ Barrier full, empty, gone, done;
  if (t == 9) {{
    barrier_init(&full, 1);
    barrier_init(&gone, 1);
    barrier_init(&done, 1);
    barrier_expect(&done, 32);
    gone = empty;
    {call};
  }}
"""
    with pytest.raises(EmulationError, match="thread 9 of block 0 was stopped in ") as caught:
        kernel(body, build=build).launch(1, 32, 0, [NUMBERS, NUMBERS.copy()])
    assert f"{call.partition('(')[0]} at kernel.cu:{line_of(body, call)}: {why}" in str(caught.value)


@every_run
def test_a_copy_over_one_that_nobody_has_waited_for_is_named(how: dict) -> None:
    body = """  __shared__ __align__(16) float tile[64];
  __shared__ Barrier full;
  if (t == 0) {
    barrier_init(&full, 1);
    copy_bulk(tile, x, 256, &full);
    copy_bulk(tile + 60, x, 16, &full);
  }
"""
    with pytest.raises(EmulationError, match="thread 0 of block 0 was stopped in copy_bulk at .*: its bytes overlap"):
        stages(body, **how)


def test_bulk_copies_out_of_bounds_are_found() -> None:
    wrong = STAGES.replace("x + 256 * step", "x + 4 + 256 * step")
    with pytest.raises(SanitizerError, match="AddressSanitizer: heap-buffer-overflow") as caught:
        stages(wrong, build="address")
    assert f"kernel.cu:{line_of(wrong, 'copy_bulk')}" in str(caught.value)


@pytest.mark.parametrize("text", ["__syncthreads();  // initialised", "__syncthreads();  // read"])
def test_a_missing_barrier_around_bulk_copies_is_a_race(text: str) -> None:
    with pytest.raises(
        (SanitizerError, EmulationError), match="ThreadSanitizer: data race|not been initialised|does not end"
    ):
        stages(build="thread", ignore_line=line_of(STAGES, text))


def test_bulk_copies_are_counted() -> None:
    counters = stages(build="count").counters
    assert counters is not None
    assert (counters.shared.writes, counters.shared.write_bytes) == (8, 4096)
    assert (counters.arguments[0].reads, counters.arguments[0].bytes_read_at_all) == (8, 4096)
    assert (counters.shared.reads, counters.shared.read_bytes) == (1024, 4096)
    # Copies and reads: 128 bytes in a pass.
    assert counters.shared_wavefronts == 2 * 4096 // 128
    assert counters.global_wavefronts == 2 * 4096 // 128


# ---- products by a warpgroup: c[W,64,N] (+)= a[W,64,16 * STEPS] b[W,16 * STEPS,N], a warpgroup an item

PRODUCT = """  DYNAMIC_SHARED(bytes);
  const int item = t / 128, lane = t % 32, row = t % 128 / 32 * 16 + lane / 4, column = 2 * (lane % 4);
  unsigned char* const b = bytes + BYTES * item;
  for (int i = t % 128; i < BYTES / 4; i += 128) ((unsigned*)b)[i] = bs[BYTES / 4 * item + i];
  fence_async();
  __syncthreads();
  const unsigned* a = as + 64 * 8 * STEPS * item;
  float* c = cs + 64 * N * item;
  Halves left[STEPS][4];
  for (int k = 0; k < STEPS; ++k) {
    for (int i = 0; i < 4; ++i) left[k][i] = a[8 * STEPS * (row + i % 2 * 8) + 8 * k + i / 2 * 4 + column / 2];
  }
  float d[N / 8][4];
  for (int n = 0; n < N / 8; ++n) {
    for (int i = 0; i < 4; ++i) d[n][i] = c[N * (row + i / 2 * 8) + 8 * n + column + i % 2];
  }
  const Descriptor at = describe(b, LEADING, STRIDE);
  group_fence();
  for (int k = 0; k < STEPS; ++k) {
    group_multiply<N, TRANSPOSED>(d, left[k], at + STEP / 16 * k, ACCUMULATE || k > 0);
  }
  group_commit();
  group_wait<0>();
  keep_registers(d);
  for (int n = 0; n < N / 8; ++n) {
    for (int i = 0; i < 4; ++i) c[N * (row + i / 2 * 8) + 8 * n + column + i % 2] = d[n][i];
  }
"""
PRODUCT_PARAMETERS = "const unsigned* as, const unsigned* bs, float* cs"


def core_matrices(b: np.ndarray, transposed: bool, leading: int, stride: int) -> np.ndarray:
    """b[16, N] as a descriptor with these offsets wants it; written from the tables of the PTX ISA."""
    k, n = np.meshgrid(np.arange(16), np.arange(b.shape[1]), indexing="ij")
    inner = 16 * (k % 8) + 2 * (n % 8) if transposed else 16 * (n % 8) + 2 * (k % 8)
    offsets = leading * (k // 8) + stride * (n // 8) + inner
    laid = np.full(offsets.max() // 2 + 1, np.nan, np.float16)
    laid[offsets // 2] = b
    return laid


def group_product(
    columns: int = 64,
    transposed: bool = False,
    steps: int = 3,
    accumulate: bool = True,
    k_first: bool = False,
    items: int = 2,
    edit: tuple[str, str] = ("", ""),
    **how: Any,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """What c should be, what it is, and what was counted."""
    draw = np.random.default_rng(columns)
    a = draw.standard_normal((items, 64, 16 * steps)).astype(np.float16)
    b = draw.standard_normal((items, 16 * steps, columns)).astype(np.float16)
    c = draw.standard_normal((items, 64, columns)).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + (c if accumulate else 0)
    # Either the core matrices of a k follow each other, or those of 8 columns.
    leading, stride = (16 * columns, 128) if k_first else (128, 256)
    step = 32 * columns
    laid = [
        [core_matrices(b[i, 16 * k : 16 * k + 16], transposed, leading, stride) for k in range(steps)]
        for i in range(items)
    ]
    names = {
        "BYTES": step * steps,
        "STEP": step,
        "STEPS": steps,
        "LEADING": leading,
        "STRIDE": stride,
        "N": columns,
        "TRANSPOSED": str(transposed).lower(),
        "ACCUMULATE": str(accumulate).lower(),
    }
    constants = "".join(f"  constexpr auto {name} = {value};\n" for name, value in names.items())
    options = {name: how.pop(name) for name in tuple(how) if name not in ("build", "portable_switch")}
    body = (constants + PRODUCT).replace(*edit) if edit[0] else constants + PRODUCT
    arguments = [a.view(np.uint32), np.array(laid).view(np.uint32), c]
    built = kernel(body, PRODUCT_PARAMETERS, **how)
    launched = built.launch(1, 128 * items, step * steps * items, arguments, **options)
    return want, c, launched.counters


@every_run
@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_warpgroups(transposed: bool, k_first: bool, how: dict) -> None:
    want, c, _ = group_product(64, transposed, k_first=k_first, **how)
    np.testing.assert_allclose(c, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("columns", [8, 16, 32, 64, 96, 128])
def test_products_by_warpgroups_of_each_width(columns: int, accumulate: bool) -> None:
    for transposed in (False, True):
        want, c, _ = group_product(columns, transposed, 1, accumulate, items=1)
        np.testing.assert_array_equal(c, cut_off(want))


ALTERNATING = """  __shared__ __align__(16) unsigned b[64];
  for (int i = t; i < 64; i += 128) b[i] = bs[i];
  fence_async();
  __syncthreads();
  Halves a[4];
  for (int i = 0; i < 4; ++i) a[i] = as[t % 128];
  float d[2][1][4] = {}, sum = 0;
  const Descriptor at = describe(b, 128, 0);
  group_fence();
  group_multiply<8, false>(d[0], a, at, true);
  group_commit();
  for (int i = 1; i <= ROUNDS; ++i) {
    group_fence();
    for (int k = 0; k < i % 4; ++k) group_multiply<8, false>(d[i % 2], a, at, k > 0);
    group_commit();
    group_wait<1>();
    if (i % 4 != 1) sum += d[1 - i % 2][0][0];
    if (i % 8 == 0) {
      group_wait<0>();
      __syncthreads();
    }
  }
  group_wait<0>();
  cs[t] = sum;
"""


@every_run
def test_products_of_two_groups_in_turn(how: dict) -> None:
    options = {name: how[name] for name in how if name not in ("build", "portable_switch")}
    body = f"  constexpr int ROUNDS = 150;\n{ALTERNATING}"
    built = kernel(body, PRODUCT_PARAMETERS, **{name: how[name] for name in how if name not in options})
    ones = np.full(256, 0x3C003C00, np.uint32)
    (out,) = built.launch(1, 256, 0, [ones, ones, Output((256,), np.float32)], **options).outputs
    # A product is 16 in each place; round i adds i % 4 of them up, and the next round adds that to the sum.
    np.testing.assert_array_equal(out, 16 * sum(i % 4 for i in range(150)))


def test_products_by_warpgroups_are_counted() -> None:
    counters = group_product(build="count")[2]
    assert counters.operations.mma == 2 * 3 * 4 * 8
    # b is written by words, and read once a warpgroup.
    assert counters.shared.read_bytes == 2 * 3 * 16 * 64 * 2
    assert counters.shared_wavefronts == 2 * counters.shared.read_bytes // 128


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("  group_fence();\n", ""), "stopped in group_multiply at .*: no group_fence has come before it"),
        (
            ("at + STEP / 16 * k", "at + 8 * STEP / 16 * k"),
            "stopped in group_multiply .*not in the block's shared m",
        ),
        (("at + STEP / 16 * k", "at + (1 << 14)"), "its descriptor has bits that no address or offset has"),
        (("describe(b,", "describe(b + 8,"), "stopped in describe at .*: the address of its matrix is not a multiple"),
        (("(b, LEADING", "(b, 8 + LEADING"), "an offset is 136 bytes; legal: multiples of 16, below 262144"),
        (("(b, LEADING", "(b, 1 << 18"), "an offset is 262144 bytes"),
        (("describe(b,", "describe(as,"), "its 16 bytes are not all in the block's shared memory"),
        (("at + STEP / 16 * k", "at + (t == 200)"), "another thread of its warpgroup gave other operands"),
        (("k > 0);", "k > 0), d[1][2] *= 2;"), "its d was touched between group_multiply and group_wait"),
        (("  group_commit();", "  d[1][2] += 1; group_commit();"), "was touched before group_wait"),
        (("  group_commit();", "  ((unsigned*)b)[t % 128 / 2] = t; group_commit();"), "was changed before group_wait"),
    ],
    ids=str,
)
def test_misused_products_are_named(edit: tuple[str, str], why: str) -> None:
    with pytest.raises(EmulationError, match=f"thread .* of block 0 was {why}" if why.startswith("stopped") else why):
        group_product(edit=edit)


@every_run
def test_misused_products_are_named_in_every_run(how: dict) -> None:
    with pytest.raises(EmulationError, match="stopped in group_wait .*: the d of the product begun in .* was touched"):
        group_product(edit=("  group_commit();", "  d[1][2] += 1; group_commit();"), **how)


def test_a_matrix_that_is_changed_too_early_is_a_race() -> None:
    edit = ("  group_commit();", "  __syncthreads();\n  ((unsigned*)b)[t % 128 / 2] = 0;\n  group_commit();")
    with pytest.raises((EmulationError, SanitizerError), match="data race|was changed before group_wait"):
        group_product(edit=edit, build="thread")


@pytest.mark.parametrize("edit", [("  group_commit();\n", ""), ("  group_wait<0>();\n", ""), ("_wait<0>", "_wait<1>")])
def test_products_that_are_not_waited_for_are_no_numbers(edit: tuple[str, str]) -> None:
    assert np.isnan(group_product(edit=edit)[1]).all()


def test_an_ignored_wait_for_products_shows() -> None:
    line = line_of(PRODUCT, "group_wait<0>") + 8  # behind the constants
    assert np.isnan(group_product(ignore_line=line)[1]).all()


@pytest.mark.parametrize("build", ["plain", "address", "thread"])
def test_a_missing_warp_of_a_warpgroup_is_named(build: str) -> None:
    with pytest.raises(EmulationError, match="not reached by all 128 threads of its warpgroup") as caught:
        group_product(edit=("  group_fence();", "  if (t / 32 == 6) return;\n  group_fence();"), build=build)
    assert "threads 128-191, 224-255: wait in group_wait at kernel.cu" in str(caught.value)
    assert "threads 0-127, 192-223: returned" in str(caught.value)


@pytest.mark.parametrize("engine", ["fibers", "threads"])
def test_a_part_of_a_warpgroup_cannot_multiply(engine: str) -> None:
    body = """  __shared__ __align__(16) float b[64];
  float d[1][4];
  const Halves a[4] = {};
  group_fence();
  group_multiply<8, false>(d, a, describe(b, 128, 0), false);
"""
    with pytest.raises(EmulationError, match="its warpgroup has not all 128 threads"):
        kernel(body).launch(1, 96, 0, [NUMBERS, NUMBERS.copy()], engine=engine)


def test_a_missing_barrier_before_a_product_is_a_race() -> None:
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race") as caught:
        group_product(edit=("  __syncthreads();\n", ""), build="thread")
    assert "group_multiply" in str(caught.value)


def test_a_missing_fence_is_found_by_the_build_that_counts() -> None:
    with pytest.raises(EmulationError, match="thread .* has written to its matrix, and not called fence_async since"):
        group_product(edit=("  fence_async();\n", ""), build="count")
    body = ONCE.replace("  if (t == 5)", "  tile[t] = 0;\n  FENCE\n  __syncthreads();\n  if (t == 5)")
    kernel(body.replace("FENCE", "fence_async();"), build="count").launch(1, 64, 0, [NUMBERS, NUMBERS.copy()])
    with pytest.raises(EmulationError, match="thread .* has written to where it copies, and not called fence_async"):
        kernel(body.replace("FENCE", ""), build="count").launch(1, 64, 0, [NUMBERS, NUMBERS.copy()])


def test_poison_in_shared_memory_is_multiplied() -> None:
    out = group_product(edit=("  for (int i = t % 128;", "  for (int i = t % 128 + 4;"))[1]
    assert np.isnan(out).sum() == 2 * 64  # of each item: the first row of b's first core matrix, in one column


# ---- both together: tiles of b arrive by bulk copies, in two stages, while the products of the last are formed

PIPELINE = """  __shared__ __align__(128) unsigned char tile[2][16 * 64 * 2];
  __shared__ Barrier full[2];
  if (t == 0) {
    for (int i = 0; i < 2; ++i) barrier_init(&full[i], 1);
  }
  __syncthreads();
  const auto load = [&](int step) {
    barrier_expect(&full[step % 2], 2048);
    copy_bulk(tile[step % 2], bs + 512 * step, 2048, &full[step % 2]);
  };
  if (t == 0) load(0);
  const int lane = t % 32, row = t / 32 * 16 + lane / 4, column = 2 * (lane % 4);
  float d[8][4];
  for (int step = 0; step < 8; ++step) {
    Halves left[4];
    for (int i = 0; i < 4; ++i) left[i] = as[64 * (row + i % 2 * 8) + 8 * step + i / 2 * 4 + column / 2];
    if (t == 0 && step < 7) load(step + 1);
    barrier_wait(&full[step % 2], step / 2 % 2);
    group_fence();
    group_multiply<64, true>(d, left, describe(tile[step % 2], 1024, 128), step > 0);
    group_commit();
    group_wait<0>();
    __syncthreads();
  }
  for (int n = 0; n < 8; ++n) {
    for (int i = 0; i < 4; ++i) cs[64 * (row + i / 2 * 8) + 8 * n + column + i % 2] = d[n][i];
  }
"""


def pipeline(edit: tuple[str, str] = ("", ""), **how: Any) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(shape).astype(np.float16) for shape in ((64, 128), (128, 64)))
    laid = np.array([core_matrices(b[16 * k : 16 * k + 16], True, 1024, 128) for k in range(8)])
    options = {name: how.pop(name) for name in tuple(how) if name not in ("build", "portable_switch")}
    built = kernel(PIPELINE.replace(*edit) if edit[0] else PIPELINE, PRODUCT_PARAMETERS, **how)
    arguments = [a.view(np.uint32), laid.view(np.uint32), Output((64, 64), np.float32)]
    return a.astype(np.float64) @ b.astype(np.float64), built.launch(1, 128, 0, arguments, **options).outputs[0]


@every_run
def test_a_pipeline_of_bulk_copies_and_products(how: dict) -> None:
    want, out = pipeline(**how)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-5)


def test_a_product_of_what_has_not_been_waited_for_shows() -> None:
    with pytest.raises(EmulationError, match="the matrix of the product begun in .* was changed before group_wait"):
        pipeline(("barrier_wait(", "if (t == 0) barrier_wait("))
    with pytest.raises((EmulationError, SanitizerError), match="data race|was changed"):
        pipeline(("barrier_wait(", "if (t == 0) barrier_wait("), build="thread")


def test_a_buffer_that_is_refilled_too_early_shows() -> None:
    with pytest.raises((EmulationError, SanitizerError), match="data race|was changed|does not end"):
        pipeline(("    __syncthreads();\n", ""), build="thread")


# ---- nvcc


def instructions(body: str, arch: str) -> str:
    try:
        return compile_source(source(body), Target.ptx(arch)).code.decode()
    except CompilerNotFoundError:
        pytest.skip("no nvcc here")


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_nvcc_makes_the_instructions_of_bulk_copies(arch: str) -> None:
    ptx = instructions(STAGES.replace("if (t == 0) load(0);", "fence_async();\n  if (t == 0) load(0);"), arch)
    for name in (
        "mbarrier.init.shared::cta.b64",
        "fence.mbarrier_init.release.cluster",
        "fence.proxy.async.shared::cta",
        "mbarrier.arrive.expect_tx.shared::cta.b64",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "mbarrier.try_wait.parity.shared::cta.b64",
    ):
        assert name in ptx
    compiled = compile_source(source(STAGES), Target(arch))
    assert compiled.resources is not None
    assert (compiled.resources.spill_stores, compiled.resources.stack) == (0, 0)


def test_older_gpus_can_leave_bulk_copies_out() -> None:
    body = f"  if constexpr (kBulkCopies) {{\n{STAGES}  }} else {{\n    out[t] = x[t];\n  }}\n"
    assert "cp.async.bulk" not in instructions(body, "sm_80")
    assert "cp.async.bulk" in instructions(body, "sm_90")


WIDTHS = [8, 16, 32, 64, 96, 128]
PRODUCTS = """  __shared__ __align__(128) unsigned char b[N * 64 * 2];
  for (int i = t; i < N * 32; i += 128) ((unsigned*)b)[i] = bs[i];
  fence_async();
  __syncthreads();
  Halves a[4][4];
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < 4; ++i) a[k][i] = as[16 * t + 4 * k + i];
  }
  float d[N / 8][4], e[N / 8][4];
  keep_registers(a);
  group_fence();
  for (int k = 0; k < 4; ++k) group_multiply<N, false>(d, a[k], describe(b, 16 * N, 128) + 2 * N * k, k > 0);
  group_commit();
  group_wait<0>();
  keep_registers(d);
  for (int n = 0; n < N / 8; ++n) {
    for (int i = 0; i < 4; ++i) e[n][i] = 2 * d[n][i];
  }
  for (int step = 0; step < 2; ++step) {
    group_fence();
    for (int k = 0; k < 4; ++k) group_multiply<N, true>(e, a[k], describe(b, 16 * N, 128) + 2 * N * k, true);
    group_commit();
    group_wait<0>();
    keep_registers(e);
    for (int n = 0; n < N / 8; ++n) {
      for (int i = 0; i < 4; ++i) e[n][i] += d[n][i];
    }
  }
  for (int n = 0; n < N / 8; ++n) {
    for (int i = 0; i < 4; ++i) cs[4 * (N / 8 * t + n) + i] = e[n][i];
  }
"""


@pytest.mark.parametrize("columns", WIDTHS)
def test_nvcc_makes_products_that_are_not_serialised(columns: int, tmp_path: Path) -> None:
    try:
        nvcc = find_nvcc()
    except CompilerNotFoundError:
        pytest.skip("no nvcc here")
    (tmp_path / "kernel.cu").write_text(source(f"  constexpr int N = {columns};\n{PRODUCTS}", PRODUCT_PARAMETERS))
    argv = nvcc_argv(nvcc, Target("sm_90a"))
    ran = subprocess.run(argv, check=False, cwd=tmp_path, capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    # ptxas says C7510, C7517 and the like where it lets a product be waited for that the source does not wait for.
    assert "(C7" not in said
    assert " 0 bytes spill stores" in said
    code = disassembled(tmp_path / "kernel.cubin")
    # (Both steps of the loop are one, or two.)
    assert len(re.findall(rf"HGMMA\.64x{columns}x16\.F32 R\d+, R\d+, gdesc\[UR\d+\], ", code)) == 4
    assert len(re.findall(rf"HGMMA\.64x{columns}x16\.F32 R\d+, R\d+, gdesc\[UR\d+\]\.tnspB, ", code)) in (4, 8)
    # Only the last product of a group lets the others be waited for.
    assert len(re.findall(r"HGMMA.*gsb0", code)) == len(re.findall(r"HGMMA", code)) // 4
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x0" in code


def test_the_machine_code_of_bulk_copies(tmp_path: Path) -> None:
    try:
        (tmp_path / "kernel.cubin").write_bytes(compile_source(source(STAGES), Target("sm_90")).code)
    except CompilerNotFoundError:
        pytest.skip("no nvcc here")
    code = disassembled(tmp_path / "kernel.cubin")
    for name in ("UBLKCP", "SYNCS.EXCH", "SYNCS.ARRIVE.TRANS64", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "FENCE.VIEW.ASYNC"):
        assert name in code


def disassembled(cubin: Path) -> str:
    """The machine code as text; skips the test where nothing can read it."""
    tool = shutil.which("nvdisasm")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        tool = tool or next((str(file.locate()) for file in files if file.name == "nvdisasm"), None)
    if not tool:
        pytest.skip("no nvdisasm here")
    return subprocess.run([tool, str(cubin)], check=True, capture_output=True, text=True).stdout
