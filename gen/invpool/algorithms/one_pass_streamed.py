"""``one_pass_streamed``: scores on tensor cores, columns passing by a window at a time; any H and K; sm_80 and up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan, min_blocks
from invpool.algorithms.tensor_cores import (
    MMA_SHARE,
    STAGE_LANES,
    Work,
    padded,
    parts_of,
    reject_spec,
    staging_width,
    staging_work,
)
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec

_ROW_BLOCKS: Final = (1, 2, 4)
_MOST_WARPS: Final = 16
_WINDOWS: Final = (16, 32, 64, 128)
_WARPS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_ACROSS: Final = (1, 2, 4)
_ACROSS_FROM: Final = 64
_COLUMNS: Final = (16, 32, 64)
_REGISTERS: Final = (255, 168, 144, 128)
# Steps of a chunk that are tried, rounded up to what is legal.
_CHUNKS: Final = (64, 96, 240)
_MOST_CHUNK: Final = 256
_CHUNK_WINDOWS: Final = (16, 32, 64)
# Up to so many steps no chunks are tried: all fit.
_UNCHUNKED: Final = 128
# Warp instructions that a round leaves room for, of an SM: measured on an H200.
_ROUND: Final = {"forward": 3000, "backward": 4500}
_CHUNK_ROUND: Final = 10000
# Of a warp that begins and ends a block's rows of an item, measured over H from 64 to 862.
_VISIT: Final = 1200
# Steps of dx that a warp of the streamed backward can keep sums of, by row blocks.
_MOST_STEPS: Final = {1: 256, 2: 128, 4: 48}


@dataclasses.dataclass(frozen=True)
class StreamedPlan(Plan):
    """Knobs of ``one_pass_streamed``.

    Attributes:
        row_blocks: blocks of 16 rows that a strip has, which is a warp's.
        columns: columns of a tile of scores; backward, those whose products are summed before they are put away.
        registers: registers a thread may have; fewer let more blocks share an SM.
        window: columns staged at once.
        warps: strips of rows of a block; an item has as many blocks as its rows make.
        chunk: steps staged at once; 0: all. Backward, also the steps of dx of one block.
        hold: whether all steps of the block's rows stay staged; else they are staged again with each window.
        across: warps that share a strip, each with its part of the columns: for few rows, or wide windows.
        mirror: forward, a block has all rows of an item, a tile after the other, and forms each pair of tiles once.
        spread: backward, the warps of a strip share all steps of dx; else blocks do, a chunk each.
        prefetch: whether a window is fetched while the one before it is computed.
    """

    row_blocks: int = 2
    columns: int = 16
    registers: int = 255
    window: int = 64
    warps: int = 4
    chunk: int = 0
    hold: bool = True
    across: int = 1
    mirror: bool = False
    spread: bool = False
    prefetch: bool = True

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return 16 * self.row_blocks * self.warps


class OnePassStreamed(Algorithm[StreamedPlan]):
    name: ClassVar[str] = "one_pass_streamed"
    summary: ClassVar[str] = "tensor cores on tiles of an item that passes by, no scratch in DRAM, any H and K"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "lse_low"
    always_keeps_out_acc: ClassVar[bool] = True
    oldest_arch: ClassVar[str] = "sm_80"
    plan_type = StreamedPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[StreamedPlan]:
        unit, steps = self.chunk_unit(spec), padded(spec.K)
        chunks = sorted({chunk for chunk in (padded(chunk, unit) for chunk in _CHUNKS) if chunk < steps > _UNCHUNKED})
        # The narrowest window is for few variates: it never won a measurement where there were more.
        windows = _WINDOWS if spec.H <= _WINDOWS[1] else _WINDOWS[1:]
        shapes = [
            (window, columns, 0, True, across)
            for window, columns, across in itertools.product(windows, _COLUMNS, _ACROSS)
            if columns * across <= window and (across == 1 or window >= _ACROSS_FROM)
        ]
        shapes += [
            (columns * across, columns, chunk, hold, across)
            for columns, chunk, hold, across in itertools.product(_COLUMNS, chunks, (True, False), _ACROSS)
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
            _ROW_BLOCKS[:2], shapes, (255, 168, 128)
        ):
            for warps in warps_by_rows[row_blocks]:
                if warps * across > _MOST_WARPS or (chunk and registers < _REGISTERS[0]):
                    continue
                plan = StreamedPlan(direction, row_blocks, columns, registers, window, warps, chunk, hold, across)
                yield plan
                if direction == "forward" and not chunk and plan.block_rows % window == 0:
                    yield dataclasses.replace(plan, mirror=True)
                if direction == "backward" and chunk and across > 1:
                    yield dataclasses.replace(plan, spread=True)

    def reject(self, spec: PoolSpec, plan: StreamedPlan, gpu: Gpu) -> str | None:
        obstacle = reject_spec(self, spec, gpu)
        if obstacle:
            return obstacle
        backward = plan.direction == "backward"
        for name, legal in (
            ("row_blocks", _ROW_BLOCKS),
            ("columns", _COLUMNS),
            ("registers", _REGISTERS),
            ("prefetch", (True, False)),
            ("window", _WINDOWS),
            ("warps", _WARPS),
            ("spread", (True, False) if backward else (False,)),
            ("across", _ACROSS),
            ("hold", (True, False)),
            ("mirror", (False,) if backward else (True, False)),
        ):
            value = plan.knobs[name]
            if value not in legal or isinstance(value, bool) != isinstance(legal[0], bool):
                return f"{name} is {value!r}; legal: {', '.join(map(str, sorted(legal)))}"
        if plan.columns * plan.across > plan.window:
            return (
                f"{plan.across} tiles of {plan.columns} columns for windows of {plan.window}; lower columns or across"
            )
        if plan.warps * plan.across > _MOST_WARPS:
            return f"{plan.warps * plan.across} warps a block; legal: at most {_MOST_WARPS}; lower warps or across"
        unit, steps = self.chunk_unit(spec), padded(spec.K)
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
        needed = self._needed_registers(spec, plan, kept=False)
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}"
        if plan.registers * WARP * plan.warps * plan.across > gpu.registers_per_sm:
            return f"{plan.registers} registers for {WARP * plan.warps * plan.across} threads; lower registers"
        return None

    def chunk_unit(self, spec: PoolSpec) -> int:
        """A chunk has whole blocks of 16 steps, and whole turns of the eight classes that sums are formed in."""
        return padded(8 * staging_width(spec)) if spec.layout == "bhk" else 16

    def _needed_registers(self, spec: PoolSpec, plan: StreamedPlan, kept: bool) -> int:
        parts, blocks = parts_of(spec), plan.row_blocks
        formed = plan.columns if plan.direction == "forward" or plan.chunk else 16
        operand = parts * blocks * 4 * (padded(spec.K) // 16 if kept else 1) + parts * formed // 4
        scores = blocks * formed // 2 * (3 if parts == 2 else 1)
        if plan.direction == "forward":
            return 32 + operand + scores + 6 * blocks
        gathered = blocks * self._warp_steps(spec, plan) // 2
        return (72 if kept else 40) + operand + scores + 10 * blocks + gathered

    def _rows_kept(self, spec: PoolSpec, plan: StreamedPlan) -> bool:
        return not plan.chunk and self._needed_registers(spec, plan, kept=True) <= plan.registers

    def _warp_steps(self, spec: PoolSpec, plan: StreamedPlan) -> int:
        """Steps of dx that a warp of the streamed backward sums."""
        if plan.spread:
            return padded(-(-padded(spec.K) // plan.across))
        return plan.chunk or padded(spec.K)

    def _chunks(self, spec: PoolSpec, plan: StreamedPlan) -> int:
        return -(-spec.K // plan.chunk) if plan.chunk else 1

    def layout(self, spec: PoolSpec, plan: StreamedPlan) -> SharedLayout:
        rows, window, steps = plan.block_rows, plan.window, plan.chunk or padded(spec.K)
        row_steps = padded(spec.K) if plan.hold else steps

        def planes(variates: int, steps: int) -> tuple[int, int]:
            across, down = (steps, variates) if spec.layout == "bhk" else (variates, steps)
            return parts_of(spec) * down * (2 * across + 16) // 4, parts_of(spec) * down * 4

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

    def launch(self, spec: PoolSpec, plan: StreamedPlan) -> Launch:
        blocks = 1 if plan.mirror else -(-spec.H // plan.block_rows)
        if plan.direction == "backward" and not plan.spread:
            blocks *= self._chunks(spec, plan)
        return Launch(WARP * plan.warps * plan.across, padded(self.layout(spec, plan).bytes), 1, blocks)

    def _stage_lanes(self, spec: PoolSpec, plan: StreamedPlan) -> int:
        if spec.layout == "bhk":
            return STAGE_LANES
        # 128 bytes side by side, then as many lanes along the steps as there are threads for.
        width = staging_width(spec)
        lanes = max(1, min(STAGE_LANES, 32 * width * spec.element_bytes // 128))
        while lanes < STAGE_LANES and 2 * lanes * plan.window // width <= WARP * plan.warps * plan.across:
            lanes *= 2
        return lanes

    def cost(self, spec: PoolSpec, plan: StreamedPlan, gpu: Gpu, batch: int) -> Cost:
        parts, steps = parts_of(spec), padded(spec.K) // 16
        products, backward = 2 * parts - 1, plan.direction == "backward"
        rows, columns = padded(spec.H, plan.block_rows), padded(spec.H, plan.window)
        tiles, strip_rows = rows // plan.block_rows, 16 * plan.row_blocks
        # Of mirrored pairs each is formed once; where the steps of dx are shared out over blocks, each forms all.
        scores = rows * (columns + plan.block_rows) / 2 if plan.mirror else rows * columns
        again = self._chunks(spec, plan) if backward and not plan.spread else 1
        staged = tiles * (1 if plan.hold else columns // plan.window) * plan.block_rows + tiles * columns
        work = staging_work(spec, parts, plan.prefetch) * (staged / spec.H)
        formed = Work(
            tensor=products * 16 * steps * scores / MMA_SHARE,
            issue=scores * products * steps / 256,
            wavefronts=scores / (16 * strip_rows) * parts * steps * 4 * (1 + 16 * plan.row_blocks / plan.columns),
        )
        each = (13 + 3 * parts if backward else 8 if plan.mirror else 4.5) / WARP
        work += formed + Work(fma=scores * 4, mufu=scores, issue=scores * each)
        # A window, or a chunk of it, is a round of fetching, staging and waiting, at which pipes run dry.
        windows = tiles * (columns // plan.window) / (2 if plan.mirror else 1)
        work += Work(
            issue=windows * (self._chunks(spec, plan) * _CHUNK_ROUND if plan.chunk else _ROUND[plan.direction])
        )
        work *= again
        launch = self.launch(spec, plan)
        work += Work(issue=_VISIT * launch.blocks_per_item * launch.threads / WARP)
        if backward:
            work += Work(
                tensor=products * 16 * steps * scores / MMA_SHARE,
                issue=scores * products * steps / 256,
                wavefronts=scores / (16 * strip_rows) * parts * steps * 4,
            )
        return work.cost(self, spec, plan, gpu, batch, exposed=False)

    def context(self, spec: PoolSpec, plan: StreamedPlan) -> Mapping[str, Any]:
        return {
            "min_blocks": min_blocks(WARP * plan.warps * plan.across, plan.registers),
            "parts": parts_of(spec),
            "row_blocks": plan.row_blocks,
            "columns": plan.columns,
            "strips": plan.warps,
            "across": plan.across,
            "window": plan.window,
            "chunk": plan.chunk or padded(spec.K),
            "one_chunk": not plan.chunk,
            "rows_held": plan.hold,
            "rows_kept": self._rows_kept(spec, plan),
            "prefetch": plan.prefetch,
            "mirror": plan.mirror,
            "spread": plan.spread,
            "stage_lanes": self._stage_lanes(spec, plan),
        }

    def promises_no_spills(self, spec: PoolSpec, plan: StreamedPlan) -> bool:
        return False  # ptxas decides near the cap


ALGORITHM: Final = OnePassStreamed()
