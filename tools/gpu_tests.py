"""Runs tests/gpu on this machine's GPU and records the outcome; anything skipped is a failure.

    python tools/gpu_tests.py [--out docs/results/gpu_tests.json] [pytest arguments]

Needs no registry: torch, jinja2, typer, rich, filelock and pytest, and gen/ on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest
import torch
from record import REPO, RESULTS, write_result


class Recorder:
    """Collects one line a test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            line = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
            self.outcomes[report.nodeid.removeprefix("tests/gpu/")] = line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_tests.json")
    options, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: tests/gpu would all be skipped")
    recorder, start = Recorder(), time.perf_counter()
    code = pytest.main([str(REPO / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", *rest], plugins=[recorder])
    counts = {
        outcome: sum(line["outcome"] == outcome for line in recorder.outcomes.values())
        for outcome in ("passed", "failed", "skipped")
    }
    seconds = round(time.perf_counter() - start, 1)
    write_result(options.out, {"counts": counts, "seconds": seconds, "tests": recorder.outcomes})
    print(counts)
    if code != 0 or counts["skipped"] or not counts["passed"]:
        sys.exit(f"tests/gpu: {counts['failed']} failed, {counts['skipped']} skipped, {counts['passed']} passed")


if __name__ == "__main__":
    main()
