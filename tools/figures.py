"""Our kernels over the shapes that matter, beside what people would pick instead, held against the goals.

    python tools/figures.py                                   every row, the quick peers
    python tools/figures.py --only h321 --peers all           one row, torch.compile and all Triton precisions as well
    python tools/figures.py --only k32_f32 --peers none --algorithm one_pass --plan forward:rows=64,columns=32

Needs a GPU, nvcc and gen/ on PYTHONPATH; Triton and torch.compile only for the peers that are made of them. Kernels are
compiled first, several at a time. What fails is recorded and the rest goes on; the file is written after each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import REPO, RESULTS, write_result

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import find_algorithm
from invpool.bench.figures import GOALS_SOURCE, Bench, goal_table, select, verdicts
from invpool.bench.own import OwnMaker, parse_plan
from invpool.bench.peers import WHICHES
from invpool.bench.timing import GpuStopwatch
from invpool.cache import KernelCache
from invpool.gpu import present_gpu
from invpool.spec import LAYOUTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", action="append", default=[], help="rows whose name contains this")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", default=[], help="this layout only")
    parser.add_argument("--peers", choices=WHICHES, default="fast", help="fast: no torch.compile, one Triton precision")
    parser.add_argument("--algorithm", metavar="NAME", action="append", help="repeatable [default: the chosen one]")
    parser.add_argument("--plan", metavar="DIRECTION:KNOB=VALUE,...", action="append", default=[])
    parser.add_argument("--out", type=Path, help="[default: docs/results/figures.json; of a part: build/figures.json]")
    options = parser.parse_args()
    partial = options.only or options.layout or options.plan or options.algorithm
    out = options.out or (REPO / "build" if partial else RESULTS) / "figures.json"
    try:
        rows = select(options.only, options.layout)
        algorithms = [find_algorithm(name).name for name in options.algorithm or []] or [None]
        knobs: dict[Direction, dict[str, int | str]] = {direction: {} for direction in DIRECTIONS}
        for direction, some in map(parse_plan, options.plan):
            knobs[direction] |= some
    except ValueError as error:
        parser.error(str(error))
    gpu = present_gpu()
    if gpu is None:
        sys.exit("no GPU here: nothing can be timed")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        maker = OwnMaker(gpu, Path(folder), knobs, KernelCache())
        specs = [row.spec(layout) for row in rows for layout in row.layouts]
        maker.compile_ahead(specs, algorithms, os.cpu_count() or 1)
        print(f"{gpu.name}, torch {torch.__version__}; compiled in {time.perf_counter() - begun:.1f} s", flush=True)

        def save(entries: list[dict[str, Any]]) -> None:
            result = {
                "copy_gb_per_s": bench.copy_rate / 1e9,
                "goals_source": GOALS_SOURCE,
                "goals": [dataclasses.asdict(verdict) for verdict in verdicts(entries)],
                "entries": entries,
            }
            write_result(out, result, quiet=True)

        bench = Bench(
            GpuStopwatch(),
            maker,
            algorithms=algorithms,
            which=options.peers,
            say=lambda line: print(line, flush=True),
            save=save,
        )
        entries = bench.run(rows)
    print("\n".join(["", f"goals: {GOALS_SOURCE}", *goal_table(verdicts(entries))]))
    print(f"wrote {out}; {time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
