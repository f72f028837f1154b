"""The op without a build step: kernels are generated when a shape is first met, and kept in the cache.

    <cache root>/packages/<digest of the kernels>/<slug>/

The digest is of the kernels' sources, the run time and the version: whatever changes one of them makes another package.
A package that lies there whole and was proved is opened; else it is generated, proved and put there, by one process at
a time. CPU tensors take the closed form; so do CUDA tensors where no kernels can be made, after one warning.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from invpool._version import __version__
from invpool.abi import DIRECTIONS
from invpool.binding import import_package, read_manifest, read_proof
from invpool.cache import KernelCache, default_root, is_writable, lock_for, private_folder
from invpool.errors import CompilerNotFoundError, PlanError
from invpool.generate import Request, generate, plan
from invpool.gpu import Gpu, present_gpu
from invpool.render import source_digest
from invpool.runtime import ClosedFormOp, MissingKernelError, PoolOp
from invpool.spec import PoolSpec

log = logging.getLogger("invpool")

DISABLE_VARIABLE: Final = "INVPOOL_DISABLE_JIT"
_NO_KERNELS: Final = "pip install 'invpool[nvcc]', which also needs g++: apt-get install g++"

# H, K, dtype, layout, precision, masked and device number, None for the CPU: what a call knows without making a spec.
_Key = tuple[int, int, torch.dtype, str, str, bool, int | None]
_ops: dict[_Key, PoolOp] = {}
_guard: Final = threading.Lock()
_making: dict[_Key, threading.Lock] = {}


# ---------------------------------------------------------------- what users call


def inverted_attention_pool(
    x: Tensor,
    layout: str = "bhk",
    scale: Tensor | float | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    precision: str = "exact",
) -> Tensor:
    """``out[h] = sum_j softmax_j(scale <x_h, x_j>) mean_k x[j,k]``, by a kernel for this very H, K, dtype and layout.

    The first call for a shape on a GPU generates, compiles and proves the kernel (seconds; one INFO line of the logger
    ``invpool`` before it), or finds it in the cache. Under autocast the dtype of x decides, as it does elsewhere.

    Args:
        x: ``[...,H,K]`` (layout ``bhk``) or ``[...,K,H]`` (``bkh``), any leading axes or none, any strides; float32,
            float16, bfloat16 or float64, on cpu or cuda.
        scale: None for 1/sqrt(K), a finite number, or a tensor of one element, which may require a gradient.
        mask: ``[...,H]`` bool or uint8, true where a variate takes part.
        lengths: ``[...]`` integers, in place of mask: the first so many variates take part.
        precision: ``exact``, or ``tf32`` for float32 with errors up to 1e-3.

    Returns:
        out ``[...,H]``, of x's dtype.

    Raises:
        TypeError, ValueError: an argument is of a wrong type, dtype, shape or device.
        MissingKernelError: a kernel is missing, and cannot be made in a graph capture or with INVPOOL_DISABLE_JIT set.
        CheckError: the kernel gave wrong numbers on this GPU.
    """
    _require_input(x, layout)
    H, K = x.shape[-2:] if layout == "bhk" else (x.shape[-1], x.shape[-2])
    if H == 0:
        return x.new_empty((*x.shape[:-2], 0)) + 0 * x.sum()  # nothing to pool, but a gradient of x's shape
    device = x.device.index if x.device.type == "cuda" else None
    op = _op_of(int(H), int(K), x.dtype, layout, precision, mask is not None or lengths is not None, device)
    return op(x, scale, mask, lengths)


class InvertedAttentionPool(nn.Module):
    """:func:`inverted_attention_pool` as a module, for whatever shapes it meets.

    Args:
        layout, precision: see there.
        scale: None for 1/sqrt(K), or a finite number.
        learn_scale: makes the scale a parameter, which must be given a start.

    Raises:
        ValueError: a value is not legal.
    """

    def __init__(
        self,
        layout: str = "bhk",
        scale: float | None = None,
        learn_scale: bool = False,
        precision: str = "exact",
    ) -> None:
        super().__init__()
        PoolSpec(1, 1, layout=layout, precision=precision)  # type: ignore[arg-type]
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")
        if learn_scale and scale is None:
            raise ValueError("learn_scale needs a start, since K is not known yet; give scale=1/sqrt(K) or another")
        self.layout, self.precision, self._given = layout, precision, scale
        self.scale = nn.Parameter(torch.tensor(float(scale))) if learn_scale and scale is not None else None

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """See :func:`inverted_attention_pool`."""
        scale = self._given if self.scale is None else self.scale
        return inverted_attention_pool(x, self.layout, scale, mask, lengths, self.precision)

    def extra_repr(self) -> str:
        learned = (
            ", learned scale" if self.scale is not None else "" if self._given is None else f", scale={self._given}"
        )
        return f"layout={self.layout!r}{learned}"


def warmup(
    H: int,
    K: int,
    dtype: object = "float32",
    layout: str = "bhk",
    precision: str = "exact",
    masked: bool = False,
    device: int = 0,
) -> Path | None:
    """Makes the kernel of a shape now, so that no later call has to: before a graph capture, or on a build machine.

    Returns:
        The folder of the package; None where no kernels can be made here, after a warning that says why.

    Raises:
        ValueError, TypeError: the shape is not legal.
        CheckError: the kernel gave wrong numbers on this GPU.
    """
    spec = PoolSpec(H, K, str(dtype), layout, precision, masked)  # type: ignore[arg-type]
    op = _find_op(spec, device, may_make=True)
    folder: Path | None = getattr(op, "folder", None)  # its class is that of the package's own run time
    return folder


# ---------------------------------------------------------------- which op


def _require_input(x: Tensor, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {type(x).__name__}; expected a torch.Tensor")
    if layout not in ("bhk", "bkh"):
        raise ValueError(f"layout is {layout!r}; legal: bhk, bkh")
    if x.ndim < 2:
        axes = "[...,H,K]" if layout == "bhk" else "[...,K,H]"
        raise ValueError(f"x has shape {tuple(x.shape)}; expected {axes}")
    K = x.shape[-1] if layout == "bhk" else x.shape[-2]
    if K == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: K is 0, and the mean of no steps does not exist")


def _op_of(H: int, K: int, dtype: torch.dtype, layout: str, precision: str, masked: bool, device: int | None) -> PoolOp:
    """The op of a shape: a look-up, but for the first time, which torch.compile has happen while it traces."""
    key = (H, K, dtype, layout, precision, masked, device)
    # torch.compile looks at a dictionary once: it must hold the op by then.
    if torch.compiler.is_compiling() or key not in _ops:
        _prepare(H, K, str(dtype), layout, precision, masked, device)
    return _ops[key]


# What it returns is a constant to torch.compile; what it leaves behind is then found like any global.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare(H: int, K: int, dtype: str, layout: str, precision: str, masked: bool, device: int | None) -> bool:
    spec = PoolSpec(H, K, dtype, layout, precision, masked)  # type: ignore[arg-type]
    _find_op(spec, device, may_make=os.environ.get(DISABLE_VARIABLE, "0") in ("", "0"))
    return True


def _find_op(spec: PoolSpec, device: int | None, may_make: bool) -> PoolOp:
    """The op, opened or made by one thread; others wait for it."""
    key = (spec.H, spec.K, getattr(torch, spec.dtype), spec.layout, spec.precision, spec.masked, device)
    with _guard:
        making = _making.setdefault(key, threading.Lock())
    with making:
        if key not in _ops:
            gpu = None if device is None or not torch.cuda.is_available() else present_gpu(device)
            _ops[key] = _closed_form(spec) if gpu is None else _with_kernels(spec, gpu, may_make)
        return _ops[key]


def _closed_form(spec: PoolSpec) -> ClosedFormOp:
    return ClosedFormOp(spec.H, spec.K, getattr(torch, spec.dtype), spec.layout, spec.masked)


def package_folder(spec: PoolSpec, gpu: Gpu) -> Path:
    """Where the package of a spec for a GPU belongs.

    Raises:
        PlanError: no plan is legal.
    """
    planned = plan(Request(spec, Path(), gpu), gpu, (gpu.arch,))
    words: list[Any] = [__version__, gpu.arch, planned.tuned_on]
    for start, choice in planned.rows:
        words += [
            start,
            *(f"{choice.plan(d)} {source_digest(choice.algorithm, spec, choice.plan(d))}" for d in DIRECTIONS),
        ]
    runtime = (importlib.resources.files("invpool") / "runtime.py").read_bytes()
    digest = hashlib.sha256("\n".join(map(str, words)).encode() + runtime).hexdigest()[:16]
    root = default_root() / "packages"
    if not is_writable(root):
        root = private_folder() / "packages"
    return root / digest / spec.slug


def _is_proved(folder: Path) -> bool:
    """Whether a package lies there whole, whose kernels were right when they were proved."""
    proof = read_proof(folder)
    if read_manifest(folder) is None or proof is None:
        return False
    kernels = [proof[where] for where in ("kernels", "emulated") if proof[where] is not None]
    return bool(kernels) and all(one["ok"] for one in kernels)


def _with_kernels(spec: PoolSpec, gpu: Gpu, may_make: bool, cache: KernelCache | None = None) -> PoolOp:
    """The op by kernels; by the closed form, after a warning, where none can be made."""
    command = f"invpool warmup {spec.cli_arguments()}"
    try:
        folder = package_folder(spec, gpu)
        if not _is_proved(folder):
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise MissingKernelError(
                    f"{spec.slug} is used for the first time inside CUDA graph capture, where nothing can be made; "
                    f"call the op once before capturing, or run: {command}"
                )
            if not may_make:
                raise MissingKernelError(
                    f"there is no kernel for {spec.slug}, and {DISABLE_VARIABLE} is set; run: {command}"
                )
            with lock_for(f"package {folder}"):
                if not _is_proved(folder):  # another process may have made it meanwhile
                    log.info("making kernels for %s on %s; this takes some seconds, once", spec.slug, gpu.name)
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    generate(Request(spec, folder, gpu, force=True), cache)
    except (CompilerNotFoundError, PlanError) as error:
        log.warning("%s takes the closed form, which is many times slower: %s (%s)", spec.slug, error, _NO_KERNELS)
        return _closed_form(spec)
    op: PoolOp = import_package(folder).op
    return op
