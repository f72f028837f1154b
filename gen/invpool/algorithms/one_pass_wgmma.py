"""``one_pass_wgmma``: one_pass_mma's scores by Hopper's warpgroup products; sm_90a."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import Algorithm, Launch, Plan, min_blocks
from invpool.algorithms.one_pass_mma import OnePassMma, MmaPlan, padded, staging_lanes
from invpool.cost import Cost
from invpool.gpu import Gpu
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec

_GROUPS: Final = (1, 2, 3, 4)
_REGISTERS: Final = (96, 128, 168)
_STRIP: Final = 64
_GROUP: Final = 128
_MOST_STEPS: Final = 128


@dataclasses.dataclass(frozen=True)
class WgmmaPlan(Plan):
    """Knobs of ``one_pass_wgmma``.

    Attributes:
        groups: warpgroups of a block, which share the strips of an item.
        prefetch: whether an item is fetched while the one before it is computed.
        registers: registers a thread may have; fewer let more blocks share an SM.
        most_blocks: blocks of a launch at most, each of which goes from item to item; set for the GPU.
    """

    groups: int = 1
    prefetch: bool = True
    registers: int = 128
    most_blocks: int | None = None


class OnePassWgmma(Algorithm[WgmmaPlan]):
    name: ClassVar[str] = "one_pass_wgmma"
    summary: ClassVar[str] = "one_pass_mma by warpgroups: columns from shared memory, items by bulk copies; sm_90a"
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = "lse_low"
    always_keeps_out_acc: ClassVar[bool] = True
    oldest_arch: ClassVar[str] = "sm_90"
    plan_type = WgmmaPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[WgmmaPlan]:
        for knobs in itertools.product(_GROUPS, (True, False), _REGISTERS):
            yield WgmmaPlan(direction, *knobs)

    def fitted(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu) -> WgmmaPlan:
        launch = self.launch(spec, plan)
        return dataclasses.replace(
            plan, most_blocks=gpu.wave(launch.threads, launch.shared_bytes, plan.registers)
        )

    def arch_target(self, arch: str) -> str:
        return f"{arch}a"

    def reject(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu) -> str | None:
        if spec.dtype == "float64":
            return "tensor cores here multiply fp16 numbers, of which two make a float32; float64 wants another algorithm"
        if gpu.arch != "sm_90":
            return f"needs sm_90, whose warpgroup products no other architecture has; {gpu.name} is {gpu.arch}"
        if plan.groups > self.strips(spec):
            return f"{plan.groups} warpgroups for {self.strips(spec)} strips of {_STRIP} rows; lower groups"
        if spec.K > _MOST_STEPS:
            return f"K is {spec.K}; a strip's operand of more than {_MOST_STEPS} steps does not fit registers"
        shared = self.launch(spec, plan).shared_bytes
        if shared > gpu.shared_per_block:
            return f"needs {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}"
        return None

    @staticmethod
    def strips(spec: PoolSpec) -> int:
        return -(-spec.H // _STRIP)

    def _two(self, spec: PoolSpec, plan: WgmmaPlan) -> bool:
        """Whether a warpgroup has two strips, whose one pair of each other is formed once."""
        return self.strips(spec) == 2 and plan.groups == 1

    def layout(self, spec: PoolSpec, plan: WgmmaPlan) -> SharedLayout:
        rows, steps, parts = _STRIP * self.strips(spec), padded(spec.K), OnePassMma.parts(spec)
        warps, two = 4 * plan.groups, self._two(spec, plan)
        regions = [("Planes", parts * rows * steps // 2, 0)]
        if plan.direction == "forward":
            # Partial sums of columns: of the one pair of two strips by rows of lanes, else by warps.
            partials = 32 * (_STRIP + 8) if two else rows * warps
            regions += [("Weights", 2 * rows, 0), ("Sums", 4 * (rows + 8), 0), ("Partials", 2 * partials, 0)]
        else:
            regions += [(name, rows, 0) for name in ("Gain", "Pooled", "Lse", "Low")]
            if two:
                regions += [("Pulled", _STRIP * warps, 0), ("Exchange", parts * _STRIP * (2 * _STRIP + 16) // 4, 0)]
        regions += [("Mean", rows, 0), ("Offset", rows, 0), ("Room", warps, 0), ("Agreed", 4 * warps, 0)]
        if plan.prefetch:
            regions += [("Fetched", -(-spec.H * spec.K * spec.element_bytes // 16) * 4, 0), ("Barrier", 4, 0)]
        return SharedLayout.pack(4, regions)

    def launch(self, spec: PoolSpec, plan: WgmmaPlan) -> Launch:
        return Launch(_GROUP * plan.groups, padded(self.layout(spec, plan).bytes), 1, 1, plan.most_blocks)

    def promises_no_spills(self, spec: PoolSpec, plan: WgmmaPlan) -> bool:
        return False

    def cost(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu, batch: int) -> Cost:
        launch = self.launch(spec, plan)
        scores = spec.H * spec.H / 2
        return Cost(
            fma=round(batch * (scores * 7 + spec.H * spec.K * 8)),
            fp64=False,
            mufu=round(batch * scores),
            dram_bytes=spec.least_bytes(plan.direction, batch) + batch * spec.H * 12,
            scratch_bytes=0,
            shared_wavefronts=0,
            global_wavefronts=0,
            shared_bytes=launch.shared_bytes,
            threads=launch.threads,
            blocks=launch.blocks(batch),
            registers=plan.registers,
            tasks=launch.tasks(batch),
        )

    def context(self, spec: PoolSpec, plan: WgmmaPlan) -> Mapping[str, Any]:
        threads = _GROUP * plan.groups
        return {
            "min_blocks": min_blocks(threads, plan.registers),
            "item_bytes": self.launch(spec, plan).shared_bytes,
            "parts": OnePassMma.parts(spec),
            "strips": self.strips(spec),
            "two": self._two(spec, plan),
            "prefetch": plan.prefetch,
            "stage_lanes": staging_lanes(spec, threads, plan.prefetch),
        }


ALGORITHM: Final = OnePassWgmma()
