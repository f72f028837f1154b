"""What the algorithms on tensor cores share: how an item is staged, and what work is.

An item is staged as fp16 numbers, one or two for each of its own (templates/include/planes.cuh, whole_item.cuh).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from invpool.algorithms.base import Algorithm, Plan
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.spec import PoolSpec

# Lanes that stage a variate together, at most: sums over the steps are formed in eight classes. From DRAM, so many read
# whole sectors, and more would meet on the same banks when they write.
STAGE_LANES: Final = 8
_LANES_OF_DRAM: Final = 4


def padded(count: int, unit: int = 16) -> int:
    """``count`` rounded up to whole units."""
    return -(-count // unit) * unit


def parts_of(spec: PoolSpec) -> int:
    """fp16 numbers that make up a staged one."""
    return 2 if spec.dtype == "float32" and spec.precision == "exact" else 1


# Eight running sums make a mean: of more steps their rounding errors are above 3e-7 of out.
_MOST_STEPS: Final = 1024


def reject_spec(algorithm: Algorithm[Any], spec: PoolSpec, gpu: Gpu) -> str | None:
    """Why no plan of an algorithm on tensor cores can serve a spec on a GPU."""
    if spec.dtype == "float64":
        return "tensor cores here multiply fp16 numbers, of which two make a float32; float64 wants another algorithm"
    if spec.K > _MOST_STEPS:
        return f"K is {spec.K}; means of more than {_MOST_STEPS} steps want another algorithm, one_pass or three_pass"
    wrong_arch = algorithm.reject_arch(gpu.arch)
    return f"{wrong_arch} ({gpu.name})" if wrong_arch else None


# Measured on an H200 (docs/architecture.md): the share of the tensor cores' rate that mma.sync reaches; and how much of
# their units' work one, two, or three and more items of an SM hide behind the busiest one. Fewer warps than these leave
# each other's latencies open.
MMA_SHARE: Final = 0.66
_OVERLAP: Final = {"forward": (0.35, 0.6, 0.7), "backward": (0.2, 0.35, 0.7)}
_ENOUGH_WARPS: Final = 8
_MOST_WARPS: Final = 16
_LATENCY_POWER: Final = 0.25
# An item that is read with nothing else to do comes from L2, which asked DRAM for it an item before.
_EXPOSURE: Final = 0.75


@dataclasses.dataclass(frozen=True)
class Work:
    """What one item costs: scalar and tensor operations, warp instructions, passes of shared memory."""

    fma: float = 0
    mufu: float = 0
    tensor: float = 0
    issue: float = 0
    wavefronts: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    def __mul__(self, count: float) -> Work:
        return Work(*(getattr(self, f.name) * count for f in dataclasses.fields(self)))

    def cost(
        self,
        algorithm: Algorithm[Any],
        spec: PoolSpec,
        plan: Plan,
        gpu: Gpu,
        batch: int,
        exposed: bool,
        slower: float = 1.0,
    ) -> Cost:
        """Of a launch over ``batch`` items.

        Args:
            exposed: nothing is computed while an item comes in.
            slower: how much longer the units take than the counts say, for what is not counted.
        """
        launch, registers = algorithm.launch(spec, plan), plan.knobs["registers"]
        backward = plan.direction == "backward"
        # The state beside out; backward reads out as it was kept.
        state = 3 * spec.scalar_bytes - (spec.element_bytes if backward else 0)
        resident = max(1, gpu.blocks_per_sm(launch.threads, launch.shared_bytes, registers))
        warps = min(_MOST_WARPS, resident * launch.threads // WARP)
        overlap = _OVERLAP[plan.direction][min(resident * launch.items_per_block, 3) - 1]
        done = self * batch
        return Cost(
            fma=round(done.fma),
            fp64=False,
            mufu=round(done.mufu),
            dram_bytes=spec.least_bytes(plan.direction, batch) + batch * spec.H * (state + spec.masked),
            scratch_bytes=0,
            shared_wavefronts=round(done.wavefronts),
            global_wavefronts=0,
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=launch.blocks(batch),
            registers=registers,
            tensor=round(done.tensor),
            issue=round(done.issue),
            overlap=overlap,
            slower=slower * (_ENOUGH_WARPS / warps) ** _LATENCY_POWER,
            exposed_bytes=round(_EXPOSURE * batch * spec.H * spec.K * spec.element_bytes) if exposed else 0,
            tasks=launch.tasks(batch),
        )


def staging_work(spec: PoolSpec, parts: int, copied: bool) -> Work:
    """Of an item on its way into planes."""
    elements = spec.H * spec.K
    wavefronts = elements * (2 * spec.element_bytes * copied + 2 * parts) / 128
    return Work(fma=elements * (2 + 2 * parts), issue=elements * (5 + 2 * parts) / WARP, wavefronts=wavefronts)


def staging_width(spec: PoolSpec) -> int:
    """Elements that staging reads at once."""
    width, along = 16 // spec.element_bytes, spec.K if spec.layout == "bhk" else spec.H
    while along % width:
        width //= 2
    return width


def staging_lanes(spec: PoolSpec, threads: int, copied: bool) -> int:
    """Lanes that stage a variate (or a pack of them) together: all threads of an item are to have work.

    An item that is read from DRAM, not ``copied`` to shared memory before, wants neighbouring lanes side by side.
    """
    width = staging_width(spec)
    bundles = spec.H if spec.layout == "bhk" else -(-spec.H // width)
    turns = -(-spec.K // width) if spec.layout == "bhk" else spec.K
    lanes, coalesced = 1, spec.layout == "bhk" and not copied
    most = _LANES_OF_DRAM if coalesced else STAGE_LANES
    while lanes < most and 2 * lanes <= turns and (coalesced or 2 * lanes * bundles <= threads):
        lanes *= 2
    return lanes
