"""What every algorithm is made of: a plan, one legality predicate, a layout, a cost, a template context."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from invpool.abi import Direction
from invpool.cost import Cost
from invpool.gpu import Gpu, arch_number
from invpool.layout import SharedLayout
from invpool.spec import PoolSpec


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one direction of a spec is computed. Subclasses add the knobs; their defaults are valid somewhere."""

    direction: Direction

    @property
    def knobs(self) -> dict[str, Any]:
        """The plan parameters by name, without the direction."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.knobs.items())


@dataclasses.dataclass(frozen=True)
class Launch:
    """The grid lies on x and has one block a task, of which there are ceil(B / items_per_block) * blocks_per_item.

    Attributes:
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        items_per_block: items of one task.
        blocks_per_item: tasks of so many items.
        most_blocks: a persistent kernel: its blocks loop over the tasks, and no more of them than this are launched;
            None: one block a task.
    """

    threads: int
    shared_bytes: int
    items_per_block: int = 1
    blocks_per_item: int = 1
    most_blocks: int | None = None

    def tasks(self, batch: int) -> int:
        """What the blocks of a launch over ``batch`` items share among themselves."""
        return -(-batch // self.items_per_block) * self.blocks_per_item

    def blocks(self, batch: int) -> int:
        """Blocks of a launch over ``batch`` items; the run time has the same rule."""
        tasks = self.tasks(batch)
        return tasks if self.most_blocks is None else min(tasks, self.most_blocks)

    @property
    def grid_text(self) -> str:
        """The grid as a formula of B."""
        items = "B" if self.items_per_block == 1 else f"ceil(B / {self.items_per_block})"
        tasks = items if self.blocks_per_item == 1 else f"{items} * {self.blocks_per_item}"
        return tasks if self.most_blocks is None else f"min({tasks}, {self.most_blocks})"


# The same on every supported GPU; and the fewest resident threads and blocks that any of them allows (sm_75).
REGISTERS_PER_SM: Final = 65536
_FEWEST_THREADS_PER_SM: Final = 1024
_FEWEST_BLOCKS_PER_SM: Final = 16


def min_blocks(threads: int, registers: int) -> int:
    """Resident blocks that ptxas is told to make room for, so that a thread gets that many registers."""
    by_registers = REGISTERS_PER_SM // (threads * registers)
    return max(1, min(by_registers, _FEWEST_THREADS_PER_SM // threads, _FEWEST_BLOCKS_PER_SM))


P = TypeVar("P", bound=Plan)


class Algorithm(ABC, Generic[P]):
    """One way to compute the operation: this module and one template pair ``<name>/{forward,backward}.cu.j2``."""

    name: ClassVar[str]
    summary: ClassVar[str]
    # What forward leaves for backward beside out and lse: the attention map, the low part of lse, or nothing.
    extra_state: ClassVar[Literal["attn", "lse_low"] | None] = None
    # Whether out is kept unrounded for every dtype, not only for those of 16 bits.
    always_keeps_out_acc: ClassVar[bool] = False
    # The oldest architecture that has what the templates use. PTX is made for it: any newer GPU's driver can finish it.
    oldest_arch: ClassVar[str] = "sm_75"
    # Whether the templates use what this architecture alone has: there is no code, and no PTX, for newer ones then.
    only_oldest: ClassVar[bool] = False
    plan_type: type[P]

    def state(self, spec: PoolSpec) -> tuple[str, ...]:
        """What forward writes beside ``out`` and backward reads again, in ABI order."""
        out_acc = ("out_acc",) if spec.keeps_out_acc or self.always_keeps_out_acc else ()
        return (*out_acc, "lse", *((self.extra_state,) if self.extra_state else ()))

    @abstractmethod
    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[P]:
        """The whole plan space, legal or not; :meth:`reject` says which are."""

    def fitted(self, spec: PoolSpec, plan: P, gpu: Gpu) -> P:
        """The candidate with what only the GPU can say filled in: how many blocks of a persistent kernel it holds.

        What is filled in is part of the plan and is recorded with it: nothing asks for the GPU again.
        """
        return plan

    @abstractmethod
    def reject(self, spec: PoolSpec, plan: P, gpu: Gpu) -> str | None:
        """Why the plan cannot be built for the spec on the GPU, and what would fit; None if it is legal.

        The default choice, the sweep and the tests all ask here and nowhere else.
        """

    @abstractmethod
    def layout(self, spec: PoolSpec, plan: P) -> SharedLayout:
        """Dynamic shared memory of one block."""

    @abstractmethod
    def launch(self, spec: PoolSpec, plan: P) -> Launch:
        """Threads, shared memory and items of one block."""

    @abstractmethod
    def cost(self, spec: PoolSpec, plan: P, gpu: Gpu, batch: int) -> Cost:
        """Work of one launch over ``batch`` items."""

    @abstractmethod
    def context(self, spec: PoolSpec, plan: P) -> Mapping[str, Any]:
        """What the template needs beyond what rendering itself provides."""

    def promises_no_spills(self, spec: PoolSpec, plan: P) -> bool:
        """Whether ptxas is expected to keep everything in registers; tests hold it to that."""
        return True

    def arch_target(self, arch: str) -> str:
        """The nvcc target for an architecture: with the suffix (``sm_90a``) where its own features are used."""
        return f"{arch}a" if self.only_oldest else arch

    def reject_arch(self, *archs: str) -> str | None:
        """Why the templates cannot be compiled for these architectures; None if they can."""
        if self.only_oldest:
            other = [arch for arch in archs if arch != self.oldest_arch]
            return f"needs {self.oldest_arch}, whose own features it uses, not {', '.join(other)}" if other else None
        old = [arch for arch in archs if arch_number(arch) < arch_number(self.oldest_arch)]
        return f"needs {self.oldest_arch} or newer, not {', '.join(old)}" if old else None

    def legal(self, spec: PoolSpec, gpu: Gpu, direction: Direction) -> list[P]:
        """The candidates, fitted to the GPU, that :meth:`reject` lets pass, in the order of the space."""
        plans = (self.fitted(spec, plan, gpu) for plan in self.candidates(spec, direction))
        return [plan for plan in plans if self.reject(spec, plan, gpu) is None]

    def plan_from_knobs(self, direction: Direction, knobs: Mapping[str, Any]) -> P:
        """Builds a plan from recorded parameters.

        Raises:
            ValueError: a parameter is unknown.
        """
        known = {field.name for field in dataclasses.fields(self.plan_type)} - {"direction"}
        unknown = sorted(set(knobs) - known)
        if unknown:
            raise ValueError(
                f"{self.name} has no plan parameter {', '.join(unknown)}; legal: {', '.join(sorted(known))}"
            )
        return self.plan_type(direction, **knobs)
