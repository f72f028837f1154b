"""``one_pass_wgmma``: one_pass_mma's scores by Hopper's warpgroup products; sm_90a."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from invpool.abi import Direction
from invpool.algorithms.base import REGISTERS_PER_SM, Algorithm, Launch, Plan, min_blocks
from invpool.algorithms.tensor_cores import MMA_SHARE, Work, padded, parts_of, reject_spec, staging_lanes, staging_work
from invpool.cost import Cost
from invpool.gpu import WARP, Gpu
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec

_GROUPS: Final = (1, 2, 3, 4)
_REGISTERS: Final = (168, 128, 96, 80)
_MOST_REGISTERS: Final = 255
_STRIP: Final = 64
_GROUP: Final = 128
_MOST_STEPS: Final = 128
# What registers that are moved to and fro cost, by their share: measured on an H200.
_SPILL: Final = 0.25
_HEAVY_SPILL: Final = 1.2
# Warps of an SM below which it idles, likewise.
_ENOUGH_WARPS: Final = 12
# Columns of a product.
_WIDTHS: Final = (16, 32, 64)


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
    only_oldest: ClassVar[bool] = True
    plan_type = WgmmaPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[WgmmaPlan]:
        for knobs in itertools.product(_GROUPS, (True, False), _REGISTERS):
            yield WgmmaPlan(direction, *knobs)

    def fitted(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu) -> WgmmaPlan:
        launch = self.launch(spec, plan)
        return dataclasses.replace(plan, most_blocks=gpu.wave(launch.threads, launch.shared_bytes, plan.registers))

    def reject(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu) -> str | None:
        obstacle = reject_spec(self, spec, gpu)
        if obstacle:
            return obstacle
        for name, legal in (("groups", _GROUPS), ("registers", _REGISTERS), ("prefetch", (True, False))):
            value = plan.knobs[name]
            if value not in legal or isinstance(value, bool) != (name == "prefetch"):
                return f"{name} is {value!r}; legal: {', '.join(map(str, sorted(legal)))}"
        if plan.most_blocks is not None and plan.most_blocks < 1:
            return f"most_blocks is {plan.most_blocks}; it must be at least 1"
        if plan.groups > self.strips(spec):
            return f"{plan.groups} warpgroups for {self.strips(spec)} strips of {_STRIP} rows; lower groups"
        threads = _GROUP * plan.groups
        if plan.registers * threads > gpu.registers_per_sm:
            return f"{plan.registers} registers for {threads} threads; lower registers or groups"
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

    def _rounded(self, spec: PoolSpec, plan: WgmmaPlan) -> bool:
        """Whether forward rounds weights to bf16 and pools them by products (templates/include/rounded_weights.cuh)."""
        return plan.direction == "forward" and spec.dtype == "bfloat16" and self._two(spec, plan)

    def layout(self, spec: PoolSpec, plan: WgmmaPlan) -> SharedLayout:
        rows, steps, parts = _STRIP * self.strips(spec), padded(spec.K), parts_of(spec)
        warps, two = 4 * plan.groups, self._two(spec, plan)
        regions = [("Planes", parts * rows * steps // 2, 0)]
        if self._rounded(spec, plan):
            regions += [("Factors", 2 * (rows + 16), 0), ("Sums", 2 * rows, 0), ("Partials", 8 * (rows + _STRIP), 0)]
        elif plan.direction == "forward":
            # Partial sums of columns: of the one pair of two strips by rows of lanes, else by warps.
            partials = 32 * (_STRIP + 8) if two else rows * warps
            regions += [("Weights", 2 * rows, 0), ("Sums", 4 * (rows + 8), 0), ("Partials", 2 * partials, 0)]
        else:
            regions += [(name, rows, 0) for name in ("Gain", "Pooled", "Lse", "Low")]
            if two:
                regions += [("Pulled", _STRIP * warps, 0), ("Exchange", parts * _STRIP * (2 * _STRIP + 16) // 4, 0)]
        regions += [
            ("Mean", rows, 0),
            ("Offset", rows, 0),
            ("Units", rows, 0),
            ("Room", warps, 0),
            ("Agreed", 4 * warps, 0),
        ]
        if plan.prefetch:
            regions += [("Fetched", -(-spec.H * spec.K * spec.element_bytes // 16) * 4, 0), ("Barrier", 4, 0)]
        return SharedLayout.pack(4, regions)

    def launch(self, spec: PoolSpec, plan: WgmmaPlan) -> Launch:
        return Launch(_GROUP * plan.groups, padded(self.layout(spec, plan).bytes), 1, 1, plan.most_blocks)

    def _wanted_registers(self, spec: PoolSpec, plan: WgmmaPlan) -> int:
        """Registers of a thread that spills nothing, roughly: operand, tile, and backward G and its sums."""
        parts, steps = parts_of(spec), padded(spec.K) // 16
        pieces = 16 * parts * (2 if self._two(spec, plan) else 1)
        backward = 4 + pieces + 8 * steps if plan.direction == "backward" else 0
        return 92 + 4 * parts * steps + backward

    def promises_no_spills(self, spec: PoolSpec, plan: WgmmaPlan) -> bool:
        return False

    def cost(self, spec: PoolSpec, plan: WgmmaPlan, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over plain items: bytes exact, the rest counted from the machine code of a few plans."""
        parts, steps, strips = parts_of(spec), padded(spec.K) // 16, self.strips(spec)
        products, two = 2 * parts - 1, self._two(spec, plan)
        last = next(width for width in _WIDTHS if width >= spec.H - _STRIP * (strips - 1))
        columns = _STRIP * (strips - 1) + last
        # Columns that a strip's rows meet: its own and others', once for both where a pair is formed but once.
        whole = plan.direction == "backward" and not two
        own = columns * strips if whole else columns
        other = 0 if whole else sum(_STRIP * (strips - 1 - strip) + last for strip in range(strips)) - columns
        formed, scores = own + other, _STRIP * (own + other)
        work = staging_work(spec, parts, plan.prefetch) + Work(
            tensor=products * 16 * steps * scores,
            issue=4 * (2 * products * steps * formed / _STRIP + 60 * strips),
            wavefronts=formed * (products * steps / 4 + 1) + 4 * strips * parts * steps * 4,
        )
        if self._rounded(spec, plan):
            # Of each strip's blocks of 16, those on and above the diagonal; and the pair of strips.
            across = last // 16
            blocks, once = 10 + across * (across + 1) // 2 + 4 * across, 4 + across
            mirrored = blocks - once
            work += Work(
                fma=64 * mirrored + 2 * spec.H,
                mufu=256 * blocks,
                tensor=16 * 8 * 16 * (blocks + mirrored) / MMA_SHARE,
                issue=24 * blocks + 16 * mirrored + 600,
                wavefronts=100 + 2 * blocks + 2 * mirrored,
            )
        elif plan.direction == "forward":
            shared = (6 if two else 9) * _STRIP * other
            work += Work(fma=2 * scores + 2 * _STRIP * other, mufu=scores, issue=(3.3 * _STRIP * own + shared) / WARP)
            work += Work(issue=4 * plan.groups * 150, wavefronts=100 + other * 3)
        else:
            gathered = own + 2 * other
            work += Work(
                fma=(7 + 2 * parts) * scores,
                mufu=scores,
                tensor=products * 16 * steps * _STRIP * gathered,
                issue=((6.5 + 1.5 * parts) * scores + 4.5 * _STRIP * other) / WARP + products * gathered / 4,
                wavefronts=gathered * products * steps / 4 + 1.5 * formed + 4 * other * parts,
            )
            work += Work(issue=4 * (plan.groups * 200 + strips * (30 + 13 * steps)), wavefronts=150)
        # What does not fit the registers that a thread gets is moved to and fro.
        threads = _GROUP * plan.groups
        given = min(_MOST_REGISTERS, REGISTERS_PER_SM // (threads * min_blocks(threads, plan.registers)))
        spilled = max(0, self._wanted_registers(spec, plan) - given) / given
        slower = 1 + _SPILL * spilled + _HEAVY_SPILL * max(0.0, spilled - 0.2)
        # Warps of a group wait for each other: it takes more of them to hide that.
        resident = max(1, gpu.blocks_per_sm(threads, self.launch(spec, plan).shared_bytes, plan.registers))
        slower *= max(1.0, _ENOUGH_WARPS * WARP / (resident * threads))
        return work.cost(self, spec, plan, gpu, batch, exposed=not plan.prefetch, slower=slower)

    def context(self, spec: PoolSpec, plan: WgmmaPlan) -> Mapping[str, Any]:
        threads = _GROUP * plan.groups
        return {
            "min_blocks": min_blocks(threads, plan.registers),
            "item_bytes": self.launch(spec, plan).shared_bytes,
            "parts": parts_of(spec),
            "strips": self.strips(spec),
            "two": self._two(spec, plan),
            "rounded_weights": self._rounded(spec, plan),
            "prefetch": plan.prefetch,
            "stage_lanes": staging_lanes(spec, threads, plan.prefetch),
        }


ALGORITHM: Final = OnePassWgmma()
