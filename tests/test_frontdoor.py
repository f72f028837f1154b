"""The front door: no build step, on CPU tensors and as far as it goes without a GPU."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import invpool
from helpers import fake_compiler, run_processes
from invpool import frontdoor
from invpool.cache import CACHE_VARIABLE, KernelCache
from invpool.cli.app import main
from invpool.errors import CompilerNotFoundError
from invpool.gpu import KNOWN_GPUS
from invpool.reference import composite, pool_ref
from invpool.runtime import ClosedFormOp, MissingKernelError
from invpool.spec import DTYPES, PoolSpec

H200 = KNOWN_GPUS["h200"]
pool = invpool.inverted_attention_pool


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for known in ("_ops", "_making"):
        monkeypatch.setattr(frontdoor, known, {})
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhk", "bkh"])
def test_values_and_gradients_on_cpu(dtype: str, layout: str) -> None:
    x = torch.randn(4, 7, 9).to(getattr(torch, dtype)).requires_grad_()
    g = torch.randn(4, 7 if layout == "bhk" else 9).to(x.dtype)
    out = pool(x, layout)
    (dx,) = torch.autograd.grad(out, x, g)
    truth = pool_ref(x.detach(), g, layout)
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(out.double(), truth.out, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(dx.double(), truth.dx, rtol=32 * eps, atol=32 * eps)
    assert out.dtype == dx.dtype == x.dtype


def test_shapes_masks_lengths_and_scale() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(pool(x), composite(x.flatten(0, 1)).view(2, 3, 5))
    torch.testing.assert_close(pool(x[0, 0]), composite(x[0, :1])[0])
    mask = torch.rand(2, 3, 5) < 0.5
    torch.testing.assert_close(pool(x, mask=mask), composite(x.flatten(0, 1), mask=mask.flatten(0, 1)).view(2, 3, 5))
    lengths = torch.tensor([[1, 2, 3], [4, 5, 0]])
    assert torch.equal(pool(x, lengths=lengths), pool(x, mask=torch.arange(5) < lengths[..., None]))
    torch.testing.assert_close(pool(x, scale=0.3), composite(x.flatten(0, 1), 0.3).view(2, 3, 5))
    assert torch.equal(pool(x.mT, "bkh"), pool(x))


def test_d13_empty_shapes() -> None:
    for shape in ((0, 7, 9), (4, 0, 9), (0, 0, 9), (0, 9)):
        x = torch.randn(shape, requires_grad=True)
        out = pool(x)
        assert out.shape == shape[:-1]
        (dx,) = torch.autograd.grad(out.sum(), x)
        assert dx.shape == shape
    with pytest.raises(ValueError, match="the mean of no steps does not exist"):
        pool(torch.randn(4, 7, 0))
    with pytest.raises(ValueError, match="the mean of no steps does not exist"):
        pool(torch.randn(4, 0, 7), "bkh")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([[1.0]],), TypeError, "x is list"),
        ((torch.zeros(3),), ValueError, r"expected \[\.\.\.,H,K\]"),
        ((torch.zeros(2, 3), "hbk"), ValueError, "layout is 'hbk'; legal: bhk, bkh"),
        ((torch.zeros(2, 3, dtype=torch.int64),), TypeError, "dtype is 'torch.int64'; legal"),
        ((torch.zeros(2, 3), "bhk", None, None, None, "fast"), ValueError, "precision is 'fast'"),
        ((torch.zeros(2, 3).double(), "bhk", None, None, None, "tf32"), ValueError, "float32 only"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        pool(*arguments)


def test_gradients_of_every_order_and_transforms() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool, (x,))
    assert torch.autograd.gradgradcheck(pool, (x,))
    whole = torch.func.vmap(lambda item: pool(item))(x.detach())
    torch.testing.assert_close(whole, pool(x).detach())
    jacobian = torch.func.jacrev(lambda item: pool(item))(x.detach()[0])
    assert jacobian.shape == (4, 4, 3)
    _, tangent = torch.func.jvp(lambda x: pool(x), (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangent[0], torch.einsum("ahk->a", jacobian))


def test_compile_traces_through_it() -> None:
    inner = nn.Linear(5, 5)

    def model(x: Tensor) -> Tensor:
        return pool(inner(x), "bkh")

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (4, 5):
        x = torch.randn(batch, 3, 5, requires_grad=True)
        torch.testing.assert_close(compiled(x), model(x))
        (traced,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(traced, torch.autograd.grad(model(x).sum(), x)[0])


def test_under_autocast_the_dtype_of_x_decides() -> None:
    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pool(x).dtype == torch.float32
        assert pool(nn.Linear(8, 8)(x)).dtype == torch.bfloat16


def test_the_closed_form_takes_items_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(7, 6) < 0.7
    whole = [pool(x), pool(x, mask=mask)]
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in whole]
    monkeypatch.setattr("invpool.runtime.CLOSED_FORM_BYTES", 2 * 6 * 8 * 6**2)
    assert ClosedFormOp(6, 4, torch.float64, "bhk", False)._items() == 2
    for out, dx, given in zip(whole, gradients, (None, mask), strict=True):
        parts = pool(x, mask=given)
        torch.testing.assert_close(parts, out)
        torch.testing.assert_close(torch.autograd.grad(parts.sum(), x)[0], dx)


def test_the_module() -> None:
    module, x = invpool.InvertedAttentionPool(scale=0.4, learn_scale=True), torch.randn(2, 5, 3)
    torch.testing.assert_close(module(x), pool(x, scale=0.4))
    assert list(module.state_dict()) == ["scale"]
    module(x).sum().backward()
    assert module.scale is not None
    assert module.scale.grad is not None
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    assert "layout='bhk', learned scale" in repr(module)
    time_major = invpool.InvertedAttentionPool("bkh")
    assert not time_major.state_dict()
    assert torch.equal(time_major(x), pool(x, "bkh"))
    for arguments in ({"learn_scale": True}, {"scale": float("nan")}, {"layout": "hbk"}, {"precision": "fast"}):
        with pytest.raises(ValueError, match=r"give scale=|must be finite|legal"):
            invpool.InvertedAttentionPool(**arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------- kernels, as far as they go without a GPU

SPEC = PoolSpec(9, 20)


def with_kernels(cache: Path, may_make: bool = True, spec: PoolSpec = SPEC) -> Any:
    return frontdoor._with_kernels(spec, H200, may_make, KernelCache(cache, fake_compiler))


def test_kernels_are_made_once_and_found_again(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "invpool"):
        op = with_kernels(own_cache)
    assert type(op).__name__ == "GeneratedOp"
    assert op.folder == frontdoor.package_folder(SPEC, H200)
    assert "making kernels for h9_k20_f32_bhk on h200" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "invpool"):
        again = with_kernels(own_cache, may_make=False)
    assert "making" not in caplog.text
    assert again.folder == op.folder
    x = torch.randn(3, 9, 20)
    torch.testing.assert_close(op(x), composite(x))


def test_a_package_that_was_not_proved_or_is_damaged_is_made_again(own_cache: Path) -> None:
    folder = with_kernels(own_cache).folder
    (folder / "proof.json").unlink()
    with pytest.raises(MissingKernelError):
        with_kernels(own_cache, may_make=False)
    assert with_kernels(own_cache).folder == folder
    assert (folder / "proof.json").exists()
    (folder / "manifest.json").write_text("{")
    with pytest.raises(MissingKernelError):
        with_kernels(own_cache, may_make=False)


def test_without_leave_to_make_kernels_the_message_says_what_to_run(own_cache: Path) -> None:
    with pytest.raises(MissingKernelError, match=r"INVPOOL_DISABLE_JIT is set; run: invpool warmup --H 9 --K 20"):
        with_kernels(own_cache, may_make=False)


def test_without_a_compiler_one_warning_and_the_closed_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **__: Any) -> Any:
        raise CompilerNotFoundError("no nvcc that runs was found")

    monkeypatch.setattr(frontdoor, "generate", no_compiler)
    monkeypatch.setattr(frontdoor, "present_gpu", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        assert isinstance(frontdoor._op_of(9, 20, torch.float32, "bhk", "exact", False, 0), ClosedFormOp)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "no nvcc that runs was found" in warning
    assert "pip install 'invpool[nvcc]'" in warning
    monkeypatch.setenv(frontdoor.DISABLE_VARIABLE, "1")
    with pytest.raises(MissingKernelError, match="invpool warmup --H 10 --K 20"):
        frontdoor._op_of(10, 20, torch.float32, "bhk", "exact", False, 0)


def test_d05_a_first_call_in_a_capture_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontdoor, "present_gpu", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MissingKernelError, match="inside CUDA graph capture"):
        frontdoor._op_of(9, 20, torch.float32, "bhk", "exact", False, 0)


def test_another_kernel_is_another_package() -> None:
    folders = [
        frontdoor.package_folder(spec, gpu)
        for spec, gpu in (
            (SPEC, H200),
            (PoolSpec(9, 21), H200),
            (PoolSpec(9, 20, "float64"), H200),
            (SPEC, KNOWN_GPUS["a100"]),
        )
    ]
    assert len({folder.parent for folder in folders}) == 4


def test_threads_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PoolSpec] = []
    entered = threading.Barrier(4, timeout=60)

    def find(spec: PoolSpec, gpu: Any, may_make: bool) -> Any:
        made.append(spec)
        return frontdoor._closed_form(spec)

    monkeypatch.setattr(frontdoor, "_with_kernels", find)
    monkeypatch.setattr(frontdoor, "present_gpu", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def ask() -> None:
        entered.wait()
        frontdoor._op_of(9, 20, torch.float32, "bhk", "exact", False, 0)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [SPEC]


def _make_in_process(number: int, root: str) -> None:
    os.environ[CACHE_VARIABLE] = root
    op = with_kernels(Path(root))
    assert (op.folder / "proof.json").exists()


def test_d23_processes_that_need_the_same_kernel_make_one_package(own_cache: Path) -> None:
    assert run_processes(_make_in_process, [(n, str(own_cache)) for n in range(4)], 200) == [0] * 4
    folder = frontdoor.package_folder(SPEC, H200)
    assert [entry.name for entry in folder.parent.iterdir()] == [SPEC.slug]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["invpool", "warmup", "--H", "9", "--K", "20"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        assert "there is no GPU here" in " ".join(capsys.readouterr().err.split())
