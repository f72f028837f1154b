"""Measures what docs/results and the package say of the sweep, on this machine's GPU.

    python tools/ship_tables.py tables [--only h128]   the tables that ship: gen/invpool/tuned/<device>/<slug>.json
    python tools/ship_tables.py spaces [--only h128]   whole spaces for CI to search in: tests/sweep/spaces/<slug>.jsonl
    python tools/ship_tables.py trust                  does a sweep say the same thrice, and a fresh process the same?

Needs a GPU, PyCUDA and nvcc. bkh times the finalists of bhk again, and nothing else. What `trust` finds is written to
docs/results/sweep.json. --into writes all of it to another folder, as it comes: a machine that is lent may be gone
before the last of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from record import REPO, RESULTS, write_result

from invpool.cache import KernelCache
from invpool.compile_pool import CompilePool
from invpool.spec import PoolSpec
from invpool.sweep.crew import LocalCrew, gpu_numbers
from invpool.sweep.model import Budget, SweepRequest, SweepResult
from invpool.sweep.records import RecordFile
from invpool.sweep.report import result_dict
from invpool.sweep.session import Session
from invpool.sweep.space import Candidate
from invpool.tuned import write_table

SHAPES = ((128, 32), (64, 16), (256, 64), (321, 96), (862, 96), (7, 96), (21, 96), (137, 96))
DTYPES = ("float32", "bfloat16")
BATCHES = (16, 256, 4096, 65536)
SECONDS_PER_SPEC = 12.0
# Whole spaces are those of the algorithms that a search chooses among here; three_pass and recompute are far behind.
SPACE_ALGORITHMS = ("one_pass", "one_pass_mma", "one_pass_wgmma", "one_pass_streamed")
SPACES = (PoolSpec(16, 8), PoolSpec(7, 96), PoolSpec(21, 96), PoolSpec(64, 16))
TRUST = PoolSpec(128, 32)
TRUST_CANDIDATES = 100


class Tuner:
    """A crew and compilers that several sweeps share."""

    def __init__(self) -> None:
        self.crew = LocalCrew("gpu", gpu_numbers()[:1] or (0,))
        self.pool = CompilePool(KernelCache().root)

    def sweep(self, spec: PoolSpec, records: Path | None = None, **options: Any) -> SweepResult:
        assert self.crew.gpu is not None
        request = SweepRequest(spec, self.crew.gpu, **{"batches": BATCHES, **options})
        started = time.perf_counter()
        result = Session(request, self.crew, RecordFile(records), self.pool).run()
        failures = dict(result.failures)
        print(
            f"{spec.slug}: {len(result.records)} candidates, {time.perf_counter() - started:.0f} s, failed {failures}"
        )
        for entry in result_dict(result)["verdicts"]:
            words = (entry["direction"], entry["batch"], entry["algorithm"], entry["time"]["median_us"])
            print("  {} B={} {} {:.1f} us".format(*words), "kept" if entry["kept"] else f"gain {entry['gain']:.1%}")
        sys.stdout.flush()
        return result

    def close(self) -> None:
        self.crew.close()
        self.pool.close()


def finalists(result: SweepResult) -> tuple[Candidate, ...]:
    found = dict.fromkeys(
        (v.choice.algorithm, plan) for v in result.verdicts for plan in (v.choice.forward, v.choice.backward)
    )
    return tuple(Candidate(algorithm, plan, asked_for=True) for algorithm, plan in found)


def tables(tuner: Tuner, only: str, records: Path, root: Path) -> None:
    for H, K in SHAPES:
        for dtype in DTYPES:
            spec, other = PoolSpec(H, K, dtype), PoolSpec(H, K, dtype, "bkh")  # type: ignore[arg-type]
            if only not in spec.slug:
                continue
            first = tuner.sweep(spec, records / f"{spec.slug}.jsonl", budget=Budget(None, SECONDS_PER_SPEC))
            second = tuner.sweep(other, extra=finalists(first), only_extra=True)
            for result in (first, second):
                assert result.table is not None
                print("wrote", write_table(result.table, root))


def spaces(tuner: Tuner, only: str, folder: Path) -> None:
    for spec in SPACES:
        if only in spec.slug:
            tuner.sweep(
                spec,
                folder / f"{spec.slug}.jsonl",
                batches=(16, 4096),
                algorithms=SPACE_ALGORITHMS,
                budget=Budget(None),
            )


def trust(tuner: Tuner, results: Path) -> None:
    """Three sweeps of the default spec, each from nothing, and its winners once more in a fresh process.

    Times are compared as shares of the composite's, which was timed with them: the clock cancels, and unlike the
    search's reference, the composite is never the winner itself.
    """
    runs, seconds = [], []
    for _ in range(3):
        started = time.perf_counter()
        runs.append(tuner.sweep(TRUST, budget=Budget(TRUST_CANDIDATES)))
        seconds.append(time.perf_counter() - started)
    tuner.close()
    fresh = Tuner()
    again = fresh.sweep(TRUST, extra=finalists(runs[-1]), only_extra=True)
    fresh.close()

    def shares(result: SweepResult) -> dict[str, float]:
        return {f"{v.direction} B={v.batch}": v.time["median_us"] / v.time["composite_us"] for v in result.verdicts}

    rows = [shares(result) for result in runs]
    agreement = {name: max(row[name] for row in rows) / min(row[name] for row in rows) - 1 for name in rows[0]}
    repeated = {name: abs(shares(again)[name] / rows[-1][name] - 1) for name in rows[-1]}
    print("seconds", [round(value) for value in seconds])
    print("three sweeps differ by", {name: f"{value:.1%}" for name, value in agreement.items()})
    print("a fresh process differs by", {name: f"{value:.1%}" for name, value in repeated.items()})
    write_result(
        results / "sweep.json",
        {
            "candidates": TRUST_CANDIDATES,
            "seconds": seconds,
            "agreement": agreement,
            "fresh_process": repeated,
            "runs": [result_dict(result) for result in runs],
            "again": result_dict(again),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "spaces", "trust"))
    parser.add_argument("--only", default="", help="specs whose slug contains this")
    parser.add_argument("--into", type=Path, help="a folder for tables, records, spaces and sweep.json")
    options = parser.parse_args()
    if not gpu_numbers():
        sys.exit("no GPU here: nothing can be tuned")
    into: Path | None = options.into
    tuner = Tuner()
    try:
        if options.what == "trust":
            trust(tuner, into or RESULTS)
        elif options.what == "tables":
            records = (into or REPO / "build") / "records"
            tables(tuner, options.only, records, into / "tuned" if into else REPO / "gen" / "invpool" / "tuned")
        else:
            spaces(tuner, options.only, into / "spaces" if into else REPO / "tests" / "sweep" / "spaces")
    finally:
        tuner.close()


if __name__ == "__main__":
    main()
