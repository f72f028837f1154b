"""What a launch did, counted from the code as it ran; the build ``count`` of a kernel gives it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Loads and stores by threads, and the bytes they moved, whether or not a cache would have served them."""

    reads: int
    read_bytes: int
    writes: int
    write_bytes: int


@dataclasses.dataclass(frozen=True)
class ArgumentTraffic(Traffic):
    """Traffic of one argument's memory.

    Attributes:
        bytes_read_at_all, bytes_written_at_all: bytes touched at least once: what must cross DRAM if
            whatever is touched again is still in a cache.
    """

    bytes_read_at_all: int
    bytes_written_at_all: int


@dataclasses.dataclass(frozen=True)
class Operations:
    """Floating-point operations of the kernel's scalar type, after contraction of a*b+c to one ``fma``.

    ``mma`` counts what tensor cores are asked for, once for the whole warp that asks: 2048 FMA each.
    """

    fma: int
    add: int
    multiply: int
    divide: int
    exp: int
    log: int
    extremum: int
    mma: int

    @property
    def fma_class(self) -> int:
        """What :attr:`invpool.cost.Cost.fma` counts: one each for FMA, ADD, MUL."""
        return self.fma + self.add + self.multiply

    @property
    def transcendental(self) -> int:
        """What :attr:`invpool.cost.Cost.mufu` counts."""
        return self.exp + self.log


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts of one launch, over all of its blocks.

    Attributes:
        operations: by threads.
        issued: the same as warps issue them: the most of any lane, for all 32.
        shared: traffic of shared memory, static and dynamic.
        arguments: traffic of each argument, in the kernel's order; zeros where it is not memory.
        shared_wavefronts: passes over the 32 banks, by the rule of :func:`invpool.layout.wavefronts`.
        global_wavefronts: 128-byte lines touched, summed over the warps' instructions.
        barriers: block barriers that blocks went through; not named ones, which are among the launch's points.
    """

    operations: Operations
    issued: Operations
    shared: Traffic
    arguments: tuple[ArgumentTraffic, ...]
    shared_wavefronts: int
    global_wavefronts: int
    barriers: int

    @classmethod
    def from_report(cls, report: dict[str, Any]) -> Counters:
        """Reads what native/counters.cpp writes."""
        return cls(
            Operations(**report["operations"]),
            Operations(**report["issued"]),
            Traffic(**report["shared"]),
            tuple(ArgumentTraffic(**argument) for argument in report["arguments"]),
            report["shared_wavefronts"],
            report["global_wavefronts"],
            report["barriers"],
        )
