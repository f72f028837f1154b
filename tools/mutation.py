"""Ignores every synchronisation point of every kernel in turn: a check has to notice each.

    python tools/mutation.py [--out docs/results/mutation.json]

For the default plans of each algorithm and direction, at the default spec and at one of several tiles, each barrier
of the source is ignored at run time (one build serves all mutants). The mutant is killed if the emulator refuses it,
if its numbers are wrong or depend on the order of threads, or if ThreadSanitizer finds a race. A survivor is a
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
from invpool.algorithms import ALGORITHMS, choose
from invpool.check import make_inputs, tolerance
from invpool.emulator.build import Build
from invpool.emulator.pool import EmulatedPool
from invpool.errors import EmulationError, SanitizerError
from invpool.gpu import DEFAULT_GPU, KNOWN_GPUS
from invpool.reference import norm_error, pool_ref
from invpool.spec import PoolSpec

SPECS = (PoolSpec(128, 32), PoolSpec(33, 72), PoolSpec(70, 136), PoolSpec(7, 20))
KINDS = ("normal", "shifted")
ITEMS = 2
MOST_SURVIVORS = 0.02
# Where threads wait for each other, for their copies or their products; not where the header defines it.
POINT = re.compile(r"(?<!void )(?<!::)\b(__sync\w+|group_barrier|wait_copies|barrier_wait|group_wait)\s*[(<]")


def points(source: str) -> list[tuple[int, str]]:
    """(line, operation) of every synchronisation point that the source has."""
    lines = enumerate(source.splitlines(), 1)
    return [(line, match[1]) for line, text in lines if (match := POINT.search(text.partition("//")[0]))]


class Subject:
    """One spec with its default plans, and what its kernels must give."""

    def __init__(self, spec: PoolSpec, algorithm: str) -> None:
        choice = choose(spec, KNOWN_GPUS[DEFAULT_GPU], algorithm)
        self.spec = spec
        self.pools: dict[Build, EmulatedPool] = {b: EmulatedPool(spec, choice, b) for b in ("plain", "thread")}
        g = torch.randn(ITEMS, spec.H, generator=torch.Generator().manual_seed(1))
        self.inputs = {kind: (x, g) for kind, x in make_inputs(spec, ITEMS, "cpu").items() if kind in KINDS}
        self.truths = {kind: pool_ref(x, g) for kind, (x, g) in self.inputs.items()}
        self.states = {kind: self.pools["plain"].forward(x) for kind, (x, _) in self.inputs.items()}

    def failure(self, direction: Direction, build: Build, ignore_line: int) -> str | None:
        """The first check that fails when the point at a line is ignored; None if all pass."""
        for kind, (x, g) in self.inputs.items():
            state = self.states[kind] if direction == "backward" else {}
            tensors = {**state, "x": x, "g": g if direction == "backward" else None}
            where = f"{self.spec.slug}, {kind}"
            try:
                orders = 2 if build == "plain" else 1
                written, _ = self.pools[build].run(direction, tensors, ignore_line=ignore_line, orders=orders)
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


def mutate(algorithm: str) -> list[dict[str, Any]]:
    """One row for each synchronisation point of an algorithm's two kernels."""
    subjects = [Subject(spec, algorithm) for spec in SPECS]
    rows = []
    for direction in DIRECTIONS:
        sites = [points(subject.pools["plain"].sources[direction]) for subject in subjects]
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
                    killed = killed or subject.failure(direction, build, site[number][0])
            rows.append(
                {
                    "algorithm": algorithm,
                    "direction": direction,
                    "point": number,
                    "line": line,
                    "operation": operation,
                    "killed_by": killed,
                }
            )
            print(f"{algorithm} {direction} {operation} at line {line}: {killed or 'SURVIVED'}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    rows = [row for algorithm in sorted(ALGORITHMS) for row in mutate(algorithm)]
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
