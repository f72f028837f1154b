"""``one_pass_mma``: scores on tensor cores; sm_80 and up.

Two forms, by the plan. An item that fits shared memory is held *whole*: each pair of variates is formed once. Any other
is *streamed* (``window``): a block owns some rows, and columns pass by a window at a time.
"""

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

_ROW_BLOCKS: Final = (1, 2, 4)
_COLUMNS: Final = (16, 32)
_ITEMS: Final = (1, 2, 4, 8)
_REGISTERS: Final = (64, 80, 96, 128, 168, 255)
_MOST_STRIPS: Final = 16
_OLDEST: Final = 80
_STAGE_LANES: Final = 8
# Steps up to which a strip's operand is kept in registers.
_KEPT_STEPS: Final = 32
# Of the streamed form.
_WINDOWS: Final = (16, 32, 64, 128)
_WARPS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_ACROSS: Final = (1, 2, 4)
_ACROSS_FROM: Final = 64
_TILE_COLUMNS: Final = (16, 32, 64)
_STREAMED_REGISTERS: Final = (128, 144, 168, 255)
# Steps of a chunk that are tried, rounded up to what is legal.
_CHUNKS: Final = (64, 96, 240)
_MOST_CHUNK: Final = 256
_CHUNK_WINDOWS: Final = (16, 32, 64)
# Up to so many steps no chunks are tried: all fit.
_UNCHUNKED: Final = 128
# What a barrier costs, in multiply-adds of an SM: a guess.
_BARRIER: Final = 12000
# Steps of dx that a warp of the streamed backward can keep sums of, by row blocks.
_MOST_STEPS: Final = {1: 256, 2: 128, 4: 48}


