"""The problem: what a kernel computes, and on what kind of tensor."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final, Literal, get_args

Layout = Literal["bhk", "bkh"]
Precision = Literal["exact", "tf32"]
DType = Literal["float32", "float16", "bfloat16", "float64"]

LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
DTYPES: Final[tuple[str, ...]] = get_args(DType)

_SHORT: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_ALIASES: Final = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "double": "float64",
    **{short: name for name, short in _SHORT.items()},
}
# Offsets within one item, H*K into x and H*H into a pair of variates, are 32-bit in every kernel.
_ITEM_LIMIT: Final = 2**31


def canonical_dtype(dtype: object) -> DType:
    """Returns the full name of ``dtype``: a name, a short name (``f32``) or a torch dtype.

    Raises:
        TypeError: the dtype is none of float32, float16, bfloat16, float64.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise TypeError(f"dtype is {dtype!r}; legal: {', '.join(DTYPES)}")
    return name  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Inverted-attention pooling of ``x[B,H,K]`` (layout ``bhk``) or ``x[B,K,H]`` (``bkh``); any B.

    Attributes:
        H: number of variates, the axis that attends to itself.
        K: steps of one trajectory, the axis that scores sum over.
        dtype: element type of x, out, g and dx.
        layout: order of the axes of x.
        precision: accuracy class of float32: ``exact`` (norm error like float32 eager) or ``tf32``
            (at most 1e-3). The other dtypes know ``exact`` only.
        masked: whether a mask[B,H] says which variates take part.

    Raises:
        ValueError: a value out of range; the message says what is legal.
        TypeError: H or K is not an integer, or the dtype is unknown.
    """

    H: int
    K: int
    dtype: DType = "float32"
    layout: Layout = "bhk"
    precision: Precision = "exact"
    masked: bool = False

    def __post_init__(self) -> None:
        for name, meaning in (("H", "variates"), ("K", "steps")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it must be an integer number of {meaning}")
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; legal: {', '.join(LAYOUTS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; legal: {', '.join(PRECISIONS)}")
        if self.precision != "exact" and self.dtype != "float32":
            raise ValueError(f"precision {self.precision!r} is for float32 only; {self.dtype} takes 'exact'")
        if self.H * self.K >= _ITEM_LIMIT or self.H * self.H >= _ITEM_LIMIT:
            raise ValueError(
                f"H={self.H}, K={self.K}: an item must hold fewer than 2**31 elements and pairs of variates "
                f"(H*K={self.H * self.K}, H*H={self.H * self.H}); offsets within an item are 32-bit"
            )

    @property
    def slug(self) -> str:
        """``h128_k32_f32_bhk[_tf32][_mask]``: names the output folder, valid as a Python identifier."""
        parts = [f"h{self.H}", f"k{self.K}", _SHORT[self.dtype], self.layout]
        if self.precision != "exact":
            parts.append(self.precision)
        if self.masked:
            parts.append("mask")
        return "_".join(parts)

    @classmethod
    def from_slug(cls, slug: str) -> PoolSpec:
        """The inverse of :attr:`slug`.

        Raises:
            ValueError: the text is not a slug.
        """
        match = re.fullmatch(r"h(\d+)_k(\d+)_([a-z]+\d+)_([a-z]+)(_tf32)?(_mask)?", slug)
        if not match or match[3] not in _SHORT.values():
            raise ValueError(f"{slug!r} is no slug; one looks like h128_k32_f32_bhk[_tf32][_mask]")
        precision = "tf32" if match[5] else "exact"
        return cls(int(match[1]), int(match[2]), match[3], match[4], precision, bool(match[6]))  # type: ignore[arg-type]

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def scalar(self) -> Literal["float32", "float64"]:
        """The type every sum is formed in, and of lse, scale and the attention map."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def scalar_bytes(self) -> int:
        return _BYTES[self.scalar]

    @property
    def keeps_out_acc(self) -> bool:
        """Whether forward also keeps ``out`` unrounded, in float32, for backward (16-bit x)."""
        return self.element_bytes == 2

    def least_bytes(self, direction: str, batch: int) -> int:
        """The DRAM bytes that no kernel can avoid: x, out forward; x, out, g, dx backward."""
        item = self.H * self.K + self.H
        return batch * item * self.element_bytes * (1 if direction == "forward" else 2)

    def cli_arguments(self) -> str:
        """The options of ``invpool generate`` that ask for this spec."""
        words = [f"--H {self.H} --K {self.K}"]
        for field in dataclasses.fields(self)[2:]:
            value: Any = getattr(self, field.name)
            if value != field.default:
                words.append("--masked" if field.name == "masked" else f"--{field.name} {value}")
        return " ".join(words)
