"""``one_pass_mma``: scores on tensor cores, each pair of variates once; items that fit shared memory; sm_80 and up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan, min_blocks
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec

_ROW_BLOCKS: Final = (2, 1, 4)
_COLUMNS: Final = (32, 16)
_ITEMS: Final = (4, 2, 1, 8)
_REGISTERS: Final = (255, 168, 128, 96, 80, 64)
_MOST_STRIPS: Final = 16
_STAGE_LANES: Final = 8
# Steps up to which a strip's operand is kept in registers.
_KEPT_STEPS: Final = 32


def padded(count: int, unit: int = 16) -> int:
    return -(-count // unit) * unit


# Measured on an H200 (docs/architecture.md): the share of the tensor cores' rate that mma.sync reaches; and how much of
# their units' work these kernels hide behind the busiest one. A block alone hides none, each more as much again; fewer
# warps than these hide less, and leave each other's latencies open.
_MMA_SHARE: Final = 0.66
_OVERLAP_A_BLOCK: Final = 0.35
_MOST_OVERLAP: Final = 0.7
_ENOUGH_WARPS: Final = 12
_LATENCY_POWER: Final = 0.25


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
        self, algorithm: Algorithm[Any], spec: PoolSpec, plan: Plan, gpu: Gpu, batch: int, exposed: bool
    ) -> Cost:
        """Of a launch over ``batch`` items; ``exposed``: nothing is computed while an item comes in."""
        launch, registers = algorithm.launch(spec, plan), plan.knobs["registers"]
        backward = plan.direction == "backward"
        # The state beside out; backward reads out as it was kept.
        state = 3 * spec.scalar_bytes - (spec.element_bytes if backward else 0)
        resident = max(1, gpu.blocks_per_sm(launch.threads, launch.shared_bytes, registers))
        warps = min(_ENOUGH_WARPS, resident * launch.threads // WARP)
        overlap = min(_MOST_OVERLAP, _OVERLAP_A_BLOCK * (resident - 1)) * warps / _ENOUGH_WARPS
        done = self * (batch * (_ENOUGH_WARPS / warps) ** _LATENCY_POWER)
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
            exposed_bytes=batch * spec.H * spec.K * spec.element_bytes if exposed else 0,
            tasks=launch.tasks(batch),
        )


def staging_work(spec: PoolSpec, parts: int, copied: bool) -> Work:
    """Of an item on its way into planes."""
    elements = spec.H * spec.K
    wavefronts = elements * (2 * spec.element_bytes * copied + 2 * parts) / 128
    return Work(fma=elements * (2 + 2 * parts), issue=elements * (5 + 2 * parts) / WARP, wavefronts=wavefronts)


def staging_lanes(spec: PoolSpec, threads: int, copied: bool) -> int:
    """Lanes that stage a variate (or a pack of them) together: all threads of an item are to have work.

    An item that is read from DRAM, not ``copied`` to shared memory before, wants neighbouring lanes side by side.
    """
    width, along = 16 // spec.element_bytes, spec.K if spec.layout == "bhk" else spec.H
    while along % width:
        width //= 2
    bundles = spec.H if spec.layout == "bhk" else -(-spec.H // width)
    turns = -(-spec.K // width) if spec.layout == "bhk" else spec.K
    lanes, coalesced = 1, spec.layout == "bhk" and not copied
    while lanes < _STAGE_LANES and 2 * lanes <= turns and (coalesced or 2 * lanes * bundles <= threads):
        lanes *= 2
    return lanes


@dataclasses.dataclass(frozen=True)
class MmaPlan(Plan):
    """Knobs of ``one_pass_mma``.

    Attributes:
        row_blocks: blocks of 16 rows that a warp owns; an item has as many warps as that makes.
        columns: columns of a tile of scores.
        items: items of a block, one a warp: for few variates.
        prefetch: whether an item is fetched while the one before it is computed.
        registers: registers a thread may have; fewer let more blocks share an SM.
        most_blocks: blocks of a launch at most, each of which goes from item to item; set for the GPU.
    """

    row_blocks: int = 2
    columns: int = 16
    items: int = 1
    prefetch: bool = True
    registers: int = 128
    most_blocks: int | None = None


class OnePassMma(Algorithm[MmaPlan]):
    name: ClassVar[str] = "one_pass_mma"
    summary: ClassVar[str] = "tensor cores on half of the scores, items whole in shared memory, no scratch in DRAM"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "lse_low"
    always_keeps_out_acc: ClassVar[bool] = True
    oldest_arch: ClassVar[str] = "sm_80"
    plan_type = MmaPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[MmaPlan]:
        columns = _COLUMNS if direction == "forward" else _COLUMNS[1:]
        for knobs in itertools.product(_ROW_BLOCKS, columns, _ITEMS, (True, False), _REGISTERS):
            yield MmaPlan(direction, *knobs)

    def fitted(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> MmaPlan:
        launch = self.launch(spec, plan)
        return dataclasses.replace(
            plan, most_blocks=gpu.wave(launch.threads, launch.shared_bytes, self._registers(spec, plan))
        )

    def reject(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> str | None:
        if spec.dtype == "float64":
            return (
                "tensor cores here multiply fp16 numbers, of which two make a float32; float64 wants another algorithm"
            )
        too_old = self.reject_arch(gpu.arch)
        if too_old:
            return f"{too_old} ({gpu.name})"
        columns = _COLUMNS if plan.direction == "forward" else _COLUMNS[1:]
        for name, legal in (
            ("row_blocks", _ROW_BLOCKS),
            ("columns", columns),
            ("items", _ITEMS),
            ("registers", _REGISTERS),
            ("prefetch", (True, False)),
        ):
            value = plan.knobs[name]
            if value not in legal or isinstance(value, bool) != (name == "prefetch"):
                return f"{name} is {value!r}; legal: {', '.join(map(str, sorted(legal)))}"
        if plan.most_blocks is not None and plan.most_blocks < 1:
            return f"most_blocks is {plan.most_blocks}; it must be at least 1"
        rows = 16 * plan.row_blocks
        if plan.columns > rows:
            return f"a tile of {plan.columns} columns for strips of {rows} rows; lower columns or raise row_blocks"
        if plan.row_blocks > 1 and rows // 2 >= padded(spec.H):
            return f"strips of {rows} rows for {spec.H} variates; lower row_blocks"
        strips = self.strips(spec, plan)
        if strips > _MOST_STRIPS:
            return f"{strips} strips of {rows} rows, one a warp; legal: at most {_MOST_STRIPS}; raise row_blocks"
        if plan.items > 1 and strips > 1:
            return f"items share a block only where a warp holds one; {spec.H} variates take {strips} warps"
        shared = self.launch(spec, plan).shared_bytes
        if shared > gpu.shared_per_block:
            return (
                f"needs {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}; "
                "lower items, set prefetch=False, or take an algorithm that does not hold an item whole"
            )
        needed, threads = self._least_registers(spec, plan), self.launch(spec, plan).threads
        if needed > max(_REGISTERS) or needed * threads > gpu.registers_per_sm:
            return (
                f"needs about {needed} registers for each of {threads} threads; a thread has at most {_REGISTERS[0]}, "
                f"a block {gpu.registers_per_sm}; lower row_blocks, or take an algorithm that goes through K in steps"
            )
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}"
        if plan.registers * threads > gpu.registers_per_sm:
            return f"{plan.registers} registers for {threads} threads; lower registers"
        return None

    @staticmethod
    def strips(spec: PoolSpec, plan: MmaPlan) -> int:
        """Strips of rows, each with a warp."""
        return -(-spec.H // (16 * plan.row_blocks))

    @staticmethod
    def parts(spec: PoolSpec) -> int:
        """fp16 numbers that make up a staged one."""
        return 2 if spec.dtype == "float32" and spec.precision == "exact" else 1

    def layout(self, spec: PoolSpec, plan: MmaPlan) -> SharedLayout:
        """Of one item; a block has ``items`` of them."""
        strips = self.strips(spec, plan)
        rows, steps = strips * 16 * plan.row_blocks, padded(spec.K)
        # In float32 words, as the other regions.
        regions = [("Planes", self.parts(spec) * rows * steps // 2, 0)]
        # Partial sums of columns: of each strip ahead; backward also of the strip's own.
        own = plan.direction == "backward" and plan.row_blocks > 1
        mirrored = max(1, strips // 2 + own)
        if plan.direction == "forward":
            regions += [("Weights", 2 * rows, 0), ("Sums", 2 * rows, 0), ("Partials", 2 * rows * mirrored, 0)]
        else:
            regions += [(name, rows, 0) for name in ("Gain", "Pooled", "Lse", "Low")]
            regions += [("Pulled", rows * mirrored, 0)]
            regions += [("Gathered", rows * self.gathered_stride(spec) if strips > 1 else 0, 0)]
        regions += [("Mean", rows, 0), ("Offset", rows, 0), ("Room", padded(strips, 4), 0), ("Agreed", 4 * strips, 0)]
        if plan.prefetch:
            regions += [("Fetched", -(-spec.H * spec.K * spec.element_bytes // 16) * 4, 0), ("Barrier", 4, 0)]
        return SharedLayout.pack(4, [region for region in regions if region[1]])

    @staticmethod
    def gathered_stride(spec: PoolSpec) -> int:
        """Words between rows of what is gathered for other strips: 8 modulo 32 keeps four rows on different banks."""
        return padded(spec.K, 32) + 8

    def launch(self, spec: PoolSpec, plan: MmaPlan) -> Launch:
        threads = WARP * self.strips(spec, plan) * plan.items
        shared = plan.items * self._item_bytes(spec, plan)
        return Launch(threads, shared, plan.items, 1, plan.most_blocks)

    def _item_bytes(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return padded(self.layout(spec, plan).bytes)

    def _rows_kept(self, spec: PoolSpec) -> bool:
        return padded(spec.K) <= _KEPT_STEPS

    def _least_registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        parts, blocks, steps = self.parts(spec), plan.row_blocks, padded(spec.K)
        operand = parts * blocks * 4 * (steps // 16 if self._rows_kept(spec) else 1)
        scores = blocks * plan.columns // 2
        if plan.direction == "forward":
            return 24 + operand + scores + 8 * blocks
        return 32 + operand + 8 + 10 * blocks + blocks * steps // 2 + steps // 2

    def _registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return plan.registers

    def promises_no_spills(self, spec: PoolSpec, plan: MmaPlan) -> bool:
        return False  # ptxas decides near the cap

    def cost(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over plain items. Bytes are exact, the rest is counted from the machine code of a few plans."""
        strips, parts, steps = self.strips(spec, plan), self.parts(spec), padded(spec.K) // 16
        rows, products = 16 * plan.row_blocks, 2 * parts - 1
        # Scores of a strip with its own columns, and with those of other strips, which both have use for.
        own, other = rows * rows, rows * rows * ((strips - 1) // 2) + (rows * rows // 2 if strips % 2 == 0 else 0)
        work = staging_work(spec, parts, plan.prefetch)
        formed = Work(
            tensor=products * 16 * steps * (own + other) * (1 / _MMA_SHARE),
            issue=(own + other) * products * steps / 256,
            wavefronts=(own + other) / (16 * rows) * parts * steps * 4 * (1 + (0 if self._rows_kept(spec) else plan.row_blocks)),
        )
        if plan.direction == "forward":
            scores = Work(fma=2 * own + 4 * other, mufu=own + other, issue=(3.4 * own + 6.6 * other) / WARP)
            ends = Work(issue=230, wavefronts=60)
        else:
            pulled = 7 + 3 * parts
            scores = Work(
                fma=(pulled + 1) * (own + other),
                mufu=own + other,
                tensor=products * 16 * steps * (own + 2 * other) * (1 / _MMA_SHARE),
                issue=(own * pulled + other * (pulled + 4.5)) / WARP + (own + 2 * other) * products * steps / 256,
                wavefronts=(own + 3 * other) / 256 * parts * steps * 4,
            )
            ends = Work(issue=300 + 1.6 * 8 * steps * plan.row_blocks, wavefronts=160)
        work += (formed + scores + ends) * strips
        return work.cost(self, spec, plan, gpu, batch, exposed=not plan.prefetch)

    def context(self, spec: PoolSpec, plan: MmaPlan) -> Mapping[str, Any]:
        launch = self.launch(spec, plan)
        return {
            "min_blocks": min_blocks(launch.threads, plan.registers),
            "items": plan.items,
            "item_bytes": self._item_bytes(spec, plan),
            "parts": self.parts(spec),
            "row_blocks": plan.row_blocks,
            "columns": plan.columns,
            "strips": self.strips(spec, plan),
            "rows_kept": self._rows_kept(spec),
            "prefetch": plan.prefetch,
            "stage_lanes": staging_lanes(spec, WARP * self.strips(spec, plan), plan.prefetch),
            "gathered_stride": self.gathered_stride(spec),
        }


ALGORITHM: Final = OnePassMma()
