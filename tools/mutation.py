"""Ignores every synchronisation point of every kernel in turn: a check has to notice each.

    python tools/mutation.py [--algorithm one_pass_mma] [--out docs/results/mutation.json]

For the default plans of each algorithm and direction, at the default spec and at one of several tiles, each barrier
of the source is ignored at run time (one build serves all mutants), and each call of the barrier of an item that
`one_pass_mma` has for itself is taken out of the source (a build each). Of one algorithm alone, the record's other rows
stay as they are. The mutant is killed if the emulator refuses
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
from invpool.check import make_inputs, make_odd_items, tolerance
from invpool.emulator.build import Build
from invpool.emulator.pool import EmulatedPool
from invpool.errors import EmulationError, SanitizerError
from invpool.gpu import DEFAULT_GPU, KNOWN_GPUS
from invpool.reference import norm_error, pool_ref
from invpool.spec import PoolSpec

SPECS = (PoolSpec(128, 32), PoolSpec(33, 72), PoolSpec(70, 136), PoolSpec(7, 20))
Plans = tuple[tuple[PoolSpec, dict[str, Any]], ...]


def _with(plans: Plans, **knobs: Any) -> Plans:
    return tuple((spec, own | knobs) for spec, own in plans)


# One block that goes from item to item, where kernels do: of four strips, of five, of a warp for each of two items; one
# warpgroup with a pair of strips, and one or two with each strip by itself.
_MMA: Plans = (
    (PoolSpec(50, 20), {"row_blocks": 1}),
    (PoolSpec(70, 17), {"row_blocks": 1}),
    (PoolSpec(7, 20), {"row_blocks": 1, "items": 2}),
)
_PAIR: Plans = ((PoolSpec(70, 20), {"groups": 1}), (PoolSpec(128, 17), {"groups": 1}))
_STRIPS: Plans = ((PoolSpec(33, 20), {"groups": 1}), (PoolSpec(137, 17), {"groups": 2}))
_WINDOWS: Plans = (
    (PoolSpec(70, 24), {"window": 32, "warps": 2, "across": 1, "mirror": False}),
    (PoolSpec(70, 24), {"window": 32, "warps": 2, "across": 1, "mirror": True}),
    (PoolSpec(70, 24), {"window": 64, "warps": 2, "across": 2, "mirror": False}),
    (PoolSpec(40, 130), {"chunk": 64, "across": 1, "hold": False}),
    (PoolSpec(40, 130), {"chunk": 64, "across": 2, "hold": True, "spread": True}),
)
# Of each algorithm, those that are like the default ones come first. Other algorithms have default plans.
VARIANTS: dict[str, dict[str, Plans]] = {
    "one_pass_mma": {"prefetch": _with(_MMA, prefetch=True), "no prefetch": _with(_MMA, prefetch=False)},
    "one_pass_streamed": {"windows": _WINDOWS},
    # Forward has both ways in one source; backward has one of them, which the first plan decides.
    "one_pass_wgmma": {
        f"{name}, {'' if prefetch else 'no '}prefetch": _with(plans, prefetch=prefetch)
        for name, plans in (("pair", _PAIR + _STRIPS), ("strips", _STRIPS + _PAIR))
        for prefetch in (True, False)
    },
}
DEFAULT: dict[str, Plans] = {"default": tuple((spec, {}) for spec in SPECS)}
KINDS = ("normal", "shifted", "mixed", "odd")
ITEMS = 5
# Operations that nothing was seen to need: (algorithm, direction, operation), or (function, number in it, operation).
# To take them out wants a GPU.
SPARE = {
    ("one_pass_streamed", "backward", "__syncthreads"),  # between chunks of rows that are staged for their sums alone
    ("one_pass_wgmma", "forward", "__syncthreads"),  # at the end of an item, where nothing is fetched meanwhile
    ("one_pass_wgmma", "backward", "group_wait"),  # between two sums of products that are added to each other
}
# Where threads wait for each other, for their copies or their products; not where the header defines it.
POINT = re.compile(r"(?<!void )(?<!::)\b(__sync\w+|group_barrier|wait_copies|barrier_wait|group_wait|sync_item)\s*[(<]")
# Barriers that are functions of the kernel's own: one is taken out at its call.
OWN = "sync_item"


def points(source: str) -> list[tuple[int, str]]:
    """(line, operation) of every synchronisation point that the source has."""
    lines = enumerate(source.splitlines(), 1)
    return [(line, match[1]) for line, text in lines if (match := POINT.search(text.partition("//")[0]))]


def choice_of(spec: PoolSpec, algorithm: str, knobs: dict[str, Any]) -> Choice:
    """The default plans, or the first that have the most of the knobs, with one block for all items."""
    if not knobs:
        return choose(spec, KNOWN_GPUS[DEFAULT_GPU], algorithm)
    found, plans = find_algorithm(algorithm), []
    for direction in DIRECTIONS:
        legal = found.legal(spec, KNOWN_GPUS[DEFAULT_GPU], direction)
        plan = max(legal, key=lambda plan: len(knobs.items() & plan.knobs.items()))
        capped = {"most_blocks": 1} if "most_blocks" in plan.knobs else {}
        plans.append(found.plan_from_knobs(direction, plan.knobs | capped))
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
        kinds["odd"] = make_odd_items(spec, ITEMS, "cpu")
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


def function_of(source: str, line: int) -> str | None:
    """The function of the kernel's headers that a line is in, with the number of the point among those it has."""
    lines = source.splitlines()
    for above in range(line - 1, -1, -1):
        match = re.match(r"(?:  )?__device__ .*?(\w+)\(", lines[above])
        if match:
            number = sum(above + 1 < at < line for at, _ in points(source))
            return f"{match[1]} {number}"
    return None


