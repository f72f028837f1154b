"""What a user would pick instead: PyTorch eager, torch.compile, a fused Triton kernel; each in its best form.

Peers take contiguous ``x[B,H,K]`` and are differentiable by autograd. Triton and torch.compile are imported where a
peer is made, so that this file imports anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from invpool.bench.timing import Call, Failure, Stopwatch, Timing
from invpool.spec import PoolSpec

Pool = Callable[[Tensor], Tensor]
Which = Literal["none", "fast", "all"]
WHICHES: Final[tuple[Which, ...]] = get_args(Which)

_COMPILE_MODE: Final = "max-autotune-no-cudagraphs"
_TUNING_ROUNDS: Final = 5


def eager(x: Tensor) -> Tensor:
    """``out[B,H]`` as one writes it down: pooled trajectories ``[B,H,K]``, then their mean."""
    scores = x @ x.mT / math.sqrt(x.shape[-1])
    return (torch.softmax(scores, -1) @ x).mean(-1)


def eager_mean(x: Tensor) -> Tensor:
    """The same with the mean taken first: a matrix-vector product in place of the second product of matrices."""
    scores = x @ x.mT / math.sqrt(x.shape[-1])
    return (torch.softmax(scores, -1) @ x.mean(-1, keepdim=True)).squeeze(-1)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A peer made for one input: the pool, and what making it chose."""

    pool: Pool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to do it without invpool. ``slow_to_make``: it compiles for the better part of a minute."""

    name: str
    make: Callable[[Tensor, Tensor, Stopwatch], Ready]
    slow_to_make: bool = False


def _as_it_is(pool: Pool) -> Callable[[Tensor, Tensor, Stopwatch], Ready]:
    return lambda x, g, stopwatch: Ready(pool)


def _compiled(pool: Pool) -> Callable[[Tensor, Tensor, Stopwatch], Ready]:
    def make(x: Tensor, g: Tensor, stopwatch: Stopwatch) -> Ready:
        return Ready(torch.compile(pool, mode=_COMPILE_MODE, dynamic=False), _COMPILE_MODE)

    return make


def forget_compiled() -> None:
    """To be called between shapes: from the ninth that it meets on, a function would silently run uncompiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def fastest(outcomes: dict[str, Timing | Failure]) -> str:
    """The name of the quickest candidate.

    Raises:
        RuntimeError: all failed; the message is the first one's.
    """
    timed = {name: outcome.median_us for name, outcome in outcomes.items() if isinstance(outcome, Timing)}
    if not timed:
        first = next(iter(outcomes.values()), None)
        raise RuntimeError(f"no tile works: {first.text if isinstance(first, Failure) else 'there is none to try'}")
    return min(timed, key=lambda name: timed[name])


def _triton(precision: str) -> Callable[[Tensor, Tensor, Stopwatch], Ready]:
    def make(x: Tensor, g: Tensor, stopwatch: Stopwatch) -> Ready:
        from invpool.bench import triton_pool

        state: Any = None
        chosen = []
        for direction in ("forward", "backward"):
            tiles = list(triton_pool.tiles(x.shape[1], x.shape[2], x.element_size(), direction))
            triton_pool.compile_all(x, g, direction, tiles, precision)
            calls: dict[str, Call] = {}
            for tile in tiles:
                if direction == "forward":
                    calls[str(tile)] = functools.partial(triton_pool.forward, x, tile, precision)
                else:
                    calls[str(tile)] = functools.partial(triton_pool.backward, x, state, g, tile, precision)
            best = fastest(stopwatch.interleaved(calls, rounds=_TUNING_ROUNDS))
            chosen.append(next(tile for tile in tiles if str(tile) == best))
            if direction == "forward":
                state = triton_pool.forward(x, chosen[0], precision)
        note = " ".join(f"{name}={tuple(tile)}" for name, tile in zip(("forward", "backward"), chosen, strict=True))
        return Ready(triton_pool.pool(chosen[0], chosen[1], precision), note)

    return make


def peers(spec: PoolSpec, which: Which) -> tuple[Peer, ...]:
    """The peers of a spec: ``fast`` leaves out what takes long to make or run and is not the best.

    Raises:
        ValueError: ``which`` is none of none, fast, all.
    """
    if which not in WHICHES:
        raise ValueError(f"peers are {which!r}; legal: {', '.join(WHICHES)}")
    if which == "none":
        return ()
    # The dots of 16-bit tensors know one precision; those of float32 three, of which tf32 is of a class of its own.
    best = ("tf32" if spec.precision == "tf32" else "tf32x3") if spec.dtype == "float32" else "native"
    found = [Peer("eager", _as_it_is(eager)), Peer("eager_mean", _as_it_is(eager_mean))]
    if spec.dtype != "float64":
        found.append(Peer(f"triton_{best}", _triton("tf32" if best == "native" else best)))
    if spec.dtype == "float32" and spec.precision == "exact":
        found += [Peer(f"triton_{name}", _triton(name), slow_to_make=True) for name in ("tf32", "ieee")]
    found.append(Peer("compile", _compiled(eager), slow_to_make=True))
    found.append(Peer("compile_mean", _compiled(eager_mean), slow_to_make=True))
    return tuple(peer for peer in found if which == "all" or not peer.slow_to_make)
