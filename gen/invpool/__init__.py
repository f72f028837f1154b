"""invpool: CUDA kernels for inverted-attention pooling, generated for a fixed H, K, dtype and layout.

    out[h] = sum_j softmax_j(scale <x_h, x_j>) mean_k x[j,k]        x[B,H,K] or x[B,K,H]

``invpool.inverted_attention_pool(x)`` makes its kernels when they are first needed. Ahead of time, ``invpool generate
--H 128 --K 32`` makes a package; ``invpool.load`` opens it, or import it with torch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from invpool._version import __version__
from invpool.gpu import Gpu
from invpool.spec import PoolSpec

if TYPE_CHECKING:
    from invpool.frontdoor import InvertedAttentionPool, inverted_attention_pool, warmup
    from invpool.runtime import GeneratedOp

__all__ = [
    "Gpu",
    "InvertedAttentionPool",
    "PoolSpec",
    "__version__",
    "inverted_attention_pool",
    "load",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """The front door, imported when it is asked for: it brings torch and the generator along."""
    if name in ("InvertedAttentionPool", "inverted_attention_pool", "warmup"):
        from invpool import frontdoor

        return getattr(frontdoor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(path: str | Path) -> GeneratedOp:
    """Opens a generated package: ``op = invpool.load("build/h128_k32_f32_bhk"); out = op(x)``.

    Raises:
        OutputError: the folder holds no generated package.
        LoadError: the package is damaged, or of another schema.
    """
    from invpool.binding import import_package  # torch is slow to import and not needed for planning

    op: GeneratedOp = import_package(Path(path)).op
    return op
