"""Launching: streams, threads, graphs, sizes, registration, and a process that ends as it should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import invpool
from helpers import REPO, random_input, runnable
from invpool.algorithms import find_algorithm
from invpool.compile import has_pycuda
from invpool.reference import norm_error, pool_ref
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec

GpuOp = Callable[..., GeneratedOp]
GpuPackage = Callable[..., Path]
FASTEST = [name for name in runnable() if name not in ("recompute", "three_pass")]


@pytest.mark.parametrize("algorithm", FASTEST)
def test_batches_beyond_the_grid_axes_that_stop_at_65535(gpu_op: GpuOp, algorithm: str) -> None:
    for spec, batches in ((PoolSpec(7, 8), (65535, 65536, 70001)), (PoolSpec(1, 1), (65536,))):
        op = gpu_op(spec, algorithm)
        for batch in batches:
            x = torch.randn(batch, spec.H, spec.K, device="cuda", requires_grad=True)
            g = torch.randn(batch, spec.H, device="cuda")
            out, truth = op(x), pool_ref(x, g)
            (dx,) = torch.autograd.grad(out, x, g)
            assert norm_error(out.detach(), truth.out) <= 3e-7
            assert norm_error(dx, truth.dx) <= 5e-7
            last = x[-1:].detach().requires_grad_()
            assert torch.equal(op(last)[0], out[-1])
            assert torch.equal(torch.autograd.grad(op(last), last, g[-1:])[0][0], dx[-1])


@pytest.mark.parametrize("algorithm", [*FASTEST, "three_pass"])
def test_offsets_beyond_32_bits(gpu_op: GpuOp, algorithm: str) -> None:
    """x has 2.2e9 elements, and so has the attention scratch: wrapped offsets would hit the first items."""
    spec = PoolSpec(256, 104, "float16")
    op = gpu_op(spec, algorithm)
    batch = 82_200
    x = torch.randn(64, 256, 104, device="cuda").half().repeat(batch // 64 + 1, 1, 1)[:batch]
    assert x.numel() > 2**31
    x[-3:] = torch.randn(3, 256, 104, device="cuda").half()
    x.requires_grad_()
    out = op(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    for part in (slice(0, 3), slice(-3, None)):
        few = x[part].detach().clone().requires_grad_()
        assert torch.equal(op(few), out[part])
        assert torch.equal(torch.autograd.grad(op(few), few, torch.ones(3, 256, device="cuda").half())[0], dx[part])
    assert not out.isnan().any()
    assert not dx.isnan().any()


def test_empty_batch_launches_nothing(gpu_op: GpuOp) -> None:
    op = gpu_op(PoolSpec(7, 8))
    x = torch.empty(0, 7, 8, device="cuda", requires_grad=True)
    out = op(x)
    assert out.shape == (0, 7)
    assert torch.autograd.grad(out.sum(), x)[0].shape == (0, 7, 8)
    torch.cuda.synchronize()
    torch.testing.assert_close(op(torch.ones(1, 7, 8, device="cuda")), torch.ones(1, 7, device="cuda"))


@pytest.mark.parametrize("algorithm", FASTEST)
def test_the_current_stream_is_used(gpu_op: GpuOp, algorithm: str) -> None:
    op = gpu_op(PoolSpec(21, 96), algorithm)
    y = torch.randn(8, 21, 96, device="cuda")
    expected = 2 * op(y)
    stream = torch.cuda.Stream()
    x = torch.zeros_like(y)
    for _ in range(50):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            x.copy_(y)
            z = op(x) * 2
        stream.synchronize()
        assert torch.equal(z, expected)  # on another stream it would have read zeros


@pytest.mark.parametrize("algorithm", FASTEST)
def test_backward_in_autograds_thread_and_in_threads_of_our_own(gpu_op: GpuOp, algorithm: str) -> None:
    op = gpu_op(PoolSpec(21, 96), algorithm)

    def train(seed: int, rounds: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        results = []
        for _ in range(rounds):
            x = torch.randn(4, 21, 96, device="cuda", generator=generator).requires_grad_()
            op(x).sum().backward()
            results.append(x.grad)
        return results  # type: ignore[return-value]

    with torch.autograd.set_multithreading_enabled(False):
        expected = {seed: train(seed, 20) for seed in range(4)}
    for wave in range(5):  # twenty short-lived threads, four at once
        got: dict[int, list[torch.Tensor]] = {}

        def run(seed: int, results: dict[int, list[torch.Tensor]] = got) -> None:
            results[seed] = train(seed, 20)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [0, 1, 2, 3], f"wave {wave}"
        for seed, results in got.items():
            assert all(torch.equal(a, b) for a, b in zip(results, expected[seed], strict=True))


def test_a_fresh_thread_may_be_the_first_to_load(gpu_package: GpuPackage, tmp_path: Path) -> None:
    folder = tmp_path / "fresh"
    shutil.copytree(gpu_package(PoolSpec(7, 8)), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"generator": "another"}))
    op = invpool.load(folder)
    got: list[torch.Tensor] = []
    x = torch.ones(1, 7, 8, device="cuda")
    thread = threading.Thread(target=lambda: got.append(op(x)))
    thread.start()
    thread.join()
    torch.testing.assert_close(got[0], torch.ones(1, 7, device="cuda"))


@pytest.mark.parametrize("algorithm", FASTEST)
def test_capture_cold_is_one_clear_error_and_warm_replays_bitwise(
    gpu_package: GpuPackage, tmp_path: Path, algorithm: str
) -> None:
    folder = tmp_path / "cold"
    shutil.copytree(gpu_package(PoolSpec(21, 9), algorithm), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"generator": "cold"}))
    op = invpool.load(folder)
    x = torch.randn(4, 21, 9, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="first time inside CUDA graph capture"), torch.cuda.graph(graph):
        op(x)
    torch.cuda.synchronize()
    # What the failed capture left behind must not be used: the eager op is right, not only self-consistent.
    truth = pool_ref(x, torch.ones(4, 21, device="cuda"))
    assert norm_error(op(x), truth.out) <= 3e-7
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    for seed in range(3):
        x.copy_(random_input(21, 9, "bhk", 4, torch.float32).cuda() * (seed + 1))
        graph.replay()
        assert torch.equal(out, op(x))


@pytest.mark.parametrize("variant", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize(
    "spec", [PoolSpec(21, 9), PoolSpec(21, 9, "float16", "bkh", masked=True)], ids=lambda s: s.slug
)
def test_opcheck(gpu_op: GpuOp, spec: PoolSpec, variant: str) -> None:
    op = gpu_op(spec)
    raw = getattr(torch.ops, op.namespace)
    x = random_input(21, 9, spec.layout, 4, getattr(torch, spec.dtype)).cuda()
    x = {"contiguous": x, "transposed": x.mT.contiguous().mT, "expanded": x[:1].expand_as(x)}[variant]
    x = x.detach().requires_grad_()
    mask = op.full_mask(x, None)
    torch.library.opcheck(raw.forward.default, (x, None, mask))
    with torch.no_grad():
        state = op.backward_state(raw.forward(x, None, mask))
    g = torch.randn(4, 21, device="cuda").to(x.dtype).requires_grad_()
    torch.library.opcheck(raw.backward.default, (g, x, None, mask, *state))


@pytest.mark.parametrize("algorithm", FASTEST)
def test_strides_and_broadcast_gradients(gpu_op: GpuOp, algorithm: str) -> None:
    op = gpu_op(PoolSpec(21, 9), algorithm)
    raw = torch.randn(21, 4, 9, device="cuda")
    for x in (
        raw.transpose(0, 1),
        torch.randn(4, 9, 21, device="cuda").mT,
        raw[:, :1].transpose(0, 1).expand(4, 21, 9),
    ):
        leaf, dense = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
        assert torch.equal(op(leaf), op(dense))
        for g in (torch.ones(1, 1, device="cuda").expand(4, 21), torch.randn(21, 4, device="cuda").mT):
            (dx,) = torch.autograd.grad(op(leaf), leaf, g)
            assert torch.equal(dx, torch.autograd.grad(op(dense), dense, g.contiguous())[0])


def test_compile_fullgraph(gpu_op: GpuOp) -> None:
    op = gpu_op(PoolSpec(21, 9, layout="bkh"))
    model_in, model_out = torch.nn.Linear(21, 21).cuda(), torch.nn.Linear(21, 3).cuda()

    def model(x: torch.Tensor) -> torch.Tensor:
        return model_out(op(model_in(x)))

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for batch in (4, 5, 7, 1):
        x = torch.randn(batch, 9, 21, device="cuda")
        results = []
        for function in (model, compiled):
            leaf = x.clone().requires_grad_()
            results.append((function(leaf), *torch.autograd.grad(function(leaf).sum(), (leaf, model_in.weight))))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(eager, traced, rtol=2e-5, atol=2e-5)


def test_gradcheck_and_double_backward(gpu_op: GpuOp) -> None:
    op = gpu_op(PoolSpec(5, 3, "float64"))
    x = random_input(5, 3, "bhk", 2).cuda().requires_grad_()
    assert torch.autograd.gradcheck(op, (x,))
    assert torch.autograd.gradgradcheck(op, (x,))


@pytest.mark.parametrize("algorithm", [name for name in FASTEST if not find_algorithm(name).only_oldest])
def test_ptx_alone_serves_a_gpu_that_no_cubin_is_for(gpu_package: GpuPackage, tmp_path: Path, algorithm: str) -> None:
    folder = tmp_path / "ptx"
    shutil.copytree(gpu_package(PoolSpec(21, 9), algorithm), folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for kernel in manifest["kernels"]:
        kernel["images"] = [image for image in kernel["images"] if image["target"].startswith("compute_")]
    path.write_text(json.dumps(manifest))
    x = torch.randn(4, 21, 9, device="cuda", requires_grad=True)
    truth = pool_ref(x, torch.ones(4, 21, device="cuda"))
    out = invpool.load(folder)(x)
    assert norm_error(out.detach(), truth.out) <= 3e-7
    assert norm_error(torch.autograd.grad(out.sum(), x)[0], truth.dx) <= 5e-7


def test_no_code_for_this_gpu_lists_what_is_there(gpu_package: GpuPackage, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(gpu_package(PoolSpec(21, 9)), folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for kernel in manifest["kernels"]:
        kernel["images"] = [kernel["images"][0] | {"target": "sm_999"}]
    path.write_text(json.dumps(manifest))
    op = invpool.load(folder)
    with pytest.raises(RuntimeError, match=r"no code for sm_\d+ .*present: sm_999; regenerate with: invpool generate"):
        op(torch.randn(4, 21, 9, device="cuda"))


def test_damaged_code_is_refused(gpu_package: GpuPackage, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(gpu_package(PoolSpec(21, 9)), folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generator": "damaged"}))
    for cubin in folder.glob("*.cubin"):
        cubin.write_bytes(cubin.read_bytes()[:-1] + b"?")
    op = invpool.load(folder)
    with pytest.raises(RuntimeError, match="is not what the manifest recorded; regenerate with"):
        op(torch.randn(4, 21, 9, device="cuda"))


ENDINGS = {
    "normally": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "raise": ("raise ValueError('the person')", 1),
    "thread": ("threading.Thread(target=lambda: (op(x), time.sleep(60)), daemon=True).start(); time.sleep(0.5)", 0),
}


@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_a_process_ends_as_it_should(gpu_package: GpuPackage, ending: str) -> None:
    """With torch alone on the path, autograd's thread used, and whatever ending: no abort, no other noise."""
    folder = gpu_package(PoolSpec(7, 8))
    code = (
        "import sys, threading, time, torch\n"
        "sys.path.insert(0, '.')\n"
        f"from {folder.name} import op\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = torch.randn(2, 7, 8, device='cuda', requires_grad=True)\n"
        "op(x).sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('invpool', 'pycuda')]\n" + ENDINGS[ending][0] + "\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder.parent,
        env=env,
        timeout=120,
    )
    assert done.returncode == ENDINGS[ending][1], done.stderr
    assert "PyCUDA" not in done.stderr
    assert ("the person" in done.stderr) == (ending == "raise")


def test_the_whole_chain_with_pycuda_compiling(tmp_path: Path) -> None:
    """generate -> check -> import -> train, as processes; PyCUDA compiles, which nothing else here needs."""
    if not has_pycuda():
        pytest.skip("PyCUDA is not installed")
    env = os.environ | {"INVPOOL_CACHE_DIR": str(tmp_path / "cache"), "NO_COLOR": "1", "COLUMNS": "120"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], check=False, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    generated = run("-m", "invpool.cli.app", "generate", "--H", "128", "--K", "32")
    assert f"checked on {torch.cuda.get_device_name()}, forward and backward, against float64" in generated
    assert "WRONG" not in generated
    assert "kernels on" in run("-m", "invpool.cli.app", "check", "build/h128_k32_f32_bhk")
    assert "0.800 ->" in run(str(REPO / "examples" / "overfit" / "overfit.py"))
    assert "inverted attention" in run(str(REPO / "examples" / "japanese_vowels" / "train.py"), "--epochs", "5")
