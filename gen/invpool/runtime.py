# SPDX-License-Identifier: Apache-2.0
"""Run time of a generated op: torch and the CUDA driver, nothing else.

This file is copied verbatim into every generated package, so it imports neither the generator nor
anything that the generator needs. It reads ``manifest.json`` beside it, registers two torch operators
under the manifest's hash, and launches the package's kernels on torch's current stream.

Registration follows the one way that gives no silent wrong answer: raw ops made with
``torch.library.Library``, autograd in two module-level ``autograd.Function`` classes outside them, and
``register_autograd`` on the raw ops for those who call them directly.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MANIFEST_SCHEMA: Final = 3
BATCH_INVARIANT_VARIABLE: Final = "INVPOOL_BATCH_INVARIANT"


class LoadError(RuntimeError):
    """A generated package is damaged, too old or new, or has no code for this GPU."""


class MissingKernelError(RuntimeError):
    """A kernel is not loaded and cannot be loaded now; the message says what to run first."""


# ---------------------------------------------------------------- the operation in closed form


def _centred(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x - c, c): softmax is blind to c, the mean of the variates, but float32 scores of 100 +- 0.05 are not.

    An item is centred only where every variate is near c, |x_h - c| < |x_h| / 2: elsewhere, one that is large would
    cost the small ones their digits. No gradient runs through c: whatever it is, it changes nothing. Masked variates
    are zeros by now, and no weight ever meets their x - c.
    """
    fixed = x.detach()
    if mask is None:
        centre = fixed.mean(-2, keepdim=True)
        seen = None
    else:
        seen = mask.to(torch.bool)
        centre = fixed.sum(-2, keepdim=True) / seen.sum(-1).clamp(min=1)[:, None, None].to(x.dtype)
    near = 4 * (fixed - centre).square().sum(-1) < fixed.square().sum(-1)
    if seen is not None:
        near = near | ~seen
    centre = torch.where(near.all(-1)[:, None, None], centre, torch.zeros_like(centre))
    return x - centre, centre


def _without_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with zeros in place of the variates that take no part, so that nothing of them, NaN included, is seen."""
    return x if mask is None else x.masked_fill(~mask.to(torch.bool)[:, :, None], 0.0)


def closed_form_attention(x: Tensor, scale: Tensor | float | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention map and log-sum-exp of variate-major ``x[B,H,K]``, in the dtype of x, differentiable.

    Returns:
        a[B,H,H] and lse[B,H]; for a masked row a is 0 and lse is +inf.
    """
    factor = 1.0 / math.sqrt(x.shape[-1]) if scale is None else scale
    x = _without_masked(x, mask)
    y, centre = _centred(x, mask)
    scores = factor * (x @ y.mT)
    shift = factor * (x @ centre.mT).squeeze(-1)
    if mask is None:
        return torch.softmax(scores, -1), torch.logsumexp(scores, -1) + shift
    takes_part = mask.to(torch.bool)
    # A row that takes no part keeps its scores here, so that softmax is finite, and is set to 0 below.
    scores = scores.masked_fill(~takes_part[:, None, :] & takes_part[:, :, None], -math.inf)
    attention = torch.softmax(scores, -1).masked_fill(~takes_part[:, :, None], 0.0)
    return attention, (torch.logsumexp(scores, -1) + shift).masked_fill(~takes_part, math.inf)


def closed_form_forward(x: Tensor, scale: Tensor | float | None, mask: Tensor | None) -> Tensor:
    """``out[h] = sum_j a[h,j] mean_k x[j,k]`` of variate-major x, in the dtype of x, differentiable."""
    attention, _ = closed_form_attention(x, scale, mask)
    return (attention @ _without_masked(x, mask).mean(-1, keepdim=True)).squeeze(-1)


def closed_form_backward(x: Tensor, g: Tensor, scale: Tensor | float | None, mask: Tensor | None) -> Tensor:
    """``dx`` of variate-major x for upstream g[B,H], in the dtype of x, differentiable in x, g and scale.

    With dS[h,j] = g[h] a[h,j] (m[j] - out[h]):
    dx[i] = scale * sum_j (dS[i,j] + dS[j,i]) x[j] + (1/K) sum_h g[h] a[h,i].
    Rows of dS sum to zero, so the first sum may take y = x - c; the second needs c back, times the column sum.
    """
    factor = 1.0 / math.sqrt(x.shape[-1]) if scale is None else scale
    attention, _ = closed_form_attention(x, scale, mask)
    y, centre = _centred(_without_masked(x, mask), mask)
    if mask is not None:
        g = g.masked_fill(~mask.to(torch.bool), 0.0)
    means = y.mean(-1, keepdim=True)
    pull = g[:, :, None] * attention
    d_scores = pull * (means.mT - attention @ means)
    along = (d_scores + d_scores.mT) @ y + d_scores.sum(-2)[:, :, None] * centre
    return factor * along + pull.sum(-2)[:, :, None] / x.shape[-1]


# ---------------------------------------------------------------- the CUDA driver, by ctypes

