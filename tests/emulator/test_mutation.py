"""The mutation run: every barrier of every kernel is needed, and the recorded result is of these kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.pools import default_choice
from invpool.algorithms import ALGORITHMS
from invpool.emulator.pool import EmulatedPool
from invpool.spec import PoolSpec

REPO = Path(__file__).parents[2]


def test_the_record_has_every_synchronisation_point() -> None:
    record = json.loads((REPO / "docs" / "results" / "mutation.json").read_text(encoding="utf-8"))
    assert record["survivors"] == 0
    spec = PoolSpec.from_slug(record["specs"][0])
    for algorithm in ALGORITHMS:
        for direction, source in EmulatedPool(spec, default_choice(spec, algorithm)).sources.items():
            rows = [r for r in record["rows"] if (r["algorithm"], r["direction"]) == (algorithm, direction)]
            operations = [
                line.partition("__sync")[2].partition("(")[0] for line in source.splitlines() if "__sync" in line
            ]
            assert ["__sync" + name for name in operations] == [row["operation"] for row in rows]


@pytest.mark.slow
def test_no_mutant_survives(tmp_path: Path) -> None:
    out = tmp_path / "mutation.json"
    run = subprocess.run(
        [sys.executable, REPO / "tools" / "mutation.py", "--out", out], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(out.read_text())["survivors"] == 0