def _padded(count: int, unit: int = 16) -> int:
    return -(-count // unit) * unit


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
        window: columns staged at once by the streamed form; 0: the item is held whole, and what follows has no meaning.
        warps: strips of rows of a block; an item has as many blocks as its rows make.
        chunk: steps staged at once; 0: all. Backward, also the steps of dx of one block.
        hold: whether all steps of the block's rows stay staged; else they are staged again with each window.
        across: warps that share a strip, each with its part of the columns: for few rows, or wide windows.
        spread: backward, the warps of a strip share all steps of dx; else blocks do, a chunk each.
        mirror: forward, a block has all rows of an item, a tile after the other, and forms each pair of tiles once.
    """

    row_blocks: int = 2
    columns: int = 16
    items: int = 1
    prefetch: bool = True
    registers: int = 128
    most_blocks: int | None = None
    window: int = 0
    warps: int = 0
    chunk: int = 0
    hold: bool = True
    mirror: bool = False
    across: int = 1
    spread: bool = False

    @property
    def block_rows(self) -> int:
        """Rows of a block of the streamed form."""
        return 16 * self.row_blocks * self.warps


class OnePassMma(Algorithm[MmaPlan]):
    name: ClassVar[str] = "one_pass_mma"
    summary: ClassVar[str] = "tensor cores on half of the scores, items whole in shared memory, no scratch in DRAM"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "lse_low"
    always_keeps_out_acc: ClassVar[bool] = True
    plan_type = MmaPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[MmaPlan]:
        columns = _COLUMNS if direction == "forward" else _COLUMNS[:1]
        for knobs in itertools.product(_ROW_BLOCKS, columns, _ITEMS, (True, False), _REGISTERS):
            yield MmaPlan(direction, *knobs)
        yield from self._streamed_candidates(spec, direction)

    def _streamed_candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[MmaPlan]:
        unit, steps = self.chunk_unit(spec), _padded(spec.K)
        chunks = sorted({chunk for chunk in (_padded(chunk, unit) for chunk in _CHUNKS) if chunk < steps > _UNCHUNKED})
        shapes = [
            (window, columns, 0, True, across)
            for window, columns, across in itertools.product(_WINDOWS, _TILE_COLUMNS, _ACROSS)
            if columns * across <= window and (across == 1 or window >= _ACROSS_FROM)
        ]
        shapes += [
            (columns * across, columns, chunk, hold, across)
            for columns, chunk, hold, across in itertools.product(_TILE_COLUMNS, chunks, (True, False), _ACROSS)
            if columns * across in _CHUNK_WINDOWS
        ]
        # Of block sizes that take an item the same number of blocks, the smallest.
        warps_by_rows = {
            rows: sorted(
                {
                    blocks: warps for warps in reversed(_WARPS) for blocks in (-(-spec.H // (16 * rows * warps)),)
                }.values()
            )
            for rows in _ROW_BLOCKS[:2]
        }
        for row_blocks, (window, columns, chunk, hold, across), registers in itertools.product(
            _ROW_BLOCKS[:2], shapes, (128, 168, 255)
        ):
            for warps in warps_by_rows[row_blocks]:
                if warps * across > _MOST_STRIPS or (chunk and registers < _STREAMED_REGISTERS[-1]):
                    continue
                knobs = (row_blocks, columns, 1, True, registers, None, window, warps, chunk, hold, False, across)
                plan = MmaPlan(direction, *knobs)
                yield plan
                if direction == "forward" and not chunk and plan.block_rows % window == 0:
                    yield dataclasses.replace(plan, mirror=True)
                if direction == "backward" and chunk and across > 1:
                    yield dataclasses.replace(plan, spread=True)

    def template(self, plan: MmaPlan) -> str:
        return f"{self.name}/{'streamed_' if plan.window else ''}{plan.direction}.cu.j2"

    def fitted(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> MmaPlan:
        if plan.window:
            return plan
        launch = self.launch(spec, plan)
        return dataclasses.replace(
            plan, most_blocks=gpu.wave(launch.threads, launch.shared_bytes, self._registers(spec, plan))
        )

    def reject(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> str | None:
        if spec.dtype == "float64":
            return (
                "tensor cores here multiply fp16 numbers, of which two make a float32; float64 wants another algorithm"
            )
        if int(gpu.arch.removeprefix("sm_")) < _OLDEST:
            return f"needs sm_{_OLDEST} or newer; {gpu.name} is {gpu.arch}"
        streamed = plan.window != 0
        columns = _TILE_COLUMNS if streamed else _COLUMNS if plan.direction == "forward" else _COLUMNS[:1]
        for name, legal in (
            ("row_blocks", _ROW_BLOCKS),
            ("columns", columns),
            ("items", (1,) if streamed else _ITEMS),
            ("registers", _STREAMED_REGISTERS if streamed else _REGISTERS),
            ("prefetch", (True, False)),
            ("window", _WINDOWS if streamed else (0,)),
            ("warps", _WARPS if streamed else (0,)),
            ("spread", (True, False) if streamed and plan.direction == "backward" else (False,)),
            ("across", _ACROSS if streamed else (1,)),
            ("hold", (True, False) if streamed else (True,)),
            ("mirror", (True, False) if streamed and plan.direction == "forward" else (False,)),
        ):
            value = plan.knobs[name]
            if value not in legal or isinstance(value, bool) != (name in ("prefetch", "hold", "mirror", "spread")):
                return f"{name} is {value!r}; legal: {', '.join(map(str, legal))}"
        if streamed:
            return self._reject_streamed(spec, plan, gpu)
        if plan.chunk != 0:
            return f"chunk is {plan.chunk}; a whole item is one (0)"
        if plan.most_blocks is not None and plan.most_blocks < 1:
            return f"most_blocks is {plan.most_blocks}; it must be at least 1"
        rows = 16 * plan.row_blocks
        if plan.columns > rows:
            return f"a tile of {plan.columns} columns for strips of {rows} rows; lower columns or raise row_blocks"
        if plan.row_blocks > 1 and rows // 2 >= _padded(spec.H):
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
        needed = self._least_registers(spec, plan)
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}"
        if plan.registers * self.launch(spec, plan).threads > gpu.registers_per_sm:
            return f"{plan.registers} registers for {self.launch(spec, plan).threads} threads; lower registers"
        return None

    def _reject_streamed(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> str | None:
        if plan.most_blocks is not None:
            return f"most_blocks is {plan.most_blocks}; a streamed item has blocks of its own (None)"
        if plan.columns * plan.across > plan.window:
            return (
                f"{plan.across} tiles of {plan.columns} columns for windows of {plan.window}; lower columns or across"
            )
        if plan.warps * plan.across > _MOST_STRIPS:
            return f"{plan.warps * plan.across} warps a block; legal: at most {_MOST_STRIPS}; lower warps or across"
        unit, steps = self.chunk_unit(spec), _padded(spec.K)
        if plan.chunk and (plan.chunk % unit or not 0 < plan.chunk < steps or plan.chunk > _MOST_CHUNK):
            return (
                f"chunk is {plan.chunk}; legal: 0 (all), or a multiple of {unit} below {min(steps, _MOST_CHUNK + unit)}"
            )
        if plan.chunk and plan.columns * plan.across != plan.window:
            return f"scores of chunks are summed in registers: columns * across must be window ({plan.window})"
        if not plan.chunk and not plan.hold:
            return "all steps of the rows are staged at once, so they are held; hold=False needs a chunk"
        if plan.spread and (not plan.chunk or plan.across == 1):
            return "spread wants chunks of steps (chunk), and several warps a strip (across)"
        if plan.mirror and (plan.chunk or plan.block_rows % plan.window):
            return f"mirror wants all steps at once, and {plan.block_rows} rows to be whole windows of {plan.window}"
        for name, size in (("warps", plan.block_rows), ("window", plan.window)):
            if size // 2 >= _padded(spec.H):
                return f"{size} variates at once where there are {spec.H}; lower {name}"
        warp_steps = self._warp_steps(spec, plan)
        if plan.direction == "backward" and warp_steps > _MOST_STEPS[plan.row_blocks]:
            return (
                f"sums of {warp_steps} steps of dx for {16 * plan.row_blocks} rows do not fit registers; "
                f"set chunk to {_MOST_STEPS[plan.row_blocks]} or less, or lower row_blocks"
            )
        shared = self.layout(spec, plan).bytes
        if shared > gpu.shared_per_block:
            return (
                f"needs {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}; "
                "lower window, warps or chunk, or set hold=False"
            )
        needed = self._streamed_registers(spec, plan, kept=False)
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}"
        if plan.registers * WARP * plan.warps * plan.across > gpu.registers_per_sm:
            return f"{plan.registers} registers for {WARP * plan.warps * plan.across} threads; lower registers"
        return None

    def chunk_unit(self, spec: PoolSpec) -> int:
        """A chunk has whole blocks of 16 steps, and whole turns of the eight classes that sums are formed in."""
        return _padded(8 * self._width(spec)) if spec.layout == "bhk" else 16

    def _streamed_registers(self, spec: PoolSpec, plan: MmaPlan, kept: bool) -> int:
        parts, blocks = self.parts(spec), plan.row_blocks
        formed = plan.columns if plan.direction == "forward" or plan.chunk else 16
        operand = parts * blocks * 4 * (_padded(spec.K) // 16 if kept else 1) + parts * formed // 4
        scores = blocks * formed // 2 * (3 if parts == 2 else 1)
        if plan.direction == "forward":
            return 32 + operand + scores + 6 * blocks
        gathered = blocks * self._warp_steps(spec, plan) // 2
        return (72 if kept else 40) + operand + scores + 10 * blocks + gathered

    def _streamed_rows_kept(self, spec: PoolSpec, plan: MmaPlan) -> bool:
        return not plan.chunk and self._streamed_registers(spec, plan, kept=True) <= plan.registers

    def _warp_steps(self, spec: PoolSpec, plan: MmaPlan) -> int:
        """Steps of dx that a warp of the streamed backward sums."""
        if plan.spread:
            return _padded(-(-_padded(spec.K) // plan.across))
        return plan.chunk or _padded(spec.K)

    def _chunks(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return -(-spec.K // plan.chunk) if plan.chunk else 1

    def _streamed_layout(self, spec: PoolSpec, plan: MmaPlan) -> SharedLayout:
        rows, window, steps = plan.block_rows, plan.window, plan.chunk or _padded(spec.K)
        row_steps = _padded(spec.K) if plan.hold else steps

        def planes(variates: int, steps: int) -> tuple[int, int]:
            across, down = (steps, variates) if spec.layout == "bhk" else (variates, steps)
            return self.parts(spec) * down * (2 * across + 16) // 4, self.parts(spec) * down * 4

        regions = [
            ("Rows", *planes(rows, row_steps)),
            ("Columns", *planes(window, _padded(spec.K) if plan.spread else steps)),
        ]
        if plan.direction == "forward":
            regions += [("Weights", 2 * window, 0)]
        else:
            regions += [(name, window, 0) for name in ("Mean", "G", "Out", "Gain", "Pooled", "Lse", "Low")]
            regions += [(name, rows, 0) for name in ("RowMean", "RowOffset", "RowG", "RowOut", "RowLse", "RowLow")]
        regions += [("Offset", window, 0), ("Room", _padded(plan.warps * plan.across, 4), 0)]
        if plan.spread:
            # Fragments of fp16 pairs: four words a lane for 16 rows and 16 columns.
            regions.append(("Shown", 8 * WARP * plan.warps * max(window // 16 * plan.row_blocks, plan.across), 0))
        if plan.across > 1 and plan.direction == "forward":
            regions.append(("Shares", 3 * rows * plan.across, 0))
        if plan.mirror:
            regions += [("RowWeights", 2 * rows, 0), ("Partials", 2 * window * plan.warps, 0)]
            regions += [("PutAway", 2 * _padded(spec.H, window), 0)]
        if plan.chunk:
            variates = max(rows, window) if plan.direction == "backward" else window
            regions.append(("Unfinished", 19 * variates, 0))
        if plan.prefetch:
            longest = plan.chunk or spec.K
            elements = window * (min(longest, spec.K) if spec.layout == "bkh" else longest)
            regions.append(("Fetched", -(-elements * spec.element_bytes // 16) * 4, 0))
        layout = SharedLayout.pack(4, regions)
        if plan.across > 1 and plan.direction == "backward" and not plan.spread:
            # At the end the warps' sums lie where all of this was.
            sums = WARP * plan.warps * plan.across * plan.row_blocks * (steps // 2 + 4)
            if 4 * sums > layout.bytes:
                layout = SharedLayout.pack(4, [*regions, ("Rest", sums - layout.bytes // 4, 0)])
        return layout

    def _streamed_launch(self, spec: PoolSpec, plan: MmaPlan) -> Launch:
        blocks = 1 if plan.mirror else -(-spec.H // plan.block_rows)
        if plan.direction == "backward" and not plan.spread:
            blocks *= self._chunks(spec, plan)
        return Launch(WARP * plan.warps * plan.across, _padded(self.layout(spec, plan).bytes), 1, blocks)

    def _streamed_stage_lanes(self, spec: PoolSpec, plan: MmaPlan) -> int:
        if spec.layout == "bhk":
            return _STAGE_LANES
        # 128 bytes side by side, then as many lanes along the steps as there are threads for.
        width = self._width(spec)
        lanes = max(1, min(_STAGE_LANES, 32 * width * spec.element_bytes // 128))
        while lanes < _STAGE_LANES and 2 * lanes * plan.window // width <= WARP * plan.warps * plan.across:
            lanes *= 2
        return lanes

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
        if plan.window:
            return self._streamed_layout(spec, plan)
        strips = self.strips(spec, plan)
        rows, steps = strips * 16 * plan.row_blocks, _padded(spec.K)
        across, down = (steps, rows) if spec.layout == "bhk" else (rows, steps)
        # In float32 words, as the other regions: 16 bytes of padding a row of a plane.
        plane = down * (2 * across + 16) // 4
        regions = [("Planes", self.parts(spec) * plane, self.parts(spec) * down * 4)]
        mirrored = max(1, strips // 2)
        if plan.direction == "forward":
            regions += [("Weights", 2 * rows, 0), ("Sums", 2 * rows, 0), ("Partials", 2 * rows * mirrored, 0)]
        else:
            regions += [(name, rows, 0) for name in ("Gain", "Pooled", "Lse", "Low")]
            regions += [("Pulled", rows * mirrored, 0)]
            regions += [("Gathered", rows * self.gathered_stride(spec) if strips > 1 else 0, 0)]
        regions += [("Mean", rows, 0), ("Offset", rows, 0), ("Room", _padded(2 * strips, 4), 0)]
        if plan.prefetch:
            regions.append(("Fetched", -(-spec.H * spec.K * spec.element_bytes // 16) * 4, 0))
        return SharedLayout.pack(4, [region for region in regions if region[1]])

    @staticmethod
    def gathered_stride(spec: PoolSpec) -> int:
        """Words between rows of what is gathered for other strips: 8 modulo 32 keeps four rows on different banks."""
        return _padded(spec.K, 32) + 8

    def launch(self, spec: PoolSpec, plan: MmaPlan) -> Launch:
        if plan.window:
            return self._streamed_launch(spec, plan)
        threads = WARP * self.strips(spec, plan) * plan.items
        shared = plan.items * self._item_bytes(spec, plan)
        return Launch(threads, shared, plan.items, 1, plan.most_blocks)

    def _item_bytes(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return _padded(self.layout(spec, plan).bytes)

    def _rows_kept(self, spec: PoolSpec) -> bool:
        return _padded(spec.K) <= _KEPT_STEPS

    def _least_registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        parts, blocks, steps = self.parts(spec), plan.row_blocks, _padded(spec.K)
        operand = parts * blocks * 4 * (steps // 16 if self._rows_kept(spec) else 1)
        scores = blocks * plan.columns // 2
        if plan.direction == "forward":
            return 24 + operand + scores + 8 * blocks
        return 32 + operand + 8 + 10 * blocks + blocks * steps // 2 + steps // 2

    def _registers(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return plan.registers

    def promises_no_spills(self, spec: PoolSpec, plan: MmaPlan) -> bool:
        return False  # ptxas decides near the cap

    def _stage_lanes(self, spec: PoolSpec, plan: MmaPlan) -> int:
        """Lanes that stage a variate (or a pack of them) together: all threads are to have work."""
        threads = WARP * self.strips(spec, plan)
        width = self._width(spec)
        bundles = spec.H if spec.layout == "bhk" else -(-spec.H // width)
        turns = -(-spec.K // width) if spec.layout == "bhk" else spec.K
        lanes, coalesced = 1, spec.layout == "bhk" and not plan.prefetch
        while lanes < _STAGE_LANES and 2 * lanes <= turns and (coalesced or 2 * lanes * bundles <= threads):
            lanes *= 2
        return lanes

    @staticmethod
    def _width(spec: PoolSpec) -> int:
        """Elements that staging reads at once."""
        width, along = 16 // spec.element_bytes, spec.K if spec.layout == "bhk" else spec.H
        while along % width:
            width //= 2
        return width

    def cost(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu, batch: int) -> Cost:
        launch = self.launch(spec, plan)
        blocks = launch.blocks(batch)
        if plan.window:
            return self._streamed_cost(spec, plan, launch, batch)
        rows = self.strips(spec, plan) * 16 * plan.row_blocks
        scores = rows * rows / 2
        traffic = spec.least_bytes(plan.direction, batch) + batch * spec.H * 12
        backward = plan.direction == "backward"
        return Cost(
            fma=round(batch * (scores * (13 if backward else 7) + spec.H * spec.K * 8)),
            fp64=False,
            mufu=round(batch * scores),
            dram_bytes=traffic,
            scratch_bytes=0,
            shared_wavefronts=0,
            global_wavefronts=0,
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=blocks,
            registers=plan.registers,
            tasks=launch.tasks(batch),
        )

    def _streamed_cost(self, spec: PoolSpec, plan: MmaPlan, launch: Launch, batch: int) -> Cost:
        """A rough count: what tensor cores do is held to be so many multiply-adds, as it takes issue slots too."""
        blocks, backward = launch.blocks(batch), plan.direction == "backward"
        parts, steps, chunks = self.parts(spec), _padded(spec.K), self._chunks(spec, plan)
        columns = _padded(spec.H)
        # Each tile of rows meets itself and those after it.
        passes = (-(-spec.H // plan.block_rows) + 1) / 2 if plan.mirror else 1
        scores = plan.block_rows * columns * passes
        products = 3 if parts == 2 else 1
        gathered = steps if plan.spread else plan.chunk or steps
        multiplied = scores / 128 * products * (steps + (gathered if backward else 0)) / 16
        loads = scores / (16 * plan.row_blocks * plan.columns) * parts * steps / 16
        loads *= (0 if self._streamed_rows_kept(spec, plan) else plan.row_blocks) + plan.columns / 16
        if backward:
            loads += scores / (256 * plan.row_blocks) * parts * gathered / 16
        windows = -(-columns // plan.window)
        staged = passes * columns * steps + plan.block_rows * steps * (1 if plan.hold else windows)
        if backward and chunks > 1 and not plan.spread:
            staged += columns * plan.chunk
        fma = multiplied * 195 + scores * (12 if backward else 7 if plan.mirror else 5) + staged * 8
        # Two barriers a chunk of a window, at which pipes run dry.
        fma += windows * chunks * passes * 2 * _BARRIER
        traffic = spec.least_bytes(plan.direction, batch) + batch * spec.H * 12
        return Cost(
            fma=round(blocks * fma),
            fp64=False,
            mufu=round(blocks * scores),
            dram_bytes=traffic,
            scratch_bytes=0,
            shared_wavefronts=round(blocks * (loads * 4 + staged * (spec.element_bytes + 2 * parts) / 128)),
            global_wavefronts=round(blocks * staged * spec.element_bytes / 128),
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=blocks,
            registers=plan.registers,
        )

    def _streamed_context(self, spec: PoolSpec, plan: MmaPlan) -> Mapping[str, Any]:
        return {
            "min_blocks": min_blocks(WARP * plan.warps * plan.across, plan.registers),
            "parts": self.parts(spec),
            "row_blocks": plan.row_blocks,
            "columns": plan.columns,
            "strips": plan.warps,
            "across": plan.across,
            "window": plan.window,
            "chunk": plan.chunk or _padded(spec.K),
            "one_chunk": not plan.chunk,
            "rows_held": plan.hold,
            "rows_kept": self._streamed_rows_kept(spec, plan),
            "prefetch": plan.prefetch,
            "mirror": plan.mirror,
            "spread": plan.spread,
            "stage_lanes": self._streamed_stage_lanes(spec, plan),
        }

    def context(self, spec: PoolSpec, plan: MmaPlan) -> Mapping[str, Any]:
        if plan.window:
            return self._streamed_context(spec, plan)
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
            "stage_lanes": self._stage_lanes(spec, plan),
            "gathered_stride": self.gathered_stride(spec),
        }


ALGORITHM: Final = OnePassMma()
