"""What may be tried: every legal plan of every algorithm, and which plans lie next to each other."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import ALGORITHMS, Algorithm, Choice, Plan, best_choice, find_algorithm
from invpool.gpu import Gpu
from invpool.spec import PoolSpec


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan of one direction.

    Attributes:
        asked_for: somebody named it, beyond what the algorithm's space has: it is measured whatever is predicted.
        rejected: why it is not legal, of one that was asked for all the same.
    """

    algorithm: Algorithm[Any]
    plan: Plan
    asked_for: bool = False
    rejected: str | None = None

    @property
    def direction(self) -> Direction:
        return self.plan.direction

    def __str__(self) -> str:
        return f"{self.algorithm.name} {self.plan}"

    def seconds(self, spec: PoolSpec, gpu: Gpu, batch: int) -> float:
        """Predicted time of one launch."""
        return self.algorithm.cost(spec, self.plan, gpu, batch).seconds(gpu)

    def choice(self, partners: Mapping[str, Choice]) -> Choice:
        """The candidate with its algorithm's plan of the other direction: the two run one after the other."""
        partner = partners[self.algorithm.name]
        plans = {d: self.plan if d == self.direction else partner.plan(d) for d in DIRECTIONS}
        return Choice(self.algorithm, **plans)


@dataclasses.dataclass(frozen=True)
class Space:
    """The candidates of one direction of a spec on a GPU.

    Attributes:
        candidates: in the order of the algorithms' spaces; extra ones that were asked for come last.
        partners: of each algorithm, its default plans.
    """

    spec: PoolSpec
    gpu: Gpu
    direction: Direction
    candidates: tuple[Candidate, ...]
    partners: Mapping[str, Choice]

    @functools.cached_property
    def _cells(self) -> dict[tuple[Any, ...], list[Candidate]]:
        """Candidates that are alike but for one parameter, by what they share."""
        cells: dict[tuple[Any, ...], list[Candidate]] = collections.defaultdict(list)
        for candidate in self.candidates:
            for cell in _cells_of(candidate):
                cells[cell].append(candidate)
        return cells

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Candidates of the same algorithm that differ in one parameter."""
        found = (other for cell in _cells_of(candidate) for other in self._cells[cell] if other is not candidate)
        return list(dict.fromkeys(found))


def _cells_of(candidate: Candidate) -> Iterable[tuple[Any, ...]]:
    # What is filled in for the GPU follows from the rest.
    knobs = tuple((name, value) for name, value in candidate.plan.knobs.items() if name != "most_blocks")
    for position in range(len(knobs)):
        yield candidate.algorithm.name, position, knobs[:position] + knobs[position + 1 :]


def list_space(
    spec: PoolSpec,
    gpu: Gpu,
    direction: Direction,
    algorithms: Sequence[str] = (),
    extra: Sequence[Candidate] = (),
    only_extra: bool = False,
) -> Space:
    """Every legal plan of the named algorithms, or of all that have legal plans in both directions on this GPU.

    Args:
        extra: candidates beyond the algorithms' spaces; the legality predicate judges them, too.
        only_extra: of the algorithms' spaces, the default plans alone.

    Raises:
        ValueError: no algorithm has a given name.
    """
    found = [find_algorithm(name) for name in algorithms] or list(ALGORITHMS.values())
    partners: dict[str, Choice] = {}
    for algorithm in found:
        best = best_choice(algorithm, spec, gpu) if algorithm.reject_arch(gpu.arch) is None else None
        if best is not None:
            partners[algorithm.name] = best
    asked_for = {
        (more.algorithm.name, more.plan): dataclasses.replace(more, rejected=_obstacle(spec, gpu, more, partners))
        for more in extra
        if more.direction == direction
    }
    candidates = [
        Candidate(algorithm, plan)
        for algorithm in found
        if algorithm.name in partners
        for plan in (
            [partners[algorithm.name].plan(direction)] if only_extra else algorithm.legal(spec, gpu, direction)
        )
        if (algorithm.name, plan) not in asked_for
    ]
    candidates += asked_for.values()
    return Space(spec, gpu, direction, tuple(candidates), partners)


def _obstacle(spec: PoolSpec, gpu: Gpu, candidate: Candidate, partners: Mapping[str, Choice]) -> str | None:
    if candidate.algorithm.name not in partners:
        return f"{candidate.algorithm.name} has no legal plan for {spec.slug} on {gpu.name}"
    try:
        return candidate.algorithm.reject(spec, candidate.plan, gpu)
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        return f"its parameters are of no use: {error!r}"


def read_plans(path: Path) -> list[Candidate]:
    """Extra candidates from a JSON file: ``[{"algorithm": "one_pass", "direction": "forward", "plan": {...}}, ...]``.

    Raises:
        ValueError: the file is not of that form, or names an algorithm or a parameter that does not exist.
    """
    try:
        entries = json.loads(path.read_bytes())
        found = []
        for entry in entries:
            algorithm = find_algorithm(entry["algorithm"])
            if entry["direction"] not in DIRECTIONS:
                raise ValueError(f"direction is {entry['direction']!r}; legal: {', '.join(DIRECTIONS)}")
            plan = algorithm.plan_from_knobs(entry["direction"], entry["plan"])
            found.append(Candidate(algorithm, plan, asked_for=True))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        form = '[{"algorithm": "one_pass", "direction": "forward", "plan": {...}}, ...]'
        raise ValueError(f"{path} holds no plans ({error}); they look like {form}") from error
    return found
