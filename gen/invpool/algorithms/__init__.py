"""The algorithms, found by looking into this folder, and the choice among their plans.

A module here that defines ``ALGORITHM`` is an algorithm; nothing else has to know its name.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, Final

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms.base import Algorithm, Launch, Plan
from invpool.cost import Cost
from invpool.errors import PlanError
from invpool.gpu import Gpu
from invpool.spec import PoolSpec

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Choice",
    "Launch",
    "Plan",
    "best_choice",
    "best_plan",
    "choose",
    "find_algorithm",
]

# The batch that a default plan is chosen for: enough items to fill any listed GPU.
CHOICE_BATCH: Final = 65536


def _discover() -> dict[str, Algorithm[Any]]:
    found: dict[str, Algorithm[Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        algorithm: Algorithm[Any] | None = getattr(module, "ALGORITHM", None)
        if algorithm is not None:
            found[algorithm.name] = algorithm
    return found


ALGORITHMS: Final = _discover()


def find_algorithm(name: str) -> Algorithm[Any]:
    """The algorithm of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ValueError(f"algorithm is {name!r}; legal: {', '.join(sorted(ALGORITHMS))}") from None


@dataclasses.dataclass(frozen=True)
class Choice:
    """An algorithm with one plan for each direction."""

    algorithm: Algorithm[Any]
    forward: Plan
    backward: Plan

    def plan(self, direction: Direction) -> Plan:
        return self.forward if direction == "forward" else self.backward

    def seconds(self, spec: PoolSpec, gpu: Gpu, batch: int) -> float:
        """Predicted time of forward and backward."""
        return sum(self.algorithm.cost(spec, self.plan(d), gpu, batch).seconds(gpu) for d in DIRECTIONS)

    def work(self, spec: PoolSpec, gpu: Gpu, batch: int) -> float:
        """Predicted time of all units one after the other, forward and backward."""
        return sum(sum(self.algorithm.cost(spec, self.plan(d), gpu, batch).terms(gpu).values()) for d in DIRECTIONS)


def best_plan(
    algorithm: Algorithm[Any], spec: PoolSpec, gpu: Gpu, direction: Direction, batch: int = CHOICE_BATCH
) -> tuple[Plan, Cost] | None:
    """The legal plan of least predicted time, or None if there is none.

    Ties go to a plan that promises no spills, then to the least work of all units together, then to more resident
    threads.
    """
    ranked = [(plan, algorithm.cost(spec, plan, gpu, batch)) for plan in algorithm.legal(spec, gpu, direction)]

    def rank(pair: tuple[Plan, Cost]) -> tuple[float, bool, float, float]:
        plan, cost = pair
        work = sum(cost.terms(gpu).values())
        return cost.seconds(gpu), not algorithm.promises_no_spills(spec, plan), work, -cost.occupancy(gpu)

    return min(ranked, key=rank, default=None)


def best_choice(algorithm: Algorithm[Any], spec: PoolSpec, gpu: Gpu, batch: int = CHOICE_BATCH) -> Choice | None:
    """The best plan of each direction, or None if a direction has none."""
    best = {direction: best_plan(algorithm, spec, gpu, direction, batch) for direction in DIRECTIONS}
    if best["forward"] is None or best["backward"] is None:
        return None
    return Choice(algorithm, best["forward"][0], best["backward"][0])


def choose(
    spec: PoolSpec, gpu: Gpu, algorithm: str | None = None, batch: int = CHOICE_BATCH, archs: Sequence[str] = ()
) -> Choice:
    """The default plans for a spec on a GPU: the algorithm of least predicted time, or the one named.

    Args:
        archs: what else the kernels are to be compiled for; an algorithm that needs a newer one is passed over.

    Raises:
        PlanError: nothing is legal; the message gives each algorithm's reason.
        ValueError: no algorithm has the given name.
    """
    wanted = [find_algorithm(algorithm)] if algorithm else list(ALGORITHMS.values())
    choices: list[Choice] = []
    reasons: list[str] = []
    for candidate in wanted:
        too_old = candidate.reject_arch(*archs)
        if too_old:
            reasons.append(f"{candidate.name}: {too_old}")
            continue
        best = best_choice(candidate, spec, gpu, batch)
        if best is not None:
            choices.append(best)
            continue
        direction = next(direction for direction in DIRECTIONS if not candidate.legal(spec, gpu, direction))
        # The plan that asks for least stands for the space: its reason is the one that cannot be evaded. Of equals, the
        # last: a space begins with what is liked best, wide tiles and shared blocks.
        plans = list(candidate.candidates(spec, direction))
        least = min(reversed(plans), key=lambda plan: candidate.launch(spec, plan).shared_bytes)
        reasons.append(f"{candidate.name} {direction}: {candidate.reject(spec, least, gpu)}")
    if not choices:
        raise PlanError(f"no legal plan for {spec.slug} on {gpu.name}:\n  " + "\n  ".join(reasons))
    # Where one unit bounds several algorithms alike, the one that has the others work least.
    return min(choices, key=lambda choice: (choice.seconds(spec, gpu, batch), choice.work(spec, gpu, batch)))
