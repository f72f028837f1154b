"""What a plan does, counted, and how long that takes at best on a given GPU.

The counts are per launch, over the whole batch. They foretell the order of plans and what bounds
each of them, not the time on a stop-watch: the sweep measures.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from invpool.gpu import WARP, Gpu

# What a launch takes beside its work, L2 cold, in seconds: an H200 takes 2.1 to 2.9 us for an empty kernel; the rest
# goes by before the first bytes are there from DRAM.
_LAUNCH: Final = 5.5e-6
# Of an SM, each of which issues one warp instruction a clock.
SCHEDULERS: Final = 4


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work of one launch.

    Attributes:
        fma: multiply-add-class operations (one each for FMA, ADD, MUL), of the scalar type.
        fp64: whether those run on the float64 lanes.
        mufu: transcendental operations.
        dram_bytes: bytes that must cross DRAM, scratch included.
        scratch_bytes: DRAM that the plan needs beyond x, out, lse, g and dx.
        shared_wavefronts: passes of shared memory (128 bytes each).
        global_wavefronts: passes of global accesses through L1: one for each 128-byte line that a warp
            instruction touches, so a warp whose threads walk down their own rows pays 32.
        shared_bytes: dynamic shared memory of one block.
        threads: threads of one block.
        blocks: blocks of the launch.
        registers: expected registers a thread.
        tensor: multiply-adds of fp16 numbers by tensor cores, each as many as the unit's best instruction does in
            the same time.
        issue: warp instructions; 0 where the algorithm does not count them.
        overlap: the share of its units' work that a kernel hides behind the unit that is busiest: 1 where the others
            cost nothing, 0 where they add up.
        slower: how many times longer the units take than their counts say, for want of warps or registers.
        exposed_bytes: DRAM bytes that a block waits for with nothing else to do.
        barriers: block barriers that the blocks go through; None where the algorithm does not count them.
        tasks: what the blocks of a persistent kernel loop over; None: one a block.
    """

    fma: int
    fp64: bool
    mufu: int
    dram_bytes: int
    scratch_bytes: int
    shared_wavefronts: int
    global_wavefronts: int
    shared_bytes: int
    threads: int
    blocks: int
    registers: int
    tensor: int = 0
    issue: int = 0
    overlap: float = 1.0
    slower: float = 1.0
    exposed_bytes: int = 0
    barriers: int | None = None
    tasks: int | None = None

    def occupancy(self, gpu: Gpu) -> float:
        """Resident threads over the most an SM can hold."""
        resident = gpu.blocks_per_sm(self.threads, self.shared_bytes, self.registers)
        return resident * self.threads / gpu.threads_per_sm

    def terms(self, gpu: Gpu) -> dict[str, float]:
        """Seconds that each unit needs when the launch fills the GPU as far as it can."""
        resident = max(1, gpu.blocks_per_sm(self.threads, self.shared_bytes, self.registers))
        waves = -(-self.blocks // gpu.wave(self.threads, self.shared_bytes, self.registers))
        # A last wave that is not full leaves SMs idle: the busiest SM sets the pace.
        busiest = max(1, min(resident, -(-self.blocks // gpu.sm_count))) if waves <= 1 else waves * resident
        # So does a last round of a persistent kernel that has not a task for every block.
        tasks = self.blocks if self.tasks is None else self.tasks
        rounds = -(-tasks // self.blocks) if self.blocks else 0
        share = busiest * rounds / tasks if tasks else 0.0
        # Fewer than one warp a scheduler cannot keep the pipes busy.
        warps = min(busiest, resident) * self.threads / WARP
        hiding = min(1.0, warps / 4) / self.slower
        lanes = gpu.fp64_lanes if self.fp64 else gpu.fp32_lanes
        mufu_lanes = gpu.fp64_lanes / 16 if self.fp64 else gpu.mufu_lanes
        units = {
            "fma": self.fma * share / (lanes * gpu.clock * hiding),
            "mufu": self.mufu * share / (mufu_lanes * gpu.clock * hiding),
            "lsu": (self.shared_wavefronts + self.global_wavefronts) * share / (gpu.clock * hiding),
            "tensor": self.tensor * share / (gpu.tensor_lanes * gpu.clock * hiding),
            "issue": self.issue * share / (SCHEDULERS * gpu.clock * hiding),
        }
        counted = {name: time for name, time in units.items() if time or name not in ("tensor", "issue")}
        return counted | {"dram": self.dram_bytes / gpu.dram}

    def seconds(self, gpu: Gpu) -> float:
        """Predicted time of one launch."""
        terms = self.terms(gpu)
        memory = terms.pop("dram")
        busiest = max(terms.values())
        units = busiest + (1 - self.overlap) * (sum(terms.values()) - busiest)
        return _LAUNCH + max(units + self.exposed_bytes / gpu.dram, memory)

    def bound(self, gpu: Gpu) -> str:
        """Which unit sets the time: fma, mufu, lsu (loads and stores), tensor, issue, dram or launch."""
        name, value = max(self.terms(gpu).items(), key=lambda term: term[1])
        return name if value > _LAUNCH else "launch"
