"""Every fault that a kernel can have is planted once, and caught with a message that says where."""

from __future__ import annotations

import numpy as np
import pytest

from invpool.emulator import EmulatedKernel, Output
from invpool.errors import CompileError, EmulationError, SanitizerError

THREADS = 64
HEAD = """
extern "C" __global__ void __launch_bounds__(64) planted(const float* x, float* out, long long n) {
"""


def kernel(body: str, build: str = "plain", portable_switch: bool = False) -> EmulatedKernel:
    return EmulatedKernel(HEAD + body + "}\n", build=build, portable_switch=portable_switch)


def line_of(body: str, text: str) -> int:
    """The line of the source at which a text of the body stands."""
    lines = (HEAD + body).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def launch(planted: EmulatedKernel, shared_bytes: int = 0, grid: int = 1, threads: int = THREADS, **options):
    x = np.arange(threads, dtype=np.float32)
    out = Output((threads,), np.float32)
    return planted.launch(grid, threads, shared_bytes, [x, out, threads], **options).outputs[0]


REVERSE = """  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];
"""


@pytest.mark.parametrize("portable_switch", [False, True])
@pytest.mark.parametrize("build", ["plain", "address", "thread"])
def test_a_sound_kernel_passes_every_build(build: str, portable_switch: bool) -> None:
    out = launch(kernel(REVERSE, build, portable_switch), grid=3)
    np.testing.assert_array_equal(out, np.arange(THREADS, dtype=np.float32)[::-1])


def test_missing_barrier_is_a_race_with_file_and_line() -> None:
    body = REVERSE.replace("  __syncthreads();\n", "")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race") as caught:
        launch(kernel(body, "thread"))
    wrong = {f"kernel.cu:{line_of(body, text)}" for text in ("tile[threadIdx.x] =", "tile[63 -")}
    assert any(place in str(caught.value).splitlines()[0] for place in wrong)
    assert all(f" {place}" in str(caught.value) for place in wrong)


def test_ignored_barrier_is_a_race_too() -> None:
    planted = kernel(REVERSE, "thread")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        launch(planted, ignore_line=line_of(REVERSE, "__syncthreads"))
    launch(planted)


def test_ignored_warp_barrier_is_a_race_too() -> None:
    body = REVERSE.replace("__syncthreads", "__syncwarp").replace("63 - threadIdx.x", "threadIdx.x ^ 1")
    planted = kernel(body, "thread")
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        launch(planted, ignore_line=line_of(body, "__syncwarp"))
    launch(planted)


def test_a_warp_barrier_does_not_order_two_warps() -> None:
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        launch(kernel(REVERSE.replace("__syncthreads", "__syncwarp"), "thread"))


def test_a_shuffle_orders_no_memory() -> None:
    body = REVERSE.replace("__syncthreads()", "__shfl_sync(0xffffffffu, 0, 0)").replace(
        "63 - threadIdx.x", "threadIdx.x ^ 1"
    )
    with pytest.raises(SanitizerError, match="ThreadSanitizer: data race"):
        launch(kernel(body, "thread"))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (REVERSE.replace("tile[63 - threadIdx.x]", "(+tile)[64 - threadIdx.x]"), "global-buffer-overflow"),
        (
            """  DYNAMIC_SHARED(bytes);
  float* tile = reinterpret_cast<float*>(bytes);
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[64 - threadIdx.x];
""",
            "heap-buffer-overflow",
        ),
        ("  out[threadIdx.x] = x[threadIdx.x + 1];\n", "heap-buffer-overflow"),
        ("  out[threadIdx.x] = x[int(threadIdx.x) - 1];\n", "heap-buffer-overflow"),
    ],
    ids=["static shared", "dynamic shared", "global, beyond the end", "global, before the start"],
)
def test_out_of_bounds_is_found_with_file_and_line(body: str, kind: str) -> None:
    with pytest.raises(SanitizerError, match=f"AddressSanitizer: {kind}") as caught:
        launch(kernel(body, "address"), shared_bytes=4 * THREADS)
    assert f"kernel.cu:{line_of(body, 'out[threadIdx.x] =')}" in str(caught.value).splitlines()[0]


def test_an_index_beyond_a_static_array_is_found_by_its_type() -> None:
    body = REVERSE.replace("63 - threadIdx.x", "64 - threadIdx.x")
    with pytest.raises(
        SanitizerError, match=r"kernel.cu:6:\d+: runtime error: index 64 out of bounds for type 'float \[64\]'"
    ):
        launch(kernel(body, "address"))


def test_bytes_before_an_unaligned_array_are_off_limits() -> None:
    planted = kernel("  out[threadIdx.x] = x[int(threadIdx.x) - 2];\n", "address")
    x = np.arange(THREADS + 1, dtype=np.float32)[1:]
    assert x.ctypes.data % 16 == 4
    with pytest.raises(SanitizerError, match="AddressSanitizer: use-after-poison"):
        planted.launch(1, THREADS, 0, [x, Output((THREADS,), np.float32), THREADS])


def test_misaligned_vector_access_is_found_with_file_and_line() -> None:
    body = """  struct alignas(16) Four { float lane[4]; };
  Four four = *reinterpret_cast<const Four*>(x + 1);
  out[threadIdx.x] = four.lane[0];
"""
    with pytest.raises(SanitizerError, match="misaligned address") as caught:
        launch(kernel(body, "address"))
    assert f"kernel.cu:{line_of(body, 'Four four')}" in str(caught.value).splitlines()[0]


