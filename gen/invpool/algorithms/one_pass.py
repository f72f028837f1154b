"""``one_pass``: tiles of scores in registers, nothing of size H*H anywhere; any H and K, every architecture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan, min_blocks
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.layout import SharedLayout, wavefronts
from invpool.spec import PoolSpec

# (rows, columns, thread_rows, thread_columns): the tile of scores and the piece of it that a thread forms.
_TILES: Final = (
    (8, 8, 2, 2),
    (16, 16, 2, 2),
    (16, 16, 4, 2),
    (32, 32, 4, 4),
    (64, 64, 4, 4),
    (64, 64, 8, 4),
    (128, 64, 8, 4),
)
_K_STEPS: Final = (16, 32, 64, 96, 128)
_ITEMS: Final = (1, 2, 4, 8, 16)
_REGISTERS: Final = (64, 96, 128, 168, 255)
_THREADS: Final = (32, 256)
# More threads an item than this would wait long for each other's word on whether the item is to be centred.
_GROUPED_THREADS: Final = 64
# Registers beside the arrays that the plan sizes, as for three_pass.
_BASE: Final = 24


@dataclasses.dataclass(frozen=True)
class OnePassPlan(Plan):
    """Knobs of ``one_pass``.

    Attributes:
        rows, columns: the tile of scores that a group of threads forms at once.
        thread_rows, thread_columns: the piece of it that one thread keeps in registers.
        k_step: steps of the trajectories staged at once; backward, also the steps of dx of one block.
        items: items of a block, each with a group of threads of its own: for few variates.
        registers: registers a thread may have; fewer let more blocks share an SM.
    """

    rows: int = 64
    columns: int = 64
    thread_rows: int = 4
    thread_columns: int = 4
    k_step: int = 32
    items: int = 1
    registers: int = 128

    @property
    def across(self) -> int:
        """Threads that share a group of rows."""
        return self.columns // self.thread_columns

    @property
    def item_threads(self) -> int:
        return self.rows // self.thread_rows * self.across

    @property
    def threads(self) -> int:
        return self.item_threads * self.items


class OnePass(Algorithm[OnePassPlan]):
    name: ClassVar[str] = "one_pass"
    summary: ClassVar[str] = "tiles of scores in registers, online softmax, no scratch in DRAM, any H and K"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "lse_low"
    always_keeps_out_acc: ClassVar[bool] = True
    plan_type = OnePassPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[OnePassPlan]:
        for tile, k_step, items, registers in itertools.product(_TILES, _K_STEPS, _ITEMS, _REGISTERS):
            yield OnePassPlan(direction, *tile, k_step, items, registers)

    def reject(self, spec: PoolSpec, plan: OnePassPlan, gpu: Gpu) -> str | None:
        tile = (plan.rows, plan.columns, plan.thread_rows, plan.thread_columns)
        if tile not in _TILES:
            return f"tile is {tile}; legal: {', '.join(map(str, _TILES))}"
        for name, legal in (("k_step", _K_STEPS), ("items", _ITEMS), ("registers", _REGISTERS)):
            value = plan.knobs[name]
            if value not in legal:
                return f"{name} is {value!r}; legal: {', '.join(map(str, legal))}"
        if plan.k_step > next((step for step in _K_STEPS if step >= spec.K), _K_STEPS[-1]):
            return f"{plan.k_step} steps are staged at once where there are {spec.K}; lower k_step"
        if plan.rows > next((tile[0] for tile in _TILES if tile[0] >= spec.H), _TILES[-1][0]):
            return f"a tile of {plan.rows} rows for {spec.H} variates; lower rows"
        if not _THREADS[0] <= plan.threads <= _THREADS[1] or plan.threads % WARP:
            return f"{plan.threads} threads a block; legal: whole warps, {_THREADS[0]} to {_THREADS[1]}"
        if plan.items > 1 and (plan.item_threads > _GROUPED_THREADS or plan.rows < spec.H):
            return f"items share a block only where one tile of at most {_GROUPED_THREADS} threads holds all rows"
        shared = self.launch(spec, plan).shared_bytes
        if shared > gpu.shared_per_block:
            return (
                f"needs {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}; "
                "lower rows, columns, k_step or items"
            )
        needed = self._expected_registers(spec, plan)
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}"
        return None

    def layout(self, spec: PoolSpec, plan: OnePassPlan) -> SharedLayout:
        """Of one item; a block has ``items`` of them, each rounded up to 16 bytes."""
        pad = 16 // spec.scalar_bytes
        row_stride, column_stride = plan.rows + pad, plan.columns + pad
        regions = [
            ("Rows", plan.k_step * row_stride, plan.k_step * pad),
            ("Columns", plan.k_step * column_stride, plan.k_step * pad),
        ]
        vectors = ["Mean", "Offset"]
        if plan.direction == "backward":
            regions.append(("Gradients", plan.columns * row_stride, plan.columns * pad))
            vectors += ["Out", "G", "Lse", "Low"]
        regions += [(name, plan.columns, 0) for name in vectors]
        if plan.direction == "backward":
            regions += [("RowMean", plan.rows, 0), ("RowOffset", plan.rows, 0)]
        # One int a thread: whether its rows are near the centre.
        regions.append(("Near", -(-plan.item_threads * 4 // spec.scalar_bytes), 0))
        return SharedLayout.pack(spec.scalar_bytes, regions)

    def _item_bytes(self, spec: PoolSpec, plan: OnePassPlan) -> int:
        return -(-self.layout(spec, plan).bytes // 16) * 16

    def _chunks(self, spec: PoolSpec, plan: OnePassPlan) -> int:
        return -(-spec.K // plan.k_step)

    def launch(self, spec: PoolSpec, plan: OnePassPlan) -> Launch:
        blocks = -(-spec.H // plan.rows)
        if plan.direction == "backward":
            blocks *= self._chunks(spec, plan)
        return Launch(plan.threads, plan.items * self._item_bytes(spec, plan), plan.items, blocks)

    def _expected_registers(self, spec: PoolSpec, plan: OnePassPlan) -> int:
        words = spec.scalar_bytes // 4
        scoring = 2 * plan.thread_rows * plan.thread_columns + plan.thread_rows + plan.thread_columns
        if plan.direction == "forward":
            return _BASE + words * (scoring + 3 * plan.thread_rows)
        gathered = plan.thread_rows * (plan.k_step // plan.across)
        return _BASE + words * (8 * plan.thread_rows + gathered + max(scoring, gathered))

    def promises_no_spills(self, spec: PoolSpec, plan: OnePassPlan) -> bool:
        return False  # near its cap ptxas spills a few words for some dtypes, which no count here foretells

    def cost(self, spec: PoolSpec, plan: OnePassPlan, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over items that are not centred; tests hold it against the emulator's counters."""
        launch, chunks = self.launch(spec, plan), self._chunks(spec, plan)
        blocks, backward = launch.blocks(batch), plan.direction == "backward"
        tiles = -(-spec.H // plan.columns)
        steps = chunks * plan.k_step
        scores = plan.rows * plan.columns
        threads, warps = plan.item_threads, plan.item_threads / WARP
        # Lanes that take their turn where one thread serves a column, or a row: whole warps, or all of a small group.
        by_column, by_row, voters = (
            threads if threads < WARP else -(-served // WARP) * WARP
            for served in (plan.columns, plan.rows, min(spec.H, threads))
        )
        row_loads = (tiles if chunks > 1 else 1) + (1 if backward and chunks > 1 else 0)
        staged = (tiles * plan.columns + row_loads * plan.rows) * steps
        if backward and chunks > 1:
            staged += tiles * plan.columns * plan.k_step
        summed = tiles * by_column + (by_row if backward else 0)
        own, others = self._tile_passes(spec, plan)
        wide = spec.scalar_bytes // 4

        fma = tiles * scores * (steps + steps // 16) + spec.K * (4 * summed + 3 * voters)
        shared = tiles * steps * (own + others) + (staged + spec.K * summed) / WARP * wide
        lines = staged * self._lines_an_element(spec) + spec.K * voters / WARP * (1 + self._row_lines(spec))
        if backward:
            thread_steps = plan.k_step // plan.across
            fma += tiles * (scores * (plan.k_step + 12) + plan.rows * plan.k_step) + threads * plan.thread_rows * (
                3 * thread_steps + 2 * 5
            )
            mufu = 2 * tiles * scores
            # Gathering: G of its rows, and one element of a column for each of its steps.
            shared += tiles * plan.columns * (plan.thread_rows * warps * wide + thread_steps * warps * 2 * wide)
            shared += tiles * warps * (plan.thread_columns * 6 * wide + scores / threads * 4 * wide)
            barriers = 1 + 2 * chunks + tiles * (2 * chunks + 2 + (chunks > 1)) - (chunks == 1)
            state = 3 * spec.scalar_bytes - spec.element_bytes  # out is read as it was kept
        else:
            fma += tiles * scores * 6 + threads * plan.thread_rows * (3 * tiles + 10)
            mufu = tiles * (scores + threads * plan.thread_rows) + 2 * threads * plan.thread_rows
            shared += tiles * warps * 2 * plan.thread_columns * wide
            barriers = tiles * (2 * chunks + 1)
            state = 3 * spec.scalar_bytes
        traffic = spec.least_bytes(plan.direction, batch) + batch * spec.H * (state + spec.masked)
        return Cost(
            fma=round(blocks * plan.items * fma),
            fp64=spec.dtype == "float64",
            mufu=round(blocks * plan.items * mufu),
            dram_bytes=traffic + spec.scalar_bytes,
            scratch_bytes=0,
            shared_wavefronts=round(blocks * plan.items * shared),
            global_wavefronts=round(blocks * plan.items * lines),
            barriers=blocks * barriers,
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=blocks,
            registers=plan.registers,
        )

    @staticmethod
    def _tile_passes(spec: PoolSpec, plan: OnePassPlan) -> tuple[int, int]:
        """Shared-memory passes of all warps of a group for one step of the rows' tile, and of the columns'."""
        size = spec.scalar_bytes
        threads = range(plan.item_threads)
        warps = [threads[first : first + WARP] for first in range(0, len(threads), WARP)]
        rows = [[t // plan.across * plan.thread_rows * size for t in warp] for warp in warps]
        columns = [[t % plan.across * plan.thread_columns * size for t in warp] for warp in warps]
        passes = []
        for count, addresses in ((plan.thread_rows, rows), (plan.thread_columns, columns)):
            width = min(count, 16 // size)
            passes.append(sum(wavefronts(warp, width * size) for warp in addresses) * (count // width))
        return passes[0], passes[1]

    @staticmethod
    def _lines_an_element(spec: PoolSpec) -> float:
        """128-byte lines that staging touches for one element: its lanes walk down the rows."""
        if spec.layout == "bkh":
            return spec.element_bytes / 128
        width = 16 // spec.element_bytes
        while spec.K % width:
            width //= 2
        return 1 / width

    @staticmethod
    def _row_lines(spec: PoolSpec) -> int:
        """Lines that a warp touches when each lane reads an element of a row of its own."""
        stride = (spec.K if spec.layout == "bhk" else 1) * spec.element_bytes
        return min(WARP, -(-WARP * stride // 128))

    def context(self, spec: PoolSpec, plan: OnePassPlan) -> Mapping[str, Any]:
        return {
            "min_blocks": min_blocks(plan.threads, plan.registers),
            "item_bytes": self._item_bytes(spec, plan),
            **{name: value for name, value in plan.knobs.items() if name != "registers"},
        }


ALGORITHM: Final = OnePass()
