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

_ROW_BLOCKS: Final = (2, 1, 4)
_COLUMNS: Final = (32, 16)
_ITEMS: Final = (4, 2, 1, 8)
_REGISTERS: Final = (255, 168, 128, 96, 80, 64)
_MOST_STRIPS: Final = 16
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
# Steps of dx that a warp of the streamed backward can keep sums of, by row blocks.
_MOST_STEPS: Final = {1: 256, 2: 128, 4: 48}


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
    oldest_arch: ClassVar[str] = "sm_80"
    plan_type = MmaPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[MmaPlan]:
        columns = _COLUMNS if direction == "forward" else _COLUMNS[1:]
        for knobs in itertools.product(_ROW_BLOCKS, columns, _ITEMS, (True, False), _REGISTERS):
            yield MmaPlan(direction, *knobs)
        yield from self._streamed_candidates(spec, direction)

    def _streamed_candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[MmaPlan]:
        unit, steps = self.chunk_unit(spec), padded(spec.K)
        chunks = sorted({chunk for chunk in (padded(chunk, unit) for chunk in _CHUNKS) if chunk < steps > _UNCHUNKED})
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
        too_old = self.reject_arch(gpu.arch)
        if too_old:
            return f"{too_old} ({gpu.name})"
        streamed = plan.window != 0
        columns = _TILE_COLUMNS if streamed else _COLUMNS if plan.direction == "forward" else _COLUMNS[1:]
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
                return f"{name} is {value!r}; legal: {', '.join(map(str, sorted(legal)))}"
        if streamed:
            return self._reject_streamed(spec, plan, gpu)
        if plan.chunk != 0:
            return f"chunk is {plan.chunk}; a whole item is one (0)"
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

    def _reject_streamed(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu) -> str | None:
        if plan.most_blocks is not None:
            return f"most_blocks is {plan.most_blocks}; a streamed item has blocks of its own (None)"
        if plan.columns * plan.across > plan.window:
            return (
                f"{plan.across} tiles of {plan.columns} columns for windows of {plan.window}; lower columns or across"
            )
        if plan.warps * plan.across > _MOST_STRIPS:
            return f"{plan.warps * plan.across} warps a block; legal: at most {_MOST_STRIPS}; lower warps or across"
        unit, steps = self.chunk_unit(spec), padded(spec.K)
        if plan.chunk and (plan.chunk % unit or not 0 < plan.chunk < steps or plan.chunk > _MOST_CHUNK):
            return (
                f"chunk is {plan.chunk}; legal: 0 (all), or a multiple of {unit} below {min(steps, _MOST_CHUNK + unit)}"
            )
        if plan.chunk and steps <= _UNCHUNKED:
            return f"{spec.K} steps are staged at once, as whole items are: both sum scores in one order; set chunk to 0"
        if plan.chunk and plan.columns * plan.across != plan.window:
            return f"scores of chunks are summed in registers: columns * across must be window ({plan.window})"
        if not plan.chunk and not plan.hold:
            return "all steps of the rows are staged at once, so they are held; hold=False needs a chunk"
        if plan.spread and (not plan.chunk or plan.across == 1):
            return "spread wants chunks of steps (chunk), and several warps a strip (across)"
        if plan.mirror and (plan.chunk or plan.block_rows % plan.window):
            return f"mirror wants all steps at once, and {plan.block_rows} rows to be whole windows of {plan.window}"
        for name, size in (("warps", plan.block_rows), ("window", plan.window)):
            if size // 2 >= padded(spec.H):
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
        return padded(8 * staging_width(spec)) if spec.layout == "bhk" else 16

    def _streamed_registers(self, spec: PoolSpec, plan: MmaPlan, kept: bool) -> int:
        parts, blocks = self.parts(spec), plan.row_blocks
        formed = plan.columns if plan.direction == "forward" or plan.chunk else 16
        operand = parts * blocks * 4 * (padded(spec.K) // 16 if kept else 1) + parts * formed // 4
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
            return padded(-(-padded(spec.K) // plan.across))
        return plan.chunk or padded(spec.K)

    def _chunks(self, spec: PoolSpec, plan: MmaPlan) -> int:
        return -(-spec.K // plan.chunk) if plan.chunk else 1

    def _streamed_layout(self, spec: PoolSpec, plan: MmaPlan) -> SharedLayout:
        rows, window, steps = plan.block_rows, plan.window, plan.chunk or padded(spec.K)
        row_steps = padded(spec.K) if plan.hold else steps

        def planes(variates: int, steps: int) -> tuple[int, int]:
            across, down = (steps, variates) if spec.layout == "bhk" else (variates, steps)
            return self.parts(spec) * down * (2 * across + 16) // 4, self.parts(spec) * down * 4

        regions = [
            ("Rows", *planes(rows, row_steps)),
            ("Columns", *planes(window, padded(spec.K) if plan.spread else steps)),
        ]
        if plan.direction == "forward":
            regions += [("Weights", 2 * window, 0)]
        else:
            regions += [(name, window, 0) for name in ("Mean", "G", "Out", "Gain", "Pooled", "Lse", "Low")]
            regions += [(name, rows, 0) for name in ("RowMean", "RowOffset", "RowG", "RowOut", "RowLse", "RowLow")]
        regions += [("Offset", window, 0), ("Room", padded(plan.warps * plan.across, 4), 0)]
        if plan.spread:
            # Fragments of fp16 pairs: four words a lane for 16 rows and 16 columns.
            regions.append(("Shown", 8 * WARP * plan.warps * max(window // 16 * plan.row_blocks, plan.across), 0))
        if plan.across > 1 and plan.direction == "forward":
            regions.append(("Shares", 3 * rows * plan.across, 0))
        if plan.mirror:
            regions += [("RowWeights", 2 * rows, 0), ("Partials", 2 * window * plan.warps, 0)]
            regions += [("PutAway", 2 * padded(spec.H, window), 0)]
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
        return Launch(WARP * plan.warps * plan.across, padded(self.layout(spec, plan).bytes), 1, blocks)

    def _streamed_stage_lanes(self, spec: PoolSpec, plan: MmaPlan) -> int:
        if spec.layout == "bhk":
            return _STAGE_LANES
        # 128 bytes side by side, then as many lanes along the steps as there are threads for.
        width = staging_width(spec)
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
        if plan.window:
            return self._streamed_launch(spec, plan)
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
        if plan.window:
            return self._streamed_cost(spec, plan, gpu, batch)
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

    def _streamed_cost(self, spec: PoolSpec, plan: MmaPlan, gpu: Gpu, batch: int) -> Cost:
        parts, steps = self.parts(spec), padded(spec.K) // 16
        products, backward = 2 * parts - 1, plan.direction == "backward"
        rows, columns = padded(spec.H, plan.block_rows), padded(spec.H, plan.window)
        tiles, strip_rows = rows // plan.block_rows, 16 * plan.row_blocks
        # Of mirrored pairs each is formed once; where the steps of dx are shared out over blocks, each forms all.
        scores = rows * (columns + plan.block_rows) / 2 if plan.mirror else rows * columns
        again = self._chunks(spec, plan) if backward and not plan.spread else 1
        staged = tiles * (1 if plan.hold else columns // plan.window) * plan.block_rows + tiles * columns
        work = staging_work(spec, parts, plan.prefetch) * (staged / spec.H)
        formed = Work(
            tensor=products * 16 * steps * scores / _MMA_SHARE,
            issue=scores * products * steps / 256,
            wavefronts=scores / (16 * strip_rows) * parts * steps * 4 * (1 + 16 * plan.row_blocks / plan.columns),
        )
        each = (13 + 3 * parts if backward else 8 if plan.mirror else 4.5) / WARP
        work += formed + Work(fma=scores * 4, mufu=scores, issue=scores * each)
        work *= again
        if backward:
            work += Work(
                tensor=products * 16 * steps * scores / _MMA_SHARE,
                issue=scores * products * steps / 256,
                wavefronts=scores / (16 * strip_rows) * parts * steps * 4,
            )
        return work.cost(self, spec, plan, gpu, batch, exposed=False)

    def _streamed_context(self, spec: PoolSpec, plan: MmaPlan) -> Mapping[str, Any]:
        return {
            "min_blocks": min_blocks(WARP * plan.warps * plan.across, plan.registers),
            "parts": self.parts(spec),
            "row_blocks": plan.row_blocks,
            "columns": plan.columns,
            "strips": plan.warps,
            "across": plan.across,
            "window": plan.window,
            "chunk": plan.chunk or padded(spec.K),
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
            "stage_lanes": staging_lanes(spec, WARP * self.strips(spec, plan), plan.prefetch),
            "gathered_stride": self.gathered_stride(spec),
        }


ALGORITHM: Final = OnePassMma()
