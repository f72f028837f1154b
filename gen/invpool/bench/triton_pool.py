"""A peer written by hand in Triton: online softmax, one-pass backward, no atomics. Imported only where it is timed.

    out[i] = sum_j a[i,j] m[j],  m[j] = mean_k x[j,k]
    G[i,j] = g[i] a[i,j] (m[j] - out[i]) + g[j] a[j,i] (m[i] - out[j])
    dx[i]  = scale sum_j G[i,j] x[j] + (1/K) sum_h g[h] a[h,i]

Scores are symmetric, so a program that owns rows i forms a[j,i] from the same product and the other row's log-sum-exp.
A trajectory longer than STEPS is scored piece by piece; dx is made WIDTH steps at a time, each by a program of its own.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """Rows and columns of a tile of scores, steps scored at once, steps of dx of a program (backward)."""

    rows: int
    columns: int
    steps: int
    width: int
    warps: int
    stages: int


@triton.jit
def load_tile(x, rows, first, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    steps = first + tl.arange(0, WIDTH)
    return tl.load(x + rows[:, None] * K + steps[None, :], (rows[:, None] < H) & (steps[None, :] < K), 0.0)


@triton.jit
def forward_kernel(
    X, OUT, ACC, LSE, scale,
    H: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    x = X + item * H * K
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    pooled = tl.zeros([ROWS], tl.float32)
    if K <= STEPS:
        own = load_tile(x, rows, 0, H, K, STEPS)
    for start in range(0, H, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if K <= STEPS:
            other = load_tile(x, columns, 0, H, K, STEPS)
            mean = tl.sum(other.to(tl.float32), 1)
            scores = tl.dot(own, tl.trans(other), input_precision=PRECISION)
        else:
            mean = tl.zeros([COLUMNS], tl.float32)
            scores = tl.zeros([ROWS, COLUMNS], tl.float32)
            for first in range(0, K, STEPS):
                piece = load_tile(x, rows, first, H, K, STEPS)
                other = load_tile(x, columns, first, H, K, STEPS)
                mean += tl.sum(other.to(tl.float32), 1)
                scores = tl.dot(piece, tl.trans(other), scores, input_precision=PRECISION)
        scores = tl.where(columns[None, :] < H, scores * (scale * LOG2_E), -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        fade = tl.exp2(highest - now)
        total = total * fade + tl.sum(weights, 1)
        pooled = pooled * fade + tl.sum(weights * (mean / K)[None, :], 1)
        highest = now
    out = pooled / total
    tl.store(OUT + item * H + rows, out.to(OUT.dtype.element_ty), rows < H)
    if KEEP:
        tl.store(ACC + item * H + rows, out, rows < H)
    tl.store(LSE + item * H + rows, highest + tl.log2(total), rows < H)


@triton.jit
def backward_kernel(
    X, ACC, LSE, G, DX, scale,
    H: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    x = X + item * H * K
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(2) * WIDTH
    whole: tl.constexpr = K <= STEPS and STEPS == WIDTH
    mine = rows < H
    row_out = tl.load(ACC + item * H + rows, mine, 0.0)
    row_lse = tl.load(LSE + item * H + rows, mine, 0.0)
    row_g = tl.load(G + item * H + rows, mine, 0.0).to(tl.float32)
    if K <= STEPS:
        own = load_tile(x, rows, 0, H, K, STEPS)
        row_mean = tl.sum(own.to(tl.float32), 1) / K
    else:
        row_mean = tl.zeros([ROWS], tl.float32)
        for first in range(0, K, STEPS):
            row_mean += tl.sum(load_tile(x, rows, first, H, K, STEPS).to(tl.float32), 1)
        row_mean = row_mean / K
    dx = tl.zeros([ROWS, WIDTH], tl.float32)
    pulled = tl.zeros([ROWS], tl.float32)
    for start in range(0, H, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < H
        out = tl.load(ACC + item * H + columns, there, 0.0)
        lse = tl.load(LSE + item * H + columns, there, 0.0)
        g = tl.load(G + item * H + columns, there, 0.0).to(tl.float32)
        if K <= STEPS:
            other = load_tile(x, columns, 0, H, K, STEPS)
            mean = tl.sum(other.to(tl.float32), 1)
            scores = tl.dot(own, tl.trans(other), input_precision=PRECISION)
        else:
            mean = tl.zeros([COLUMNS], tl.float32)
            scores = tl.zeros([ROWS, COLUMNS], tl.float32)
            for first in range(0, K, STEPS):
                piece = load_tile(x, rows, first, H, K, STEPS)
                other = load_tile(x, columns, first, H, K, STEPS)
                mean += tl.sum(other.to(tl.float32), 1)
                scores = tl.dot(piece, tl.trans(other), scores, input_precision=PRECISION)
        mean = mean / K
        scores = scores * (scale * LOG2_E)
        down = tl.where(there[None, :], tl.exp2(scores - row_lse[:, None]) * row_g[:, None], 0.0)
        across = tl.where(there[None, :], tl.exp2(scores - lse[None, :]) * g[None, :], 0.0)
        both = down * (mean[None, :] - row_out[:, None]) + across * (row_mean[:, None] - out[None, :])
        pulled += tl.sum(across, 1)
        if whole:  # noqa: SIM108 - decided when it is compiled
            values = other
        else:
            values = load_tile(x, columns, begin, H, K, WIDTH)
        dx = tl.dot(both.to(values.dtype), values, dx, input_precision=PRECISION)
    dx = dx * scale + (pulled / K)[:, None]
    steps = begin + tl.arange(0, WIDTH)
    place = DX + item * H * K + rows[:, None] * K + steps[None, :]
    tl.store(place, dx.to(DX.dtype.element_ty), mine[:, None] & (steps[None, :] < K))


# (rows, columns, warps, stages)
_SHAPES = (
    (16, 16, 1, 2), (16, 16, 2, 3), (16, 32, 1, 2), (32, 32, 2, 2), (32, 32, 4, 2), (32, 64, 4, 3), (64, 32, 4, 2),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 32, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2),
)  # fmt: skip
# Larger accumulators than this spill whatever the rest is.
_MOST_ACCUMULATED = 256 * 8 * 8


def _power_of_two(number: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(number)))


def tiles(H: int, K: int, element_bytes: int, direction: str) -> Iterator[Tile]:
    """The tiles to be tried for a shape: each direction is tuned on its own."""
    whole = _power_of_two(K)
    steps = [whole] if K <= 64 else [32 if K % 32 == 0 else 64, *([whole] if whole <= 128 else [64])]
    widths = [whole] if whole <= 128 else [128, 256, 512, 1024]
    for rows, columns, warps, stages in _SHAPES:
        if rows > _power_of_two(H) or columns > _power_of_two(H):
            continue
        for step in dict.fromkeys(steps):
            if (rows + columns) * step * element_bytes * max(1, stages - 1) > 200 * 1024:
                continue
            if direction == "forward":
                yield Tile(rows, columns, step, 0, warps, stages)
                continue
            for width in widths:
                # Each piece of dx scores everything anew: pieces are worth trying while they are large.
                if width < 2 * K and rows * width <= _MOST_ACCUMULATED and (whole <= 128 or rows * width >= 8192):
                    yield Tile(rows, columns, step, width, warps, stages)


class State(NamedTuple):
    """What forward makes: out, out in float32, and the base-2 logarithm of each row's sum of exponentials."""

    out: Tensor
    acc: Tensor
    lse: Tensor


