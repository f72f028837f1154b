"""Ignores every synchronisation point of every kernel in turn: a check has to notice each.

    python tools/mutation.py [--out docs/results/mutation.json]

For the default plans of each algorithm and direction, at the default spec and at one of several tiles, each barrier
of the source is ignored at run time (one build serves all mutants), and each call of the barrier of an item that
`one_pass_mma` has for itself is taken out of the source (a build each). The mutant is killed if the emulator refuses
it, if its numbers are wrong or depend on the order of threads, or if ThreadSanitizer finds a race. A survivor is a
barrier that nothing needs. Needs g++, no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import ALGORITHMS, Choice, choose, find_algorithm
from invpool.check import make_inputs, tolerance
from invpool.emulator.build import Build
from invpool.emulator.pool import EmulatedPool
from invpool.errors import EmulationError, SanitizerError
from invpool.gpu import DEFAULT_GPU, KNOWN_GPUS
from invpool.reference import norm_error, pool_ref
from invpool.spec import PoolSpec

SPECS = (PoolSpec(128, 32), PoolSpec(33, 72), PoolSpec(70, 136), PoolSpec(7, 20))
# one_pass_mma: one block that goes from item to item, of four strips, of five, of a warp for each of two items. Whether
# it fetches ahead decides which barriers it has.
MMA_PLANS: tuple[tuple[PoolSpec, dict[str, Any]], ...] = (
    (PoolSpec(50, 20), {"row_blocks": 1}),
    (PoolSpec(70, 17), {"row_blocks": 1}),
    (PoolSpec(7, 20), {"row_blocks": 1, "items": 2}),
)
KINDS = ("normal", "shifted", "mixed")
ITEMS = 5
MOST_SURVIVORS = 0.02
# Where threads wait for each other, for their copies or their products; not where the header defines it.
POINT = re.compile(r"(?<!void )(?<!::)\b(__sync\w+|group_barrier|wait_copies|barrier_wait|group_wait|sync_item)\s*[(<]")
# Barriers that are functions of the kernel's own: one is taken out at its call.
OWN = "sync_item"


def points(source: str) -> list[tuple[int, str]]:
    """(line, operation) of every synchronisation point that the source has."""
    lines = enumerate(source.splitlines(), 1)
    return [(line, match[1]) for line, text in lines if (match := POINT.search(text.partition("//")[0]))]


def choice_of(spec: PoolSpec, algorithm: str, knobs: dict[str, Any]) -> Choice:
    """The default plans, or the first that have the knobs, with one block for all items."""
    if not knobs:
        return choose(spec, KNOWN_GPUS[DEFAULT_GPU], algorithm)
    found, plans = find_algorithm(algorithm), []
    for direction in DIRECTIONS:
        legal = found.legal(spec, KNOWN_GPUS[DEFAULT_GPU], direction)
        plan = next(plan for plan in legal if knobs.items() <= plan.knobs.items())
        plans.append(found.plan_from_knobs(direction, plan.knobs | {"most_blocks": 1}))
    return Choice(found, *plans)


class Subject:
    """One spec with its plans, and what its kernels must give."""

    def __init__(self, spec: PoolSpec, algorithm: str, knobs: dict[str, Any]) -> None:
        choice = choice_of(spec, algorithm, knobs)
        self.spec = spec
        self.pools: dict[Build, EmulatedPool] = {b: EmulatedPool(spec, choice, b) for b in ("plain", "thread")}
        g = torch.randn(ITEMS, spec.H, generator=torch.Generator().manual_seed(1))
        kinds = make_inputs(spec, ITEMS, "cpu")
        kinds["mixed"] = kinds["normal"].clone()
        kinds["mixed"][1::2] = kinds["shifted"][1::2]
        self.inputs = {kind: (kinds[kind], g) for kind in KINDS}
        self.truths = {kind: pool_ref(x, g) for kind, (x, g) in self.inputs.items()}
        self.states = {kind: self.pools["plain"].forward(x) for kind, (x, _) in self.inputs.items()}

    def without(self, direction: Direction, build: Build, line: int) -> EmulatedPool:
        """The kernels with a barrier of their own taken out."""
        pool = EmulatedPool(self.spec, self.pools[build].choice, build)
        lines = pool.sources[direction].splitlines(keepends=True)
        lines[line - 1] = lines[line - 1].replace(f"{OWN}();", ";", 1)
        pool.sources[direction] = "".join(lines)
        return pool

    def failure(self, direction: Direction, build: Build, ignore_line: int, operation: str = "") -> str | None:
        """The first check that fails when the point at a line is ignored; None if all pass."""
        pool = self.pools[build]
        if operation == OWN:
            pool, ignore_line = self.without(direction, build, ignore_line), 0
        for kind, (x, g) in self.inputs.items():
            state = self.states[kind] if direction == "backward" else {}
            tensors = {**state, "x": x, "g": g if direction == "backward" else None}
            where = f"{self.spec.slug}, {kind}"
            try:
                orders = 2 if build == "plain" else 1
                written, _ = pool.run(direction, tensors, ignore_line=ignore_line, orders=orders)
            except SanitizerError as error:
                return f"{where}: {str(error).splitlines()[0].partition(': ')[2]}"
            except EmulationError as error:
                return f"{where}: {str(error).splitlines()[0].partition(': ')[2]}"
            what = "out" if direction == "forward" else "dx"
            error = norm_error(written[what], getattr(self.truths[kind], what))
            # A shifted item's dx is a small difference of large numbers for the composite, not for the kernels.
            allowed = 20 * tolerance(self.spec, what, 0.0)
            if not error <= allowed:
                return f"{where}: {what} is off by {error:.1e}"
        return None


def credit_helpers(rows: list[dict[str, Any]]) -> None:
    """A barrier of a function that both directions share is needed if either needs it: the survivor says which."""
    found = {(row["direction"], row["point"], row["operation"]): row for row in rows if row["shared"]}
    for row in found.values():
        other = "backward" if row["direction"] == "forward" else "forward"
        there = found.get((other, row["point"], row["operation"]))
        if row["killed_by"] is None and there is not None and there["killed_by"] is not None:
            row["killed_by"] = f"{other} needs it: {there['killed_by']}"


def mutate(algorithm: str, prefetch: bool | None = None) -> list[dict[str, Any]]:
    """One row for each synchronisation point of an algorithm's two kernels, which fetch ahead or do not."""
    plans: tuple[tuple[PoolSpec, dict[str, Any]], ...] = tuple((spec, {}) for spec in SPECS)
    if prefetch is not None:
        plans = tuple((spec, knobs | {"prefetch": prefetch}) for spec, knobs in MMA_PLANS)
    subjects = [Subject(spec, algorithm, knobs) for spec, knobs in plans]
    rows = []
    for direction in DIRECTIONS:
        sources = [subject.pools["plain"].sources[direction] for subject in subjects]
        sites = [points(source) for source in sources]
        begin = next(
            line for line, text in enumerate(sources[0].splitlines(), 1) if text.startswith('extern "C" __global__')
        )
        # The same template, so the same points in the same order, at other lines.
        if len({tuple(operation for _, operation in site) for site in sites}) != 1:
            raise SystemExit(f"{algorithm} {direction}: the specs do not have the same synchronisation points")
        for subject in subjects:
            for build in subject.pools:
                found = subject.failure(direction, build, 0)
                if found:
                    raise SystemExit(f"{algorithm} {direction} fails before anything is ignored: {found}")
        for number, (line, operation) in enumerate(sites[0]):
            killed = None
            for build in ("plain", "thread"):
                for subject, site in zip(subjects, sites, strict=True):
                    killed = killed or subject.failure(direction, build, *site[number])
            rows.append(
                {
                    "algorithm": algorithm,
                    "direction": direction,
                    "prefetch": prefetch,
                    "point": number,
                    "line": line,
                    "operation": operation,
                    "shared": line < begin,
                    "killed_by": killed,
                }
            )
            print(f"{algorithm} {direction} {operation} at line {line}: {killed or 'SURVIVED'}", flush=True)
    credit_helpers(rows)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    rows = []
    for algorithm in sorted(ALGORITHMS):
        for prefetch in (True, False) if algorithm == "one_pass_mma" else (None,):
            rows += mutate(algorithm, prefetch)
    survivors = [row for row in rows if row["killed_by"] is None]
    result = {
        "specs": [spec.slug for spec in SPECS],
        "inputs": list(KINDS),
        "mutants": len(rows),
        "survivors": len(survivors),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} mutants, {len(survivors)} survived")
    return len(survivors) > MOST_SURVIVORS * len(rows)


if __name__ == "__main__":
    sys.exit(main())