_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    """libcuda, with the argument types of the few functions used."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LoadError(f"the CUDA driver cannot be loaded ({error}); install the NVIDIA driver") from error
    handle, integer = ctypes.c_void_p, ctypes.c_uint
    for name, types in {
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
        "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (ctypes.POINTER(handle), ctypes.c_int),
        "cuCtxGetCurrent": (ctypes.POINTER(handle),),
        "cuCtxPushCurrent_v2": (handle,),
        "cuCtxPopCurrent_v2": (ctypes.POINTER(handle),),
        "cuModuleLoadData": (ctypes.POINTER(handle), ctypes.c_char_p),
        "cuModuleGetFunction": (ctypes.POINTER(handle), handle, ctypes.c_char_p),
        "cuFuncSetAttribute": (handle, ctypes.c_int, ctypes.c_int),
        "cuLaunchKernel": (handle, *[integer] * 7, handle, handle, handle),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise LoadError(f"{name} failed: {reason} (CUresult {status})")


@functools.cache
def _primary_context(device: int) -> int:
    """torch's context of a device: retained once, never released, as torch does."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    assert context.value is not None
    return context.value


class _Bound:
    """Makes a device's context current for the calling thread; a fresh thread has none, another GPU's may be there."""

    def __init__(self, device: int) -> None:
        self._context = _primary_context(device)
        self._pushed = False

    def __enter__(self) -> None:
        current = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != self._context:
            _call("cuCtxPushCurrent_v2", self._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One kernel of the manifest: how it is launched, and its code by architecture."""

    entry: str
    arguments: tuple[str, ...]
    threads: int
    shared_bytes: int
    items_per_block: int
    blocks_per_item: int
    most_blocks: int | None  # a persistent kernel: its blocks loop over what is more than that
    images: tuple[tuple[str, str, str], ...]  # (target, file name, sha256)

    def blocks(self, batch: int) -> int:
        tasks = -(-batch // self.items_per_block) * self.blocks_per_item
        return tasks if self.most_blocks is None else min(tasks, self.most_blocks)


def choose_image(targets: Sequence[str], capability: tuple[int, int]) -> str | None:
    """The target to load on a GPU: its own machine code, else older code of its generation, else PTX.

    ``sm_90a`` runs on 9.0 alone; ``sm_86`` also on 8.9; ``compute_75`` on everything from 7.5 on.
    """
    major, minor = capability
    best: tuple[int, int, str] | None = None
    for target in targets:
        kind, _, digits = target.partition("_")
        exact = digits.endswith("a")
        number = int(digits.rstrip("a"))
        there = (number // 10, number % 10)
        if kind == "compute":
            fits, rank = there <= capability, 0
        elif exact:
            fits, rank = there == capability, 2
        else:
            fits, rank = there[0] == major and there[1] <= minor, 1
        if fits and (best is None or (rank, number) > best[:2]):
            best = (rank, number, target)
    return best[2] if best else None


# ---------------------------------------------------------------- one generated package


def _scalar_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class PoolOp(abc.ABC):
    """What every op of one spec does with its arguments. Call it as ``op(x, scale=None, mask=None, lengths=None)``.

    Attributes:
        H, K, dtype, layout, masked: the spec it was made for.
    """

    def __init__(self, H: int, K: int, dtype: torch.dtype, layout: str, masked: bool) -> None:
        self.H, self.K, self.dtype, self.layout, self.masked = H, K, dtype, layout, masked

    @abc.abstractmethod
    def _pool(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
        """out[B,H] of a checked batch."""

    @abc.abstractmethod
    def _how_to_mask(self) -> str:
        """What to type for an op that takes a mask."""

    def _attention(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
        """a[B,H,H] of a checked batch, in the type of the sums."""
        return closed_form_attention(self.closed_form_view(x), scale, mask)[0]

    def closed_form_view(self, x: Tensor) -> Tensor:
        """x as the closed form takes it: variate-major, in the type of the sums."""
        return self.variate_major(x).to(_scalar_dtype(self.dtype))

    # ---- shapes and layouts

    @property
    def shape(self) -> tuple[int, int]:
        """The two axes of x behind the batch."""
        return (self.H, self.K) if self.layout == "bhk" else (self.K, self.H)

    def variate_major(self, x: Tensor) -> Tensor:
        """A view ``[B,H,K]`` of x, whatever the layout; its own inverse."""
        return x if self.layout == "bhk" else x.mT

    def check_input(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Refuses what the op was not made for.

        Raises:
            TypeError: x or mask is no tensor, or of another dtype.
            ValueError: x has another shape or device, or mask does not fit.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x is {type(x).__name__}; expected a torch.Tensor")
        axes = "[B,H,K]" if self.layout == "bhk" else "[B,K,H]"
        if x.ndim != 3 or tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; this op was made for {axes} = (B, {self.shape[0]}, {self.shape[1]}), "
                "any leading axes or none in place of B"
            )
        if x.dtype != self.dtype:
            raise TypeError(f"x is {x.dtype}; this op was made for {self.dtype}")
        if x.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"x is on {x.device}; this op runs on cpu and cuda")
        if mask is None:
            return
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask is {type(mask).__name__}; expected a torch.Tensor")
        if not self.masked:
            raise ValueError(f"this op takes no mask; {self._how_to_mask()}")
        if mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"mask is {mask.dtype}; expected bool or uint8, true where a variate takes part")
        if mask.shape != (x.shape[0], self.H) or mask.device != x.device:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} on {mask.device}; expected ({x.shape[0]}, {self.H}) on {x.device}"
            )

    def scale_tensor(self, x: Tensor, scale: Tensor | float | None) -> Tensor | None:
        """The scale as one number on x's device; None stays None and means 1/sqrt(K).

        Raises:
            ValueError: the scale is not finite, or a tensor of more than one element or another device.
        """
        if scale is None:
            return None
        if isinstance(scale, Tensor):
            if scale.numel() != 1 or scale.device != x.device:
                raise ValueError(
                    f"scale has shape {tuple(scale.shape)} on {scale.device}; expected one number on {x.device}"
                )
            return scale.reshape(()).to(_scalar_dtype(self.dtype))
        if not math.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")
        return torch.full((), scale, dtype=_scalar_dtype(self.dtype), device=x.device)

    def full_mask(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask that the kernels of a masked spec take: all ones where none was given."""
        if not self.masked:
            return None
        if mask is None:
            return torch.ones(x.shape[0], self.H, dtype=torch.uint8, device=x.device)
        return mask.to(torch.uint8)

    # ---- what users call

    def __call__(
        self,
        x: Tensor,
        scale: Tensor | float | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Inverted-attention pooling.

        Args:
            x: ``[...,H,K]`` or ``[...,K,H]`` by the layout, any leading axes or none, of the op's dtype, on cpu or
                cuda, any strides. Under autocast x is cast to the op's dtype, and gradients back.
            scale: what scores are multiplied by: None for 1/sqrt(K), a number, or a tensor of one
                element, which may require a gradient (that backward then forms [B,H,H] in torch).
            mask: ``[...,H]`` bool or uint8, true where a variate takes part; only if the spec is masked.
                A variate that takes no part is seen by none, and its own out and dx are 0.
            lengths: ``[...]`` integers, in place of mask: the first so many variates take part.

        Returns:
            out ``[...,H]``, contiguous, of the op's dtype.

        Raises:
            TypeError, ValueError: see :meth:`check_input`, :meth:`scale_tensor` and :meth:`mask_of_lengths`.
            LoadError: there is no code for this GPU, or the package is damaged.
        """
        batch, leading = self._batched(x, scale, mask, lengths)
        out = self._pool(*batch)
        return out if leading is None else out.reshape(*leading, self.H)

    def attention_map(
        self,
        x: Tensor,
        scale: Tensor | float | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The attention ``a[...,H,H]``, rows summing to one, in float32 (float64 for float64 x).

        From the kernel where the plan keeps it and no gradient is wanted, else in closed form, which
        is differentiable. Takes the same arguments and raises the same errors as the op itself.
        """
        batch, leading = self._batched(x, scale, mask, lengths)
        found = self._attention(*batch)
        return found if leading is None else found.reshape(*leading, self.H, self.H)

    def _batched(
        self, x: Tensor, scale: Tensor | float | None, mask: Tensor | None, lengths: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[int, ...] | None]:
        """x, scale and mask as kernels take them, with one leading axis; and the axes there were instead, if any.

        Raises:
            TypeError, ValueError: see :meth:`__call__`.
        """
        if lengths is not None:
            if mask is not None:
                raise ValueError("give mask or lengths, not both")
            mask = self.mask_of_lengths(x, lengths)
        leading = None
        if isinstance(x, Tensor):
            if x.dtype != self.dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
                x = x.to(self.dtype)
            if x.ndim != 3 and x.ndim >= 2 and tuple(x.shape[-2:]) == self.shape:
                leading = tuple(x.shape[:-2])
                x = x.reshape(-1, *self.shape)
                if isinstance(mask, Tensor):
                    if tuple(mask.shape) != (*leading, self.H):
                        expected = (*leading, self.H)
                        raise ValueError(f"mask has shape {tuple(mask.shape)} on {mask.device}; expected {expected}")
                    mask = mask.reshape(-1, self.H)
        self.check_input(x, mask)
        return (x, self.scale_tensor(x, scale), self.full_mask(x, mask)), leading

    def mask_of_lengths(self, x: Tensor, lengths: Tensor) -> Tensor:
        """``[...,H]`` bool: true for the first ``lengths[...]`` variates of an item.

        Values beyond 0 to H are taken as the nearer of these: to look at them would wait for the GPU.

        Raises:
            TypeError: lengths is no integer tensor.
            ValueError: its shape or device is not that of x's leading axes.
        """
        if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.dtype == torch.bool:
            got = str(lengths.dtype) if isinstance(lengths, Tensor) else type(lengths).__name__
            raise TypeError(f"lengths is {got}; expected a tensor of integers, variates of each item that take part")
        if isinstance(x, Tensor) and (lengths.shape != x.shape[:-2] or lengths.device != x.device):
            raise ValueError(
                f"lengths has shape {tuple(lengths.shape)} on {lengths.device}; "
                f"expected {tuple(x.shape[:-2])} on {x.device}"
            )
        return torch.arange(self.H, device=lengths.device) < lengths[..., None]


# What the closed form may take beside its arguments and results: items are taken in turns.
CLOSED_FORM_BYTES: Final = 256 * 2**20
# Matrices [H,H] that it holds at a time, forward and backward.
_CLOSED_FORM_MATRICES: Final = 6


class ClosedFormOp(PoolOp):
    """The op without kernels: the closed form by torch's own operators, on any device, a few items at a time."""

    def _how_to_mask(self) -> str:
        return "make one with masked=True"

    def _items(self) -> int:
        size = torch.finfo(_scalar_dtype(self.dtype)).bits // 8
        return max(1, CLOSED_FORM_BYTES // (_CLOSED_FORM_MATRICES * size * max(1, self.H) ** 2))

    def _pool(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
        def form(x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
            return closed_form_forward(self.closed_form_view(x), scale, mask).to(self.dtype)

        # Neither torch.compile nor vmap can see how many items there are, or follow a checkpoint.
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if transformed or x.shape[0] <= self._items():
            return form(x, scale, mask)
        xs = x.split(self._items())
        masks = [None] * len(xs) if mask is None else mask.split(self._items())
        # Backward forms each part again rather than keep [B,H,H] of them all.
        parts = zip(xs, masks, strict=True)
        return torch.cat([checkpoint(form, part, scale, takes_part, use_reentrant=False) for part, takes_part in parts])


class GeneratedOp(PoolOp):
    """The op of one generated package.

    Attributes:
        manifest: the parsed manifest.
        namespace: where its raw ops live: ``torch.ops.<namespace>.forward`` and ``.backward``.
        batch_invariant: use one plan for every B, so that ``op(x)[i]`` is bitwise ``op(x[i:i+1])[0]``.
    """

    # A subclass that runs the kernels elsewhere than on CUDA registers raw ops of its own.
    namespace_prefix: ClassVar[str] = "invpool"
    # The types of devices whose tensors the kernels take; all others take the closed form.
    kernel_devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, folder: Path) -> None:
        path = folder / "manifest.json"
        try:
            text = path.read_bytes()
            self.manifest: dict[str, Any] = json.loads(text)
            schema = self.manifest["schema"]
            self._regenerate = str(self.manifest["regenerate"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{path} cannot be read as a manifest ({error!r}); generate the package again") from error
        if schema != MANIFEST_SCHEMA:
            raise LoadError(
                f"{path} has schema {schema}, this runtime reads {MANIFEST_SCHEMA}; regenerate with: {self._regenerate}"
            )
        try:
            spec = self.manifest["spec"]
            dtype: torch.dtype = getattr(torch, spec["dtype"])
            super().__init__(int(spec["H"]), int(spec["K"]), dtype, str(spec["layout"]), bool(spec["masked"]))
            self.state: tuple[str, ...] = tuple(self.manifest["state"])
            self.extra_state = next((name for name in self.state if name not in ("out_acc", "lse")), None)
            self._kernels = [self._read_kernel(entry) for entry in self.manifest["kernels"]]
            self._rows: list[dict[str, int]] = sorted(self.manifest["table"], key=lambda row: int(row["min_batch"]))
            self._starts = [int(row["min_batch"]) for row in self._rows]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LoadError(f"{path} is damaged ({error!r}); regenerate with: {self._regenerate}") from error
        self.namespace = f"{self.namespace_prefix}_{hashlib.sha256(text).hexdigest()[:16]}"
        self._shared = _register(self)
        self.folder = folder

    @staticmethod
    def _read_kernel(entry: dict[str, Any]) -> _Kernel:
        images = tuple((str(i["target"]), str(i["file"]), str(i["sha256"])) for i in entry["images"])
        launch = entry["launch"]
        return _Kernel(
            str(entry["entry"]),
            tuple(entry["arguments"]),
            int(launch["threads"]),
            int(launch["shared_bytes"]),
            int(launch["items_per_block"]),
            int(launch["blocks_per_item"]),
            None if launch["most_blocks"] is None else int(launch["most_blocks"]),
            images,
        )

    @property
    def folder(self) -> Path:
        """Where the package was opened last, by whichever of its copies."""
        return self._shared.folders[0]

    @folder.setter
    def folder(self, folder: Path) -> None:
        self._shared.folders.insert(0, folder.absolute())

    @property
    def batch_invariant(self) -> bool:
        return self._shared.batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, value: bool) -> None:
        self._shared.batch_invariant = value

    # What is registered and loaded belongs to the process: a copied module uses the same op.
    def __copy__(self) -> GeneratedOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GeneratedOp:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return open_package, (str(self.folder),)

    def __repr__(self) -> str:
        return f"GeneratedOp({self.manifest['slug']}, {self.namespace})"

    # ---- what users call

    def _pool(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
        if type(x) is not Tensor:
            self._admit(x)
        if _needs_autograd(x, scale):
            return _Pool.apply(x, scale, mask, self.namespace)[0]  # type: ignore[no-any-return]
        return _raw(self.namespace, "forward")(x, scale, mask)[0]  # type: ignore[no-any-return]

    def _admit(self, x: Tensor) -> None:
        """Tells torch.distributed, once it is there, how the raw ops may be sharded."""
        tensors = sys.modules.get("torch.distributed.tensor")
        if tensors is None or self._shared.sharded or not isinstance(x, tensors.DTensor):
            return
        with self._shared.guard:
            if not self._shared.sharded:
                _define_sharding(self)
                self._shared.sharded = True

    def _attention(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
        """From the kernel where the plan keeps it and no gradient is wanted."""
        if "attn" in self.state and not _needs_autograd(x, scale):
            return _raw(self.namespace, "forward")(x, scale, mask)[1 + self.state.index("attn")]  # type: ignore[no-any-return]
        return super()._attention(x, scale, mask)

    def _how_to_mask(self) -> str:
        return f"make one that does with: {self._regenerate} --masked"

    # ---- loading and launching

    @property
    def row_starts(self) -> tuple[int, ...]:
        """The first batch of each row of the plan table."""
        return tuple(self._starts)

    @contextlib.contextmanager
    def only_row(self, number: int) -> Iterator[None]:
        """Every batch takes the plans of one row meanwhile, in all threads: for those who check or time a package."""
        self._shared.only_row = number
        try:
            yield
        finally:
            self._shared.only_row = None

    def _row(self, batch: int) -> dict[str, int]:
        """The table row for a batch: plans may depend on B; one row serves all when results must not."""
        if self._shared.only_row is not None:
            return self._rows[self._shared.only_row]
        if self.batch_invariant:
            return self._rows[-1]
        return self._rows[max(0, bisect.bisect_right(self._starts, batch) - 1)]

    def _function(self, device: int, index: int) -> int:
        """The loaded function of a kernel on a device; modules belong to a context, so each device has its own."""
        functions = self._shared.functions
        found = functions.get((device, index))
        if found is not None:
            return found
        self._refuse_in_capture()
        with self._shared.guard:
            if (device, index) not in functions:
                functions[device, index] = self._load(device, self._kernels[index])
        return functions[device, index]

    def _load(self, device: int, kernel: _Kernel) -> int:
        files = {target: (name, digest) for target, name, digest in kernel.images}
        capability = torch.cuda.get_device_capability(device)
        target = choose_image(list(files), capability)
        if target is None:
            regenerate = self._regenerate
            # PTX is made for the oldest GPU that the algorithm runs on: where there is some, another one is needed.
            if any(name.startswith("compute_") for name in files):
                regenerate = re.sub(r" --algorithm \S+", "", regenerate)
            raise LoadError(
                f"no code for sm_{capability[0]}{capability[1]} ({torch.cuda.get_device_name(device)}); present: "
                f"{', '.join(files)}; regenerate with: {regenerate} --arch sm_{capability[0]}{capability[1]}"
            )
        name, digest = files[target]
        # Of several copies of the package, some may be gone by now.
        path = next((folder / name for folder in self._shared.folders if (folder / name).exists()), self.folder / name)
        try:
            code = path.read_bytes()
        except OSError as error:
            raise LoadError(f"{path} cannot be read ({error}); regenerate with: {self._regenerate}") from error
        if hashlib.sha256(code).hexdigest() != digest:
            raise LoadError(f"{path} is not what the manifest recorded; regenerate with: {self._regenerate}")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with _Bound(device):
            _call("cuModuleLoadData", ctypes.byref(module), code + b"\0")
            _call("cuModuleGetFunction", ctypes.byref(function), module, kernel.entry.encode())
            if kernel.shared_bytes >= 48 * 1024:
                _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, kernel.shared_bytes)
        assert function.value is not None
        return function.value

    def _launch(self, direction: str, tensors: dict[str, Tensor | None]) -> None:
        """Launches one kernel over the batch of x, its arguments in the manifest's order."""
        x = tensors["x"]
        assert x is not None
        batch = x.shape[0]
        index = self._row(batch)[direction]
        kernel = self._kernels[index]
        arguments = [batch if name == "B" else tensors.get(name) for name in kernel.arguments]
        self._run_kernel(index, kernel.blocks(batch), arguments, x.get_device())

    def _run_kernel(self, index: int, blocks: int, arguments: Sequence[Tensor | int | None], device: int) -> None:
        """Runs one kernel on torch's current stream of a device."""
        kernel = self._kernels[index]
        function = self._function(device, index)
        values = [
            argument if isinstance(argument, int) else 0 if argument is None else argument.data_ptr()
            for argument in arguments
        ]
        # Every argument is 64 bits wide, so one array holds them all.
        packed = (ctypes.c_uint64 * len(values))(*values)
        base = ctypes.addressof(packed)
        pointers = (ctypes.c_void_p * len(values))(*(base + 8 * i for i in range(len(values))))
        stream = torch.cuda.current_stream(device).cuda_stream
        with _Bound(device):
            _call(
                "cuLaunchKernel",
                function,
                blocks,
                1,
                1,
                kernel.threads,
                1,
                1,
                kernel.shared_bytes,
                stream,
                pointers,
                None,
            )

    def default_scale(self, device: torch.device) -> Tensor:
        """1/sqrt(K), kept per device, so that a call moves nothing."""
        scales = self._shared.scales
        if device not in scales:
            self._refuse_in_capture()
            # A copy from the host is done when it returns; a fill would be ordered on this stream alone.
            value = torch.tensor(1.0 / math.sqrt(self.K), dtype=_scalar_dtype(self.dtype))
            scales[device] = value.to(device)
        return scales[device]

    def _refuse_in_capture(self) -> None:
        """Nothing may be made for later calls inside a capture: what is captured has not run, and may never."""
        if torch.cuda.is_current_stream_capturing():
            raise MissingKernelError(
                f"{self.manifest['slug']} is used for the first time inside CUDA graph capture, where nothing can be "
                "loaded; call the op once (forward and backward) before capturing"
            )

    # ---- the raw ops

    def check_raw(self, direction: str, *arguments: Tensor | None) -> None:
        """Refuses what a kernel would read as something else; the raw ops are there for anybody to call.

        Raises:
            TypeError, ValueError: an argument has another dtype, shape or device than the kernels take.
        """
        g, (x, scale, mask, *state) = (None, arguments) if direction == "forward" else (arguments[0], arguments[1:])
        assert x is not None
        self.check_input(x, mask)
        scalar, row = _scalar_dtype(self.dtype), (x.shape[0], self.H)
        if self.masked and (mask is None or mask.dtype != torch.uint8):
            raise TypeError("the raw ops of a masked spec take a uint8 mask; call the op itself, which makes one")
        out_dtype = scalar if "out_acc" in self.state else self.dtype
        expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [("scale", scale, (), scalar)]
        if direction == "backward":
            extra = (*row, self.H) if self.extra_state == "attn" else row
            out, lse, more = state
            expected += [("g", g, row, self.dtype), ("out", out, row, out_dtype), ("lse", lse, row, scalar)]
            if self.extra_state is not None and more is None:
                raise TypeError(f"{self.extra_state} is missing; forward returned it")
            expected.append((self.extra_state or "extra", more, extra, scalar))
        for name, tensor, shape, dtype in expected:
            if tensor is None:
                continue
            if tensor.dtype != dtype:
                raise TypeError(f"{name} is {tensor.dtype}; expected {dtype}")
            if tuple(tensor.shape) != shape or tensor.device != x.device:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; expected {shape} on {x.device}"
                )

    def empty_state(self, x: Tensor) -> list[Tensor]:
        """Unwritten ``out`` and state for x, in the order that forward returns them: dense, whatever x's strides."""
        batch, scalar = x.shape[0], _scalar_dtype(self.dtype)
        shapes: dict[str, tuple[Any, ...]] = {
            "out_acc": (batch, self.H),
            "lse": (batch, self.H),
            "lse_low": (batch, self.H),
            "attn": (batch, self.H, self.H),
        }
        out = x.new_empty((batch, self.H))
        return [out, *(x.new_empty(shapes[name], dtype=scalar) for name in self.state)]

    def cuda_forward(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        results = self.empty_state(x)
        if x.shape[0]:
            x = x.contiguous()
            scale = self.default_scale(x.device) if scale is None else scale
            mask = None if mask is None else mask.contiguous()
            named = dict(zip(("out", *self.state), results, strict=True))
            self._launch("forward", {"x": x, "scale": scale, "mask": mask, **named})
        return tuple(results)

    def backward_state(self, results: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """What backward reads of forward's results: out as precise as it was kept, lse, and what more there is."""
        named = dict(zip(("out", *self.state), results, strict=True))
        return named.get("out_acc", named["out"]), named["lse"], named.get(self.extra_state or "")

    def cuda_backward(
        self,
        g: Tensor,
        x: Tensor,
        scale: Tensor | None,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        extra: Tensor | None,
    ) -> Tensor:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0]:
            tensors: dict[str, Tensor | None] = {"g": g, "x": x, "mask": mask, "out": out, "lse": lse}
            if self.extra_state is not None:
                tensors[self.extra_state] = extra
            dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}
            scale = self.default_scale(x.device) if scale is None else scale
            self._launch("backward", dense | {"scale": scale, "dx": dx})
        return dx

    def cpu_forward(self, x: Tensor, scale: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        results = self.empty_state(x)
        seen = self.closed_form_view(x.contiguous())
        attention, lse = closed_form_attention(seen, scale, mask)
        out = closed_form_forward(seen, scale, mask)
        values = {"out": out, "out_acc": out, "lse": lse, "lse_low": torch.zeros_like(lse), "attn": attention}
        for name, result in zip(("out", *self.state), results, strict=True):
            result.copy_(values[name])
        return tuple(results)

    def cpu_backward(
        self,
        g: Tensor,
        x: Tensor,
        scale: Tensor | None,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        extra: Tensor | None,
    ) -> Tensor:
        seen = self.closed_form_view(x.contiguous())
        dx = closed_form_backward(seen, g.contiguous().to(seen.dtype), scale, mask)
        return self.variate_major(dx).to(self.dtype).contiguous()


# ---------------------------------------------------------------- registration and autograd

_OPS: dict[str, GeneratedOp] = {}
# The raw ops by namespace and direction: torch.compile can follow a dictionary, but not torch.ops by a name in ctx.
_RAW: dict[tuple[str, str], Callable[..., Any]] = {}


def _raw(namespace: str, direction: str) -> Any:
    return _RAW[namespace, direction]


@dataclasses.dataclass
class _Shared:
    """What all copies of one package share in a process: the raw ops are registered once, by manifest hash."""

    batch_invariant: bool
    only_row: int | None = None
    sharded: bool = False  # whether DTensor knows the raw ops
    folders: list[Path] = dataclasses.field(default_factory=list)  # the one opened last comes first
    functions: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    scales: dict[torch.device, Tensor] = dataclasses.field(default_factory=dict)
    guard: threading.Lock = dataclasses.field(default_factory=threading.Lock)


def _registry() -> dict[str, GeneratedOp]:
    """The op opened last of each namespace, for the whole process: every package has a runtime module of its own."""
    module = sys.modules.setdefault("_invpool_registry", ModuleType("_invpool_registry"))
    return module.__dict__.setdefault("ops", {})  # type: ignore[no-any-return]


def _register(op: GeneratedOp) -> _Shared:
    """Registers the op's raw forward and backward once a process, however often its package is imported."""
    earlier = _registry().get(op.namespace)
    _OPS[op.namespace] = _registry()[op.namespace] = op
    if earlier is None:
        _define(op)
    for direction in ("forward", "backward"):
        _RAW[op.namespace, direction] = getattr(getattr(torch.ops, op.namespace), direction).default
    if earlier is not None:
        return earlier._shared
    return _Shared(batch_invariant=os.environ.get(BATCH_INVARIANT_VARIABLE, "0") not in ("", "0"))


def _define(op: GeneratedOp) -> None:
    """Defines the two raw ops, their kernels, shapes and gradients."""
    library = torch.library.Library(op.namespace, "DEF")
    tensors = ", ".join(["Tensor"] * (1 + len(op.state)))
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"forward(Tensor x, Tensor? scale, Tensor? mask) -> ({tensors})", tags=tags)
    library.define(
        "backward(Tensor g, Tensor x, Tensor? scale, Tensor? mask, Tensor out, Tensor lse, Tensor? extra) -> Tensor",
        tags=tags,
    )

    def implement(direction: str, device: str) -> None:
        def run(x_or_g: Tensor, *rest: Tensor | None) -> Any:
            current = _registry()[op.namespace]
            current.check_raw(direction, x_or_g, *rest)
            return getattr(current, f"{device.lower()}_{direction}")(x_or_g, *rest)

        library.impl(direction, run, device)

    for direction in ("forward", "backward"):
        for device in ("CPU", "CUDA"):
            implement(direction, device)

    def fake_forward(x: Tensor, scale: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(op.empty_state(x))

    def fake_backward(g: Tensor, x: Tensor, *_: Tensor | None) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    torch.library.register_fake(f"{op.namespace}::forward", fake_forward, lib=library)
    torch.library.register_fake(f"{op.namespace}::backward", fake_backward, lib=library)

    # The raw ops are differentiable too, for those who call them directly: through the same two Functions.
    def setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Pool.setup_context(ctx, (*inputs, op.namespace), output)

    def forward_gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _Pool.backward(ctx, *gradients)[:3]

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, scale, mask, *state = inputs
        _PoolBackward.setup_context(ctx, (g, x, scale, mask, op.namespace, *state), output)

    def backward_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (*_PoolBackward.backward(ctx, gradient)[:4], None, None, None)

    torch.library.register_autograd(
        f"{op.namespace}::forward", forward_gradient, setup_context=setup_forward, lib=library
    )
    torch.library.register_autograd(
        f"{op.namespace}::backward", backward_gradient, setup_context=setup_backward, lib=library
    )
    # A Library unregisters its ops when it is collected; the ops are there for the life of the process.
    _LIBRARIES.append(library)


_LIBRARIES: Final[list[torch.library.Library]] = []


def _define_sharding(op: GeneratedOp) -> None:
    """Lets DTensor run the raw ops where they are: items may be spread over devices, or every device has all.

    Whatever else x is sharded by, DTensor gathers first.
    """
    from torch.distributed.tensor import Placement, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def placed(tensors: Sequence[Tensor | None], by: Placement) -> list[Placement | None]:
        return [None if tensor is None else by for tensor in tensors]

    def forward(x: Any, scale: Any, mask: Any) -> Any:
        return [
            ([by] * (1 + len(op.state)), [by, *placed([scale], Replicate()), *placed([mask], by)])
            for by in (Shard(0), Replicate())
        ]

    def backward(g: Any, x: Any, scale: Any, mask: Any, out: Any, lse: Any, extra: Any) -> Any:
        return [
            ([by], [by, by, *placed([scale], Replicate()), *placed([mask, out, lse, extra], by)])
            for by in (Shard(0), Replicate())
        ]

    register_sharding(_raw(op.namespace, "forward"))(forward)
    register_sharding(_raw(op.namespace, "backward"))(backward)


def _needs_autograd(x: Tensor, scale: Tensor | None) -> bool:
    """Whether a call must go through autograd: the raw op alone would be wrong under jvp, vmap and grad.

    With ClosedFormOp the one place that uses private torch names; a test covers each of the three reasons.
    """
    if torch.compiler.is_compiling():
        return True
    wanted = x.requires_grad or (scale is not None and scale.requires_grad)
    return (
        (torch.is_grad_enabled() and wanted)
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


class _Pool(torch.autograd.Function):
    """Forward with its gradient: (x, scale, mask, namespace) -> (out, *state)."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, mask: Tensor | None, namespace: str) -> tuple[Tensor, ...]:
        return _raw(namespace, "forward")(x, scale, mask)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, scale, mask, namespace = inputs
        ctx.namespace = namespace
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else every backward would fill zeros of the state's size, attn's too
        ctx.save_for_backward(x, scale, mask, *_OPS[namespace].backward_state(output))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        x, scale, mask, out, lse, extra = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        dx = _PoolBackward.apply(g, x, scale, mask, ctx.namespace, out, lse, extra)
        d_scale = None
        if scale is not None and ctx.needs_input_grad[1]:
            # dscale = sum dS * S / scale, through the composite: the closed formula from dx cancels.
            seen = _OPS[ctx.namespace].closed_form_view(x)
            pull = torch.func.vjp(lambda factor: closed_form_forward(seen, factor, mask), scale)[1]
            (d_scale,) = pull(g.to(seen.dtype))
        return dx, d_scale, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, scale: Tensor | None, mask: Tensor | None, namespace: str
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tensors, dims = (x, scale, mask), in_dims[:3]
        if in_dims[1] is None:
            x_flat, mask_flat = _flatten(x, in_dims[0], info.batch_size), _flatten(mask, in_dims[2], info.batch_size)
            flat = _Pool.apply(x_flat, scale, mask_flat, namespace)
            results = tuple(part.unflatten(0, (info.batch_size, -1)) for part in flat)
        else:
            # One scale a sample: the kernel takes one a launch.
            samples = [
                _Pool.apply(*(_sample(tensor, dim, i) for tensor, dim in zip(tensors, dims, strict=True)), namespace)
                for i in range(info.batch_size)
            ]
            results = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return results, (0,) * len(results)


class _PoolBackward(torch.autograd.Function):
    """The gradient with its own gradient: (g, x, scale, mask, namespace, out, lse, extra) -> dx.

    No ``*args``: torch.compile counts the parameters of ``forward`` to tell whether it takes a ctx.
    """

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        scale: Tensor | None,
        mask: Tensor | None,
        namespace: str,
        out: Tensor,
        lse: Tensor,
        extra: Tensor | None,
    ) -> Tensor:
        return _raw(namespace, "backward")(g, x, scale, mask, out, lse, extra)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, scale, mask, namespace = inputs[:5]
        ctx.namespace = namespace
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, scale, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if gradients[0] is None:
            return (None,) * 8
        # out and the state are functions of x: differentiating dx(g, x, scale) covers their share.
        g, x, scale, mask = ctx.saved_tensors
        namespace = ctx.namespace

        def gradient(g: Tensor, x: Tensor, *scale: Tensor) -> Tensor:
            seen = _OPS[namespace].closed_form_view(x)
            dx = closed_form_backward(seen, g.to(seen.dtype), scale[0] if scale else None, mask)
            return _OPS[namespace].variate_major(dx).to(x.dtype)

        primals = (g, x) if scale is None else (g, x, scale)
        pull = torch.func.vjp(gradient, *primals)[1]
        d_g, d_x, *d_scale = pull(gradients[0])
        return d_g, d_x, d_scale[0] if d_scale else None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        g: Tensor,
        x: Tensor,
        scale: Tensor | None,
        mask: Tensor | None,
        namespace: str,
        out: Tensor,
        lse: Tensor,
        extra: Tensor | None,
    ) -> tuple[Tensor, int]:
        tensors, dims = (g, x, mask, out, lse, extra), (*in_dims[:2], in_dims[3], *in_dims[5:])
        if in_dims[2] is None:
            flat = [_flatten(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, dims, strict=True)]
            dx = _PoolBackward.apply(*flat[:2], scale, flat[2], namespace, *flat[3:])
            return dx.unflatten(0, (info.batch_size, -1)), 0
        # One scale a sample: the kernel takes one a launch.
        samples = []
        for i in range(info.batch_size):
            one = [_sample(tensor, dim, i) for tensor, dim in zip(tensors, dims, strict=True)]
            samples.append(_PoolBackward.apply(*one[:2], _sample(scale, in_dims[2], i), one[2], namespace, *one[3:]))
        return torch.stack(samples), 0


def _sample(tensor: Tensor | None, dim: int | None, index: int) -> Tensor | None:
    """Sample ``index`` of a batched tensor; the tensor itself where it is not batched."""
    return tensor if tensor is None or dim is None else tensor.select(dim, index)


def _flatten(tensor: Tensor | None, dim: int | None, samples: int) -> Tensor | None:
    """Folds the axis that vmap added into the batch axis: items are independent of each other."""
    if tensor is None:
        return None
    stacked = tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked.flatten(0, 1)


# ---------------------------------------------------------------- the module


class InvertedAttentionPoolBase(nn.Module):
    """Pools over variates with a generated op; the package's ``InvertedAttentionPool`` fills in which.

    Args:
        scale: None for 1/sqrt(K), or a finite number.
        learn_scale: makes the scale a parameter, starting from ``scale``.
    """

    op: GeneratedOp

    def __init__(self, scale: float | None = None, learn_scale: bool = False) -> None:
        super().__init__()
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")
        start = 1.0 / math.sqrt(self.op.K) if scale is None else scale
        self._given = scale
        self.scale = nn.Parameter(torch.tensor(start, dtype=_scalar_dtype(self.op.dtype))) if learn_scale else None

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """See :meth:`GeneratedOp.__call__`."""
        return self.op(x, self._given if self.scale is None else self.scale, mask, lengths)

    def extra_repr(self) -> str:
        learned = (
            ", learned scale" if self.scale is not None else "" if self._given is None else f", scale={self._given}"
        )
        return f"{self.op.manifest['slug']}{learned}"


def open_package(folder: str | Path) -> GeneratedOp:
    """Opens the generated package in ``folder``.

    Raises:
        LoadError: there is no readable manifest of this schema.
    """
    return GeneratedOp(Path(folder))
