"""Inputs and plans that the emulator's tests share."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from invpool.abi import DIRECTIONS
from invpool.algorithms import ALGORITHMS, Choice, choose, find_algorithm
from invpool.algorithms.three_pass import ThreePassPlan
from invpool.check import make_inputs, make_odd_items
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec

GPU = KNOWN_GPUS["h200"]


def cut_off(exact: np.ndarray) -> np.ndarray:
    """float64 as float32, rounded towards zero: what a tensor core makes of an exact sum."""
    nearest = exact.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def default_choice(spec: PoolSpec, algorithm: str) -> Choice:
    return choose(spec, GPU, algorithm)


def random_choice(spec: PoolSpec, algorithm: str, seed: int = 0) -> Choice:
    """Two legal plans, the same ones for the same arguments on every day."""
    draw = random.Random(f"{spec.slug} {algorithm} {seed}")
    found = find_algorithm(algorithm)
    return Choice(found, *(draw.choice(found.legal(spec, GPU, direction)) for direction in DIRECTIONS))


def three_pass_family() -> list[str]:
    """The algorithms whose plans have the knobs that some tests name."""
    return sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.plan_type is ThreePassPlan)


def guarded(tensor: Tensor, shift: int = 0) -> Tensor:
    """The same contents between NaN on both sides, ``shift`` elements off a 64-byte boundary."""
    room = 64
    buffer = torch.full((room + shift + tensor.numel() + room,), float("nan")).to(tensor.dtype)
    start = room + shift
    buffer[start : start + tensor.numel()] = tensor.flatten()
    view = buffer[start : start + tensor.numel()].view(tensor.shape)
    assert view.is_contiguous()
    return view


def inputs(spec: PoolSpec, kind: str, items: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, g, mask) of a kind of :func:`invpool.check.make_inputs`, or ``odd``; no mask unless the spec has one."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = make_odd_items(spec, items, "cpu", seed) if kind == "odd" else make_inputs(spec, items, "cpu", seed)[kind]
    g = torch.randn(items, spec.H, generator=generator, dtype=torch.float64).to(x.dtype)
    if not spec.masked:
        return x, g, None
    mask = (torch.rand(items, spec.H, generator=generator) < 0.7).to(torch.uint8)
    mask[0] = 0  # an item of which nothing takes part
    return x, g, mask