def credit_helpers(rows: list[dict[str, Any]]) -> None:
    """A barrier of a function that kernels share is needed if one of them needs it: the survivor says which."""
    for row in rows:
        # Recorded rows may rest on kernels that have changed since.
        if row["killed_by"] and " needs it: " in row["killed_by"]:
            row["killed_by"] = None
    needed = {(row["within"], row["operation"]): row for row in rows if row["shared"] and row["killed_by"]}
    for row in rows:
        there = needed.get((row["within"], row["operation"]))
        if row["shared"] and row["killed_by"] is None and there is not None:
            row["killed_by"] = f"{there['algorithm']} {there['direction']} needs it: {there['killed_by']}"


def survivors(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Operations that nothing needs, as :data:`SPARE` names them."""
    found = set()
    for row in rows:
        if row["killed_by"] is None:
            place = (
                row["within"].split(" ") if row["shared"] and row["within"] else (row["algorithm"], row["direction"])
            )
            found.add((place[0], place[1], row["operation"]))
    return found


def mutate(algorithm: str, variant: str, plans: Plans) -> list[dict[str, Any]]:
    """One row for each synchronisation point of an algorithm's two kernels, in one variant."""
    subjects = [Subject(spec, algorithm, knobs) for spec, knobs in plans]
    rows = []
    for direction in DIRECTIONS:
        sources = [subject.pools["plain"].sources[direction] for subject in subjects]
        sites = [points(source) for source in sources]
        begin = next(
            line for line, text in enumerate(sources[0].splitlines(), 1) if text.startswith('extern "C" __global__')
        )
        # The same template, so the same points in the same order, at other lines; but where a plan takes another way.
        operations = [[operation for _, operation in site] for site in sites]
        alike = [i for i, found in enumerate(operations) if found == operations[0]]
        if algorithm not in VARIANTS and len(alike) != len(subjects):
            raise SystemExit(f"{algorithm} {direction}: the specs do not have the same synchronisation points")
        chosen = [(subjects[i], sites[i]) for i in alike]
        for subject, _ in chosen:
            for build in subject.pools:
                failed = subject.failure(direction, build, 0)
                if failed:
                    raise SystemExit(f"{algorithm} {direction} fails before anything is ignored: {failed}")
        for number, (line, operation) in enumerate(sites[0]):
            killed = None
            for build in ("plain", "thread"):
                for subject, site in chosen:
                    killed = killed or subject.failure(direction, build, *site[number])
            rows.append(
                {
                    "algorithm": algorithm,
                    "direction": direction,
                    "variant": variant,
                    "point": number,
                    "line": line,
                    "operation": operation,
                    "shared": line < begin,
                    "within": function_of(sources[0], line) if line < begin else None,
                    "killed_by": killed,
                }
            )
            print(f"{algorithm} {direction} {operation} at line {line}: {killed or 'SURVIVED'}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), help="this alone; the record's other rows are kept")
    arguments = parser.parse_args()
    rows = []
    if arguments.algorithm and arguments.out and arguments.out.exists():
        recorded = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in recorded if row["algorithm"] != arguments.algorithm]
    for algorithm in [arguments.algorithm] if arguments.algorithm else sorted(ALGORITHMS):
        for variant, plans in VARIANTS.get(algorithm, DEFAULT).items():
            rows += mutate(algorithm, variant, plans)
    rows.sort(key=lambda row: row["algorithm"])
    credit_helpers(rows)
    alive = [row for row in rows if row["killed_by"] is None]
    result = {
        "specs": [spec.slug for spec in SPECS],
        "inputs": list(KINDS),
        "mutants": len(rows),
        "survivors": len(alive),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unknown = survivors(rows) - SPARE
    for place in sorted(unknown):
        print(f"nothing needs {' '.join(place)}: take it out, or list it as spare")
    print(f"{len(rows)} mutants, {len(alive)} survived, {len(survivors(rows))} operations")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
