"""The kernel ABI: which pointers a kernel takes, in which order, and how CUDA spells them.

Every kernel can be launched by a plain ``cuLaunchKernel`` from this list alone, so the shipped op,
PyCUDA and an emulator all launch the same thing:

    forward   x, out, [out_acc], lse, [lse_low | attn], scale, mask, B
    backward  x, out, lse, [lse_low | attn], g, dx, scale, mask, B

All but ``B`` (64-bit) are device pointers. ``lse[B,H]`` is the natural log-sum-exp of each row, of scores that
may lack what the row has in common. ``out_acc[B,H]`` is out before it was rounded, and what backward gets as
``out``: there when x has 16 bits, and for algorithms that keep it always. ``attn[B,H,H]`` is there for algorithms
that keep it, ``lse_low[B,H]`` for those that take weights from lse: what its rounding lost, in base 2. ``scale``
points to one number. ``mask`` is null, or uint8[B,H] with 1 for a variate that takes part. lse, lse_low, out_acc,
attn and scale are of the scalar type: float64 for float64 x, else float32.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)

_C_TYPES: Final = {
    "x": "const Element* __restrict__",
    "out": "Element* __restrict__",
    "out_acc": "Scalar* __restrict__",
    "lse": "Scalar* __restrict__",
    "lse_low": "Scalar* __restrict__",
    "attn": "Scalar* __restrict__",
    "g": "const Element* __restrict__",
    "dx": "Element* __restrict__",
    "scale": "const Scalar* __restrict__",
    "mask": "const unsigned char* __restrict__",
    "B": "long long",
}
# What forward writes, backward only reads.
_READ_BACK: Final = dict.fromkeys(("out", "lse", "lse_low", "attn"), "const Scalar* __restrict__")


def argument_names(direction: Direction, state: tuple[str, ...]) -> tuple[str, ...]:
    """The kernel's arguments in order; ``state`` is what forward leaves for backward beside ``out``."""
    if direction == "forward":
        return ("x", "out", *state, "scale", "mask", "B")
    return ("x", "out", *(name for name in state if name != "out_acc"), "g", "dx", "scale", "mask", "B")


def parameter_list(direction: Direction, state: tuple[str, ...]) -> str:
    """The same arguments as C declares them."""
    types = _C_TYPES if direction == "forward" else _C_TYPES | _READ_BACK
    return ",\n    ".join(f"{types[name]} {name}" for name in argument_names(direction, state))


def written(
    direction: Direction, state: tuple[str, ...], batch: int, H: int, K: int, layout: str
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """What a kernel writes, by argument: its shape, and whether it is of the scalar type rather than of x's."""
    if direction == "backward":
        return {"dx": ((batch, H, K) if layout == "bhk" else (batch, K, H), False)}
    rows = (batch, H)
    return {"out": (rows, False)} | {name: ((*rows, H) if name == "attn" else rows, True) for name in state}
