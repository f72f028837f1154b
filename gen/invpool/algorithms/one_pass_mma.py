"""``one_pass_mma``: scores on tensor cores, each pair of variates once; items that fit shared memory; sm_80 and up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan, min_blocks
from invpool.algorithms.tensor_cores import (
    MMA_SHARE,
    Work,
    padded,
    parts_of,
    reject_spec,
    staging_lanes,
    staging_work,
)
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec

_ROW_BLOCKS: Final = (2, 1, 4)
_COLUMNS: Final = (32, 16)
_ITEMS: Final = (4, 2, 1, 8)
_REGISTERS: Final = (255, 168, 128, 96, 80, 64)
_MOST_STRIPS: Final = 16
# Steps up to which a strip's operand is kept in registers.
_KEPT_STEPS: Final = 32
# What registers that are moved to and fro cost, by their share: measured on an H200.
_SPILL: Final = 2.4


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
        for knobs in itertools.product(_ROW_BLOCKS, self._columns(direction), _ITEMS, (True, False), _REGISTERS):
            yield MmaPlan(direction, *knobs)

    @staticmethod
    def _columns(direction: Direction) -> tuple[int, ...]:
        return _COLUMNS if direction == "forward" else _COLUMNS[1:]

    def fitted(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> MmaPlan:
        launch = self.launch(spec, plan)
        return dataclasses.replace(plan, most_blocks=gpu.wave(launch.threads, launch.shared_bytes, plan.registers))

    def reject(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> str | None:
        obstacle = reject_spec(self, spec, gpu)
        if obstacle:
            return obstacle
        for name, legal in (
            ("row_blocks", _ROW_BLOCKS),
            ("columns", self._columns(plan.direction)),
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

    def layout(self, spec: PoolSpec, plan: MmaPlan) -> SharedLayout:
        """Of one item; a block has ``items`` of them."""
        strips = self.strips(spec, plan)
        rows, steps = strips * 16 * plan.row_blocks, padded(spec.K)
        # In float32 words, as the other regions.
        regions = [("Planes", parts_of(spec) * rows * steps // 2, 0)]
        # Partial sums of columns: of each strip ahead; backward also of the strip's own.
        own = plan.direction == "backward" and plan.row_blocks > 1
        mirrored = max(1, strips // 2 + own)
        if plan.direction == "forward":
            regions += [("Weights", 2 * rows, 0), ("Sums", 2 * rows, 0), ("Partials", 2 * rows * mirrored, 0)]
        else:
            regions += [(name, rows, 0) for name in ("Gain", "Pooled", "Lse", "Low")]
            regions += [("Pulled", rows * mirrored, 0)]
            regions += [("Gathered", rows * self.gathered_stride(spec) if strips > 1 else 0, 0)]
        regions += [(name, rows, 0) for name in ("Mean", "Offset", "Units")]
        regions += [("Room", padded(strips, 4), 0), ("Agreed", 4 * strips, 0)]
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
        return padded(spec.K) <= _KEPT_STEPS and not self._few(spec)

    @staticmethod
    def _own_operand(spec: PoolSpec, plan: MmaPlan) -> bool:
        """Whether a strip's rows serve as its columns (templates/include/own_scores.cuh)."""
        steps = padded(spec.K) // 16
        return steps <= 8 and plan.row_blocks * steps <= 12

    @staticmethod
    def _few(spec: PoolSpec) -> bool:
        """Whether both parts of an item's variates fit one operand (templates/include/own_scores.cuh)."""
        return spec.H <= 8 and parts_of(spec) == 2

    def _least_registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        parts, blocks, steps = parts_of(spec), plan.row_blocks, padded(spec.K)
        operand = parts * blocks * 4 * (steps // 16 if self._rows_kept(spec) else 1)
        if plan.direction == "forward":
            return 24 + operand + blocks * plan.columns // 2 + 8 * blocks
        return 40 + operand + 10 * blocks + blocks * steps // 2 + steps // 2

    def _wanted_registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        """Registers of a thread below which ptxas was seen to move them to and fro."""
        least, blocks = self._least_registers(spec, plan), plan.row_blocks
        if plan.direction == "forward":
            return least + 8 * blocks
        return least + 5 * (parts_of(spec) + 2) // 2 * blocks - 16

    def promises_no_spills(self, spec: PoolSpec, plan: MmaPlan) -> bool:
        return False  # ptxas decides near the cap

    def cost(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over plain items: bytes exact, the rest counted from the machine code of a few plans."""
        strips, parts, steps = self.strips(spec, plan), parts_of(spec), padded(spec.K) // 16
        rows, products = 16 * plan.row_blocks, 2 * parts - 1
        few, own_operand = self._few(spec), self._own_operand(spec, plan)
        # Scores of a strip with its own columns, and with those of other strips, which both have use for.
        own = rows * (padded(spec.H, 8) if strips == 1 and own_operand else rows)
        other = rows * rows * ((strips - 1) // 2) + (rows * rows // 2 if strips % 2 == 0 else 0)
        if plan.direction == "backward":
            # Within a strip, too, each pair of blocks is formed once.
            own, other = 16 * rows, other + rows * (rows - 16) // 2
        loads = 1 if self._rows_kept(spec) else 1 + plan.row_blocks
        block = parts * steps * 4  # passes that read 16 variates as an operand
        read_own = plan.row_blocks * block if own_operand else own / (16 * rows) * block * loads
        multiplied = products * (own + other)
        if few:
            # One product of two parts of eight rows makes all three.
            own, other, multiplied, read_own = 64, 0, 128, steps * 4
        work = staging_work(spec, parts, plan.prefetch)
        formed = Work(
            tensor=multiplied * 16 * steps / MMA_SHARE,
            issue=multiplied * steps / 100,
            wavefronts=read_own + other / (16 * rows) * block * loads,
        )
        if plan.direction == "forward":
            scores = Work(fma=2 * own + 4 * other, mufu=own + other, issue=(4.2 * own + 8 * other) / WARP)
            ends = Work(issue=500, wavefronts=60)
        else:
            pulled = 8 + 3 * parts
            gathered = max(own, 256) + 2 * other  # by blocks of 16 x 16
            scores = Work(
                fma=(pulled + 1) * (own + other),
                mufu=own + other,
                tensor=products * 16 * steps * gathered / MMA_SHARE,
                issue=(own * pulled + other * (pulled + 4.5)) / WARP + gathered * products * steps / 90,
                wavefronts=(own + 3 * other) / 256 * parts * steps * 4,
            )
            ends = Work(issue=350 + 75 * steps + 13 * steps * plan.row_blocks, wavefronts=160)
        work += (formed + scores + ends) * strips
        spilled = max(0, self._wanted_registers(spec, plan) - plan.registers) / plan.registers
        return work.cost(self, spec, plan, gpu, batch, exposed=not plan.prefetch, slower=1 + _SPILL * spilled)

    def context(self, spec: PoolSpec, plan: MmaPlan) -> Mapping[str, Any]:
        launch = self.launch(spec, plan)
        return {
            "min_blocks": min_blocks(launch.threads, plan.registers),
            "items": plan.items,
            "item_bytes": self._item_bytes(spec, plan),
            "parts": parts_of(spec),
            "row_blocks": plan.row_blocks,
            "columns": plan.columns,
            "strips": self.strips(spec, plan),
            "rows_kept": self._rows_kept(spec),
            "prefetch": plan.prefetch,
            "stage_lanes": staging_lanes(spec, WARP * self.strips(spec, plan), plan.prefetch),
            "gathered_stride": self.gathered_stride(spec),
        }


ALGORITHM: Final = OnePassMma()
