"""The kernel ABI: which pointers a kernel takes, in which order, and how CUDA spells them.

Every kernel can be launched by a plain ``cuLaunchKernel`` from this list alone, so the shipped op,
PyCUDA and an emulator all launch the same thing:

    forward   x, out, [out_acc], lse, [attn], scale, mask, B
    backward  x, out, lse, [attn], g, dx, scale, mask, B

All but ``B`` (64-bit) are device pointers. ``out_acc[B,H]`` is there when x has 16 bits: out before it
was rounded, and what backward gets as ``out``. ``attn[B,H,H]`` is there for algorithms that keep it.
``lse[B,H]`` is the natural log-sum-exp of each row. ``scale`` points to one number. ``mask`` is null, or
uint8[B,H] with 1 for a variate that takes part. lse, out_acc, attn and scale are of the scalar type:
float64 for float64 x, else float32.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from invpool.spec import PoolSpec

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)

_C_TYPES: Final = {
    "x": "const Element* __restrict__",
    "out": "Element* __restrict__",
    "out_acc": "Scalar* __restrict__",
    "lse": "Scalar* __restrict__",
    "attn": "Scalar* __restrict__",
    "g": "const Element* __restrict__",
    "dx": "Element* __restrict__",
    "scale": "const Scalar* __restrict__",
    "mask": "const unsigned char* __restrict__",
    "B": "long long",
}
# What forward writes, backward only reads.
_READ_BACK: Final = dict.fromkeys(("out", "lse", "attn"), "const Scalar* __restrict__")


def state_names(spec: PoolSpec, saves_attention: bool) -> tuple[str, ...]:
    """What forward writes beside ``out`` and backward reads again, in ABI order."""
    return (("out_acc",) if spec.keeps_out_acc else ()) + ("lse",) + (("attn",) if saves_attention else ())


def argument_names(spec: PoolSpec, direction: Direction, saves_attention: bool) -> tuple[str, ...]:
    """The kernel's arguments in order."""
    state = state_names(spec, saves_attention)
    if direction == "forward":
        return ("x", "out", *state, "scale", "mask", "B")
    return ("x", "out", *(name for name in state if name != "out_acc"), "g", "dx", "scale", "mask", "B")


def parameter_list(spec: PoolSpec, direction: Direction, saves_attention: bool) -> str:
    """The same arguments as C declares them."""
    types = _C_TYPES if direction == "forward" else _C_TYPES | _READ_BACK
    return ",\n    ".join(f"{types[name]} {name}" for name in argument_names(spec, direction, saves_attention))
