"""EmulatedKernel: positions, shuffles, reductions, arguments, engines, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from invpool.emulator import EmulatedKernel, Output, build
from invpool.errors import CompilerNotFoundError, EmulationError

POSITIONS = """
extern "C" __global__ void positions(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = int(100 * block + thread);
}
"""

SHUFFLES = """
extern "C" __global__ void shuffles(float* out, double* wide) {
  const int t = threadIdx.x;
  const unsigned all = 0xffffffffu;
  out[t] = __shfl_sync(all, float(t), 3);
  out[64 + t] = __shfl_up_sync(all, float(t), 1);
  out[128 + t] = __shfl_down_sync(all, float(t), 2, 8);
  out[192 + t] = __shfl_xor_sync(all, float(t), 16);
  double sum = t;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(all, sum, step);
  wide[t] = sum;
}
"""

REDUCTIONS = """
extern "C" __global__ void reductions(int* out) {
  const int t = threadIdx.x;
  out[t] = __syncthreads_and(t < 40);
  out[40 + t] = __syncthreads_and(t < 39);
  out[80 + t] = __syncthreads_or(t == 7);
  out[120 + t] = __syncthreads_count(t % 4 == 0);
}
"""


STATIC_SHARED = """
template <int N>
__device__ float reversed(const float* x) {
  __shared__ float part[N];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  return part[N - 1 - threadIdx.x];
}
__device__ inline float swapped(float value) {
  __shared__ float part[64];
  part[threadIdx.x] = value;
  __syncthreads();
  return part[threadIdx.x ^ 1];
}
extern "C" __global__ void static_shared(const float* x, float* out) {
  __shared__ float mine[64];
  mine[threadIdx.x] = reversed<64>(x);
  __syncthreads();
  out[threadIdx.x] = mine[threadIdx.x ^ 1] + 100 * swapped(x[threadIdx.x]);
}
"""


@pytest.mark.parametrize("build", ["plain", "address", "thread", "count"])
def test_shared_variables_of_templates_and_functions(build: str) -> None:
    x = np.arange(64, dtype=np.float32)
    (out,) = EmulatedKernel(STATIC_SHARED, build=build).launch(2, 64, 0, [x, Output((64,), np.float32)]).outputs
    swapped = np.arange(64) ^ 1
    np.testing.assert_array_equal(out, 63 - swapped + 100 * swapped)


def test_positions_in_three_dimensions() -> None:
    kernel = EmulatedKernel(POSITIONS)
    (out,) = kernel.launch((2, 3, 2), (4, 2, 3), 0, [Output((12, 24), np.int32)]).outputs
    np.testing.assert_array_equal(out, 100 * np.arange(12)[:, None] + np.arange(24))


@pytest.mark.parametrize("engine", ["fibers", "threads"])
def test_shuffles_are_those_of_a_warp(engine: str) -> None:
    kernel = EmulatedKernel(SHUFFLES)
    out, wide = kernel.launch(1, 64, 0, [Output((4, 64), np.float32), Output((64,), np.float64)], engine=engine).outputs
    t = np.arange(64)
    np.testing.assert_array_equal(out[0], t // 32 * 32 + 3)
    np.testing.assert_array_equal(out[1], np.where(t % 32 == 0, t, t - 1))
    np.testing.assert_array_equal(out[2], np.where(t % 8 < 6, t + 2, t))
    np.testing.assert_array_equal(out[3], t ^ 16)
    np.testing.assert_array_equal(wide, np.where(t < 32, 496, 1520))


@pytest.mark.parametrize("engine", ["fibers", "threads"])
def test_reductions_of_predicates(engine: str) -> None:
    (out,) = EmulatedKernel(REDUCTIONS).launch(1, 40, 0, [Output((4, 40), np.int32)], engine=engine).outputs
    np.testing.assert_array_equal(out, np.repeat([[1], [0], [1], [10]], 40, axis=1))


def test_points_are_counted_by_block() -> None:
    launched = EmulatedKernel(REDUCTIONS).launch(3, 40, 0, [Output((4, 40), np.int32)])
    assert [(p.operation, p.executions) for p in launched.points] == [
        ("__syncthreads_and", 3),
        ("__syncthreads_and", 3),
        ("__syncthreads_or", 3),
        ("__syncthreads_count", 3),
    ]
    assert [
        REDUCTIONS.splitlines()[p.line - 1].strip().partition(" = ")[2].partition("(")[0] for p in launched.points
    ] == [p.operation for p in launched.points]


def test_tensors_and_arrays_are_changed_in_place() -> None:
    kernel = EmulatedKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
    tensor, array = torch.ones(8), np.ones(8, np.float32)
    for one in (tensor, array):
        kernel.launch(1, 8, 0, [one])
        assert one.tolist() == [2.0] * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_are_poisoned_with_nan(dtype: torch.dtype) -> None:
    assert torch.isnan(Output((5,), dtype).make()).all()


def test_null_pointers_and_integers() -> None:
    source = 'extern "C" __global__ void k(const float* none, long long n, long long* out) { *out = none ? 0 : n; }'
    (out,) = EmulatedKernel(source).launch(1, 1, 0, [None, -(2**40), Output((1,), np.int64)]).outputs
    assert out[0] == -(2**40)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([np.ones((4, 4), np.float32)[:, ::2]], ValueError, "strided"),
        ([torch.ones(4, 4).mT[:, 1:]], ValueError, "contiguous"),
        (["x"], TypeError, "argument 0 is str; legal: a tensor"),
    ],
)
def test_arguments_that_cannot_be_passed(arguments: list, error: type[Exception], message: str) -> None:
    kernel = EmulatedKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
    with pytest.raises(error, match=message):
        kernel.launch(1, 1, 0, arguments)


def test_extents_and_names_that_are_refused() -> None:
    kernel = EmulatedKernel(POSITIONS)
    out = [Output((1,), np.int32)]
    with pytest.raises(ValueError, match="grid is 0; legal: one to three numbers of at least 1"):
        kernel.launch(0, 1, 0, out)
    with pytest.raises(ValueError, match="at most 1024 threads"):
        kernel.launch(1, (32, 33), 0, out)
    with pytest.raises(ValueError, match="engine is 'cuda'; legal: fibers, threads"):
        kernel.launch(1, 1, 0, out, engine="cuda")
    with pytest.raises(ValueError, match="build is 'fast'; legal: plain, address, thread, count"):
        EmulatedKernel(POSITIONS, build="fast")
    with pytest.raises(ValueError, match=r"2 kernels \(positions, shuffles\); say which with entry="):
        EmulatedKernel(POSITIONS + SHUFFLES)
    with pytest.raises(EmulationError, match="takes 33 arguments; the emulator passes at most 32"):
        kernel.launch(1, 1, 0, [None] * 33)


def test_a_build_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVPOOL_CACHE_DIR", str(tmp_path))
    first = build.build_kernel(POSITIONS, "positions", "plain")
    assert first.is_relative_to(tmp_path)
    monkeypatch.setattr(build, "_run_gxx", lambda *_: pytest.fail("compiled again"))
    assert build.build_kernel(POSITIONS, "positions", "plain") == first
    monkeypatch.undo()


def test_a_damaged_build_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVPOOL_CACHE_DIR", str(tmp_path))
    first = build.build_kernel(POSITIONS, "positions", "plain")
    whole = first.read_bytes()
    first.write_bytes(whole[:100])
    assert build.build_kernel(POSITIONS, "positions", "plain").stat().st_size == len(whole)


def test_missing_compiler_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("INVPOOL_GXX", raising=False)
    assert not build.has_gxx()
    with pytest.raises(CompilerNotFoundError, match=r"apt-get install g\+\+"):
        EmulatedKernel(POSITIONS)


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("tensor([63., 62., 61.")
    assert "SynchronisationPoint(operation='__syncthreads', line=5, executions=1)" in run.stdout


def test_importing_the_emulator_needs_neither_torch_nor_numpy() -> None:
    code = "import invpool.emulator, sys; print([m for m in ('torch', 'numpy', 'jinja2') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