def test_barriers_at_two_places_are_named() -> None:
    body = """  if (threadIdx.x < 16) {
    __syncthreads();  // first
  } else {
    __syncthreads();  // second
  }
  out[threadIdx.x] = 0;
"""
    with pytest.raises(EmulationError, match="the block diverged") as caught:
        launch(kernel(body))
    assert f"threads 0-15: wait at __syncthreads at kernel.cu:{line_of(body, 'first')}" in str(caught.value)
    assert f"threads 16-63: wait at __syncthreads at kernel.cu:{line_of(body, 'second')}" in str(caught.value)


def test_return_before_a_barrier_is_named() -> None:
    body = "  out[threadIdx.x] = 0;\n  if (threadIdx.x >= 40) return;\n  __syncthreads();\n"
    with pytest.raises(EmulationError, match="part of the block returned before a barrier") as caught:
        launch(kernel(body))
    assert f"threads 0-39: wait at __syncthreads at kernel.cu:{line_of(body, '__syncthreads')}" in str(caught.value)
    assert "threads 40-63: returned" in str(caught.value)


@pytest.mark.parametrize("build", ["plain", "address", "thread"])
def test_shuffle_by_half_a_warp_is_named(build: str) -> None:
    body = """  float value = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
  out[threadIdx.x] = value;
"""
    with pytest.raises(EmulationError, match="not reached by all lanes of its mask") as caught:
        launch(kernel(body, build))
    line = line_of(body, "__shfl")
    assert f"threads 0-15, 32-47: wait in __shfl_xor_sync at kernel.cu:{line} with mask 0xffffffff" in str(caught.value)


def test_shared_memory_read_before_it_is_written_is_poison() -> None:
    body = REVERSE.replace("  tile[threadIdx.x] = x", "  if (threadIdx.x != 5) tile[threadIdx.x] = x")
    with pytest.raises(EmulationError, match=r"argument 1: 1 of 64 elements are poison, first at \[58\]"):
        launch(kernel(body))


@pytest.mark.parametrize("storage", ["  DYNAMIC_SHARED(bytes);\n", "  __shared__ unsigned char bytes[256];\n"])
def test_shared_memory_is_poisoned_between_blocks(storage: str) -> None:
    body = f"""{storage}  float* tile = reinterpret_cast<float*>(bytes);
  if (blockIdx.x == 0) out[threadIdx.x] = tile[threadIdx.x];
  tile[threadIdx.x] = x[threadIdx.x];
"""
    planted = kernel(body)
    for seed in range(4):  # whichever block is first
        with pytest.raises(EmulationError, match="argument 1: 64 of 64 elements are poison"):
            launch(planted, shared_bytes=256, grid=2, seed=seed)


def test_unwritten_output_is_named() -> None:
    with pytest.raises(
        EmulationError, match=r"argument 1: 24 of 64 elements are poison, first at \[40\]: never written"
    ):
        launch(kernel("  if (threadIdx.x < 40) out[threadIdx.x] = x[threadIdx.x];\n"))


def test_blocks_that_depend_on_their_order_are_found() -> None:
    planted = kernel("  out[threadIdx.x] = float(blockIdx.x);\n")
    with pytest.raises(EmulationError, match="argument 1 depends on the order of blocks or threads: seeds 0 and"):
        launch(planted, grid=16, orders=4)


def test_threads_that_depend_on_their_order_are_found() -> None:
    body = "  if (threadIdx.x < 60) out[threadIdx.x] = 0;\n  out[60 + threadIdx.x % 4] = float(threadIdx.x);\n"
    with pytest.raises(EmulationError, match=r"first differ at \[60\]"):
        launch(kernel(body), orders=4)


def test_orders_start_from_the_same_contents() -> None:
    planted = kernel("  out[threadIdx.x] += x[threadIdx.x];\n")
    out = np.ones(THREADS, np.float32)
    planted.launch(1, THREADS, 0, [np.ones(THREADS, np.float32), out, THREADS], orders=3)
    np.testing.assert_array_equal(out, 2.0)


def test_what_is_not_modelled_does_not_compile() -> None:
    with pytest.raises(CompileError, match="__match_any_sync") as caught:
        kernel("  out[threadIdx.x] = __match_any_sync(0xffffffffu, 1);\n")
    assert "command:" in str(caught.value)
    assert "docs/emulator.md" in str(caught.value)


@pytest.mark.parametrize("portable_switch", [False, True])
def test_a_fault_of_the_processor_leaves_the_process_alive(portable_switch: bool) -> None:
    body = "  out[threadIdx.x] = threadIdx.x == 9 ? *reinterpret_cast<const float*>(8) : 0.0f;\n"
    planted = kernel(body, portable_switch=portable_switch)
    for _ in range(2):
        with pytest.raises(
            EmulationError, match="thread 9 of block 0 was stopped by Segmentation fault; the build 'address'"
        ):
            launch(planted)
    np.testing.assert_array_equal(launch(kernel(REVERSE)), np.arange(THREADS, dtype=np.float32)[::-1])


def test_a_stack_that_runs_out_leaves_the_process_alive() -> None:
    body = "  volatile float much[200000];\n  much[threadIdx.x] = 0;\n  out[threadIdx.x] = much[threadIdx.x];\n"
    with pytest.raises(EmulationError, match="was stopped by Segmentation fault"):
        launch(kernel(body))


def test_stack_overflow_of_one_thread_does_not_run_into_another() -> None:
    body = "  volatile float much[200000];\n  much[threadIdx.x] = 0;\n  out[threadIdx.x] = much[threadIdx.x];\n"
    with pytest.raises(SanitizerError, match="AddressSanitizer"):
        launch(kernel(body, "address"))
