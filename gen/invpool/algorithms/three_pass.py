"""``three_pass``: thread h = row h, the attention map in DRAM. The rewrite of the hand-written ancestor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, get_args

from invpool.abi import Direction
from invpool.algorithms.base import REGISTERS_PER_SM, Algorithm, Launch, Plan, min_blocks
from invpool.cost import Cost
from invpool.gpu import DEFAULT_SHARED_BYTES, WARP, Gpu
from invpool.layout import SharedLayout, wavefronts
from invpool.spec import PoolSpec

SharedOrder = Literal["row", "padded", "transposed"]
_MAX_THREADS: Final = 1024
_LINE: Final = 128  # bytes of an L1 line
# Vectors of H scalars beside the staged item in backward: the means (then out), and g. Forward has the means.
_BACKWARD_VECTORS: Final = 2
_COLUMNS: Final = (1, 2, 4, 8)
_K_TILES: Final = (4, 8, 16, 32, 64)
_REGISTERS: Final = (64, 80, 104, 128, 168, 255)
# Registers beside the arrays that the plan sizes: addresses, counters, loads in flight. ptxas never
# needed more than _BASE + _COMFORT over the grid of tests/test_compile_matrix.py; between the two it
# may spill a few words, and below _BASE it spills in the inner loop.
_BASE: Final = 30
_COMFORT: Final = 58


@dataclasses.dataclass(frozen=True)
class ThreePassPlan(Plan):
    """Knobs of ``three_pass`` and ``recompute``.

    Attributes:
        shared_order: how the staged item lies in shared memory. ``transposed`` (step-major) needs no
            padding: threads of a warp hold neighbouring rows. ``padded`` is ``row`` with the fewest
            elements added to a row that make its threads' accesses free of bank conflicts.
        columns: variates a thread handles at once; one wide broadcast read serves several.
        k_tile: steps of a row that a thread keeps in registers: its own row forward (when all of
            it fits), its slice of dx backward.
        registers: registers a thread may have; fewer let more blocks share an SM.
    """

    shared_order: SharedOrder = "transposed"
    columns: int = 8
    k_tile: int = 32
    registers: int = 128


def _staged_strides(spec: PoolSpec, order: SharedOrder) -> tuple[int, int, int]:
    """(stride of h, stride of k, pad elements a row) of the staged item."""
    if order == "transposed":
        return 1, spec.H, 0
    if order == "row":
        return spec.K, 1, 0
    # The widest access that divides K; an odd number of such accesses a row walks through all banks.
    width = 16 // spec.scalar_bytes
    while spec.K % width:
        width //= 2
    stride = spec.K + (width if spec.K // width % 2 == 0 else 0)
    return stride, 1, stride - spec.K


def _pack_width(spec: PoolSpec, *counts: int) -> int:
    """The templates' pack_width: scalars that one access of at most 16 bytes moves."""
    width = 16 // spec.scalar_bytes
    while any(count % width for count in counts):
        width //= 2
    return width


def _warps(threads: int) -> list[int]:
    """Active lanes of each warp."""
    return [min(WARP, threads - first) for first in range(0, threads, WARP)]


@functools.lru_cache(maxsize=1024)
def _block_wavefronts(threads: int, stride: int, access_bytes: int) -> int:
    """Shared-memory passes of one access by each thread, ``stride`` bytes apart, summed over the warps."""
    return sum(wavefronts([t * stride for t in range(lanes)], access_bytes) for lanes in _warps(threads))


