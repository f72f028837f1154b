"""``three_pass``: thread h = row h, the attention map in DRAM. The rewrite of the hand-written ancestor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, get_args

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan
from invpool.cost import Cost
from invpool.gpu import DEFAULT_SHARED_BYTES, WARP, Gpu
from invpool.layout import SharedLayout, wavefronts
from invpool.spec import PoolSpec

SharedOrder = Literal["row", "padded", "transposed"]
_MAX_THREADS: Final = 1024
# Vectors of H scalars beside the staged item in backward: the means (then out), and g. Forward has the means.
_BACKWARD_VECTORS: Final = 2
_COLUMNS: Final = (1, 2, 4, 8)
_K_TILES: Final = (8, 16, 32, 64)
_REGISTERS: Final = (64, 80, 104, 128, 168, 255)
# Registers beside the arrays that the plan sizes: addresses, counters, loads in flight. ptxas never
# needed more than _BASE + _COMFORT over the grid of tests/test_compile_matrix.py; between the two it
# may spill a few words, and below _BASE it spills in the inner loop.
_BASE: Final = 30
_COMFORT: Final = 44
# The same on every supported GPU; and the fewest resident threads and blocks that any of them allows (sm_75).
_REGISTERS_PER_SM: Final = 65536
_FEWEST_THREADS_PER_SM: Final = 1024
_FEWEST_BLOCKS_PER_SM: Final = 16


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
            arrays = min(spec.K, plan.k_tile) + 2 * plan.columns
        return _BASE + words * arrays

    def promises_no_spills(self, spec: PoolSpec, plan: ThreePassPlan) -> bool:
        return self._expected_registers(spec, plan) + _COMFORT <= self._register_cap(spec, plan)

    def _register_cap(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        """What ptxas makes of the launch bounds: whole eights, and no more than 255."""
        blocks = self._min_blocks(spec, plan)
        return min(255, _REGISTERS_PER_SM // (blocks * self.launch(spec, plan).threads) // 8 * 8)

    def _min_blocks(self, spec: PoolSpec, plan: ThreePassPlan) -> int:
        """Resident blocks that ptxas is told to make room for, so that a thread gets ``plan.registers``.

        Left alone it follows its own taste: 72 registers and a spill for 128 threads.
        """
        threads = self.launch(spec, plan).threads
        by_registers = _REGISTERS_PER_SM // (threads * plan.registers)
        return max(1, min(by_registers, _FEWEST_THREADS_PER_SM // threads, _FEWEST_BLOCKS_PER_SM))

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

    def cost(self, spec: PoolSpec, plan: ThreePassPlan, gpu: Gpu, batch: int) -> Cost:
        launch = self.launch(spec, plan)
        H, K, order = spec.H, spec.K, plan.shared_order
        pairs = launch.threads * H  # idle lanes of the last warp take their turn too
        warps = launch.threads // WARP
        own = self.access_wavefronts(spec, plan)["own"]
        tiles = -(-K // plan.k_tile)
        stride_h = _staged_strides(spec, order)[0]
        by_step = _pack_width(spec, plan.columns, H) if order == "transposed" else _pack_width(spec, K, stride_h)
        # Broadcasts of 16 bytes count two passes each (ncu, H200: 16768 an item forward, 17152 backward).
        passes_each = 2 if by_step * spec.scalar_bytes == 16 else 1
        staging = warps * K * own
        mean = self._mean_operations(spec)
        scratch = batch * H * H * spec.scalar_bytes
        # A warp whose threads walk down their own rows of the scratch, or of x, touches 32 lines an access.
        row_walk = warps * H // _pack_width(spec, plan.columns, H) * WARP
        input_walk = warps * K * (WARP if spec.layout == "bhk" else 1)
        load_width = 16 // spec.element_bytes if spec.layout == "bhk" and K * spec.element_bytes % 16 == 0 else 1
        if plan.direction == "forward":
            # Two sweeps of scores, then softmax and pooling: about 8 operations a pair.
            fma = pairs * (2 * K + 8 + mean)
            groups = -(-H // plan.columns)
            own_reads = 0 if K <= plan.k_tile else 2 * groups * K * own
            shared = staging + warps * (2 * H * K * passes_each // by_step + own_reads + H * (mean // 4))
            # The scratch is written, read back and written again.
            passes, mufu = 3, pairs
            lines = input_walk // load_width + 3 * row_walk
        else:
            # Row and column of dS, each K multiply-adds and about 4 operations a pair and tile.
            fma = pairs * (2 * K + tiles * (8 + mean))
            by_step = min(by_step, _pack_width(spec, plan.k_tile)) if order != "transposed" else by_step
            shared = staging + warps * (2 * H * K * passes_each // by_step + tiles * H * (3 + mean // 4))
            # Row and column of the scratch are read once a tile.
            passes, mufu = 2 * tiles, 0
            lines = input_walk // load_width + input_walk + tiles * (row_walk + warps * H)
        state = batch * H * spec.scalar_bytes * (2 if spec.keeps_out_acc else 1)
        return Cost(
            fma=batch * (fma + 4 * launch.threads * K),
            fp64=spec.dtype == "float64",
            mufu=batch * mufu,
            dram_bytes=spec.least_bytes(plan.direction, batch) + state + passes * scratch,
            scratch_bytes=scratch,
            shared_wavefronts=batch * shared,
            global_wavefronts=batch * lines,
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