def _forward_arguments(x: Tensor, state: State, tile: Tile, precision: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    B, H, K = x.shape
    arguments = {
        "X": x, "OUT": state.out, "ACC": state.acc, "LSE": state.lse, "scale": 1 / math.sqrt(K),
        "H": H, "K": K, "KEEP": state.acc is not state.out,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "STEPS": tile.steps, "PRECISION": precision,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return (B, triton.cdiv(H, tile.rows), 1), arguments


def _backward_arguments(
    x: Tensor, state: State, g: Tensor, dx: Tensor, tile: Tile, precision: str
) -> tuple[tuple[int, ...], dict[str, Any]]:
    B, H, K = x.shape
    arguments = {
        "X": x, "ACC": state.acc, "LSE": state.lse, "G": g, "DX": dx, "scale": 1 / math.sqrt(K), "H": H, "K": K,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "STEPS": tile.steps, "WIDTH": tile.width, "PRECISION": precision,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return (B, triton.cdiv(H, tile.rows), triton.cdiv(K, tile.width)), arguments


def empty_state(x: Tensor) -> State:
    """Unwritten results of forward for ``x[B,H,K]``."""
    out = x.new_empty(x.shape[:2])
    acc = out if x.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    return State(out, acc, torch.empty_like(out, dtype=torch.float32))


def forward(x: Tensor, tile: Tile, precision: str) -> State:
    """Launches forward over contiguous ``x[B,H,K]``."""
    state = empty_state(x)
    grid, arguments = _forward_arguments(x, state, tile, precision)
    forward_kernel[grid](**arguments)
    return state


def backward(x: Tensor, state: State, g: Tensor, tile: Tile, precision: str) -> Tensor:
    """Launches backward; returns dx, shaped like x."""
    dx = torch.empty_like(x)
    grid, arguments = _backward_arguments(x, state, g, dx, tile, precision)
    backward_kernel[grid](**arguments)
    return dx


def compile_all(x: Tensor, g: Tensor, direction: str, candidates: list[Tile], precision: str) -> None:
    """Compiles every candidate, several at a time where this Triton can; whatever fails is met again at its launch."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    state = empty_state(x)
    with ThreadPoolExecutor() as workers, mode(workers, ignore_errors=True):
        for tile in candidates:
            if direction == "forward":
                grid, arguments = _forward_arguments(x, state, tile, precision)
                forward_kernel.warmup(grid=grid, **arguments)
            else:
                grid, arguments = _backward_arguments(x, state, g, x, tile, precision)
                backward_kernel.warmup(grid=grid, **arguments)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_tile: Tile, backward_tile: Tile, precision: str) -> Tensor:
        state = forward(x, forward_tile, precision)
        ctx.save_for_backward(x, *state)
        ctx.chosen = backward_tile, precision
        return state.out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        x, *state = ctx.saved_tensors
        return backward(x, State(*state), g.contiguous(), *ctx.chosen), None, None, None


def pool(forward_tile: Tile, backward_tile: Tile, precision: str) -> Callable[[Tensor], Tensor]:
    """The differentiable op with the tiles that won."""
    return lambda x: _Pool.apply(x, forward_tile, backward_tile, precision)