def _lines(threads: int, stride: int) -> int:
    """128-byte lines that the warps of ``threads`` touch together by one access each, ``stride`` bytes apart."""
    return sum(lanes if stride >= _LINE else -(-lanes * stride // _LINE) for lanes in _warps(threads))


def _row_lines(H: int, element_bytes: int) -> int:
    """128-byte lines of H*H elements when warps read one row after the other, neighbouring lanes neighbouring elements.

    Rows that are no whole lines start anywhere in one: on average, n bytes touch (n + line - step) / line of them.
    """
    step = math.gcd(H * element_bytes, _LINE)
    if step == _LINE:
        return H * _lines(H, element_bytes)
    return sum(H * (lanes * element_bytes + _LINE - step) // _LINE for lanes in _warps(H))


class ThreePass(Algorithm[ThreePassPlan]):
    name: ClassVar[str] = "three_pass"
    summary: ClassVar[str] = "one thread a row, means once at entry, attention map kept in DRAM"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "attn"
    plan_type = ThreePassPlan

    _keeps_means: ClassVar[bool] = True

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[ThreePassPlan]:
        space = self._space()
        for values in itertools.product(*space.values()):
            yield ThreePassPlan(direction, **dict(zip(space, values, strict=True)))

    @staticmethod
    def _space() -> dict[str, tuple[Any, ...]]:
        return {
            "shared_order": get_args(SharedOrder),
            "columns": _COLUMNS,
            "k_tile": _K_TILES,
            "registers": _REGISTERS,
        }

    def reject(self, spec: PoolSpec, plan: ThreePassPlan, gpu: Gpu) -> str | None:
        for name, legal in self._space().items():
            value = plan.knobs[name]
            if value not in legal:
                return f"{name} is {value!r}; legal: {', '.join(map(str, legal))}"
        if spec.H > _MAX_THREADS:
            return f"H is {spec.H}; {self.name} has one thread a row and a block has at most {_MAX_THREADS}"
        if plan.shared_order == "padded" and _staged_strides(spec, "padded")[2] == 0:
            return f"rows of {spec.K} steps need no padding; use shared_order=row"
        shared = self.layout(spec, plan).bytes
        if shared > gpu.shared_per_block:
            return (
                f"needs {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}; "
                f"{self._what_would_fit(spec, gpu)}"
            )
        threads = self.launch(spec, plan).threads
        if threads * plan.registers > gpu.registers_per_sm:
            return f"{threads} threads of {plan.registers} registers exceed the {gpu.registers_per_sm} of {gpu.name}"
        needed = self._expected_registers(spec, plan)
        if needed > plan.registers:
            return f"needs about {needed} registers a thread, the plan allows {plan.registers}; lower columns or k_tile"
        return None

    def _what_would_fit(self, spec: PoolSpec, gpu: Gpu) -> str:
        """The largest K at this H, and the largest H at this K, that fit unpadded in both directions."""
        room = gpu.shared_per_block // spec.scalar_bytes
        rows = _BACKWARD_VECTORS
        k_limit = max(0, room // spec.H - rows)
        h_limit = max(0, min(_MAX_THREADS, room // (spec.K + rows)))
        fits = [f"K <= {k_limit} at H={spec.H}"] if k_limit else []
        fits += [f"H <= {h_limit} at K={spec.K}"] if h_limit else []
        return f"{' or '.join(fits)} would fit" if fits else "nothing near this H and K would fit"

    def layout(self, spec: PoolSpec, plan: ThreePassPlan) -> SharedLayout:
        pad = _staged_strides(spec, plan.shared_order)[2]
        regions = [("X", spec.H * (spec.K + pad), spec.H * pad)]
        if plan.direction == "backward":
            regions += [("MeanOrOut", spec.H, 0), ("G", spec.H, 0)]
        elif self._keeps_means:
            regions += [("Mean", spec.H, 0)]
        return SharedLayout.pack(spec.scalar_bytes, regions)

    def launch(self, spec: PoolSpec, plan: ThreePassPlan) -> Launch:
        return Launch(-(-spec.H // WARP) * WARP, self.layout(spec, plan).bytes)

    def _expected_registers(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        words = spec.scalar_bytes // 4
        if plan.direction == "forward":
            arrays = (spec.K if spec.K <= plan.k_tile else 0) + 2 * plan.columns
        else:
            arrays = 2 * min(spec.K, plan.k_tile) + 2 * plan.columns
        return _BASE + words * arrays

    def promises_no_spills(self, spec: PoolSpec, plan: ThreePassPlan) -> bool:
        return self._expected_registers(spec, plan) + _COMFORT <= self._register_cap(spec, plan)

    def _register_cap(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        """What ptxas makes of the launch bounds: whole eights, and no more than 255."""
        blocks = self._min_blocks(spec, plan)
        return min(255, REGISTERS_PER_SM // (blocks * self.launch(spec, plan).threads) // 8 * 8)

    def _min_blocks(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        """Resident blocks that ptxas is told to make room for, so that a thread gets ``plan.registers``.

        Left alone it follows its own taste: 72 registers and a spill for 128 threads.
        """
        threads = self.launch(spec, plan).threads
        return min_blocks(threads, plan.registers)

    def access_wavefronts(self, spec: PoolSpec, plan: ThreePassPlan) -> dict[str, int]:
        """Shared-memory passes of the first warp's scalar accesses: 1 is free of conflicts.

        ``own``: each thread its own row, as in staging; ``broadcast``: all threads the same element.
        """
        stride_h = _staged_strides(spec, plan.shared_order)[0]
        own = [h * stride_h * spec.scalar_bytes for h in range(min(WARP, spec.H))]
        return {
            "own": wavefronts(own, spec.scalar_bytes),
            "broadcast": wavefronts([0] * len(own), spec.scalar_bytes),
        }

    def _mean_operations(self, spec: PoolSpec) -> int:
        """Operations that forming the mean adds to one (row, column) pair that uses it."""
        return 0

    def _sweep(self, spec: PoolSpec, plan: ThreePassPlan) -> tuple[int, int, int]:
        """(groups, accesses to H scalars side by side, scalars a wide access moves) of one sweep over the variates."""
        groups, rest = divmod(spec.H, plan.columns)
        width = _pack_width(spec, plan.columns, spec.H)
        return groups + rest, groups * plan.columns // width + rest, width

    def _broadcasts(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        """Shared-memory passes that the warps need to read the staged item once, the same element in all lanes."""

        def passes(width: int) -> int:
            # Broadcasts of 16 bytes count two passes each (ncu, H200: 16768 an item forward, 17152 backward).
            return _block_wavefronts(spec.H, 0, width * spec.scalar_bytes)

        H, K = spec.H, spec.K
        if plan.shared_order == "transposed":
            width = self._sweep(spec, plan)[2]
            groups, rest = divmod(H, plan.columns)
            return K * (groups * plan.columns // width * passes(width) + rest)
        stride = _staged_strides(spec, plan.shared_order)[0]
        tail = K % plan.k_tile
        parts = [(K, K)] if plan.direction == "forward" else [(K - tail, plan.k_tile), (tail, tail)]
        total = 0
        for steps, unit in parts:
            if steps:
                width = _pack_width(spec, unit, stride)
                if plan.direction == "backward":
                    width = min(width, _pack_width(spec, plan.k_tile))
                total += H * steps // width * passes(width)
        return total

    def _barriers(self, plan: ThreePassPlan, tiles: int) -> int:
        """Block barriers of one item: the vote on the centre, then one for each change of hands of shared memory."""
        if plan.direction == "forward":
            return 2
        return 4 * tiles if self._keeps_means else 3

    def cost(self, spec: PoolSpec, plan: ThreePassPlan, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over items that are not centred; tests hold it against the emulator's counters."""
        launch = self.launch(spec, plan)
        H, K = spec.H, spec.K
        pairs = launch.threads * H  # idle lanes of the last warp take their turn too
        warps = launch.threads // WARP
        stride_h = _staged_strides(spec, plan.shared_order)[0] * spec.scalar_bytes
        own = _block_wavefronts(H, stride_h, spec.scalar_bytes)
        tiles = -(-K // plan.k_tile)
        groups, row_accesses, _ = self._sweep(spec, plan)
        mean = self._mean_operations(spec)
        mean_reads = K if mean else 1
        scratch = batch * H * H * spec.scalar_bytes
        # Threads that walk down their own rows of the scratch touch a line each; so they do in x, variate-major.
        row_walk = row_accesses * _lines(H, H * spec.scalar_bytes)
        input_lines = _lines(H, (K if spec.layout == "bhk" else 1) * spec.element_bytes)
        load_width = 16 // spec.element_bytes if spec.layout == "bhk" and K * spec.element_bytes % 16 == 0 else 1
        # Staging: a compensated sum, |x - c|^2 and |x|^2 by thread; c is a broadcast.
        lines = K // load_width * input_lines + warps * K
        if plan.direction == "forward":
            # Two sweeps of scores, then softmax and pooling: 5 operations a pair. Own elements get c back.
            own_reads = K if K <= plan.k_tile else 2 * groups * K
            fma = pairs * (2 * K + 5 + mean) + launch.threads * (7 * K + own_reads)
            shared = 2 * self._broadcasts(spec, plan) + (K + own_reads) * own + warps * H * mean_reads
            # The scratch is written, read back and written again.
            passes, mufu = 3, pairs + launch.threads
            lines += 3 * row_walk
            state = (spec.scalar_bytes + (spec.scalar_bytes if spec.keeps_out_acc else 0)) * H
            least = spec.least_bytes("forward", batch)
        else:
            # Row and column of dS: K multiply-adds each, and 8 operations a pair and tile.
            fma = pairs * (2 * K + tiles * (8 + mean)) + launch.threads * 9 * K
            shared = 2 * self._broadcasts(spec, plan) + K * own + warps * tiles * H * (2 + mean_reads)
            # Row and column of the scratch are read once a tile.
            passes, mufu = 2 * tiles, 0
            lines += K * input_lines + tiles * (row_walk + _row_lines(H, spec.scalar_bytes))
            # out is read as it was before it was rounded, and lse not at all.
            state = (spec.scalar_bytes - spec.element_bytes) * H
            least = spec.least_bytes("backward", batch)
        mask = batch * H if spec.masked else 0
        return Cost(
            fma=batch * fma,
            fp64=spec.dtype == "float64",
            mufu=batch * mufu,
            dram_bytes=least + batch * state + mask + spec.scalar_bytes + passes * scratch,
            scratch_bytes=scratch,
            shared_wavefronts=batch * shared,
            global_wavefronts=batch * lines,
            barriers=batch * self._barriers(plan, tiles),
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=batch,
            registers=self._register_cap(spec, plan),
        )

    def context(self, spec: PoolSpec, plan: ThreePassPlan) -> Mapping[str, Any]:
        stride_h, stride_k, _ = _staged_strides(spec, plan.shared_order)
        return {
            "shared_order": plan.shared_order,
            "staged_stride_h": stride_h,
            "staged_stride_k": stride_k,
            "takes_part": "h < kH && mask_item[h] != 0" if spec.masked else "true",
            "first_variate": "first_taking_part(mask_item)" if spec.masked else "0",
            "has_out_acc": "out_acc" in self.state(spec),
            "min_blocks": self._min_blocks(spec, plan),
            "columns": plan.columns,
            "k_tile": plan.k_tile,
        }

    def needs_opt_in(self, spec: PoolSpec, plan: ThreePassPlan) -> bool:
        """Whether a block asks for more shared memory than every GPU grants by default."""
        return self.layout(spec, plan).bytes > DEFAULT_SHARED_BYTES


ALGORITHM: Final = ThreePass()
