"""The mutation run: every barrier of every kernel is needed, and the recorded result is of these kernels."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.pools import default_choice
from invpool.algorithms import ALGORITHMS
from invpool.emulator.pool import EmulatedPool
from invpool.render import inline_header

REPO = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutation_tool", REPO / "tools" / "mutation.py")
assert _spec is not None
assert _spec.loader is not None
_tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tool)
points = _tool.points
RECORD = REPO / "docs" / "results" / "mutation.json"


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_record_has_every_synchronisation_point(algorithm: str) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert _tool.survivors([row for row in record["rows"] if row["algorithm"] == algorithm]) <= _tool.SPARE
    spec, variant = _tool.SPECS[0], next(iter(_tool.VARIANTS.get(algorithm, _tool.DEFAULT)))
    assert record["specs"][0] == spec.slug
    for direction, source in EmulatedPool(spec, default_choice(spec, algorithm)).sources.items():
        wanted = (algorithm, direction, variant)
        rows = [r for r in record["rows"] if (r["algorithm"], r["direction"], r["variant"]) == wanted]
        assert [operation for _, operation in points(source)] == [row["operation"] for row in rows]


def test_points_are_calls_and_no_definitions() -> None:
    assert points(inline_header("include/primitives.cuh")) == []
    source = (
        "wait_copies<1>();\n__syncthreads();  // group_barrier(1, 64)\ngroup_barrier(1, 64);\n  if (t) __syncwarp();"
    )
    operations = [(1, "wait_copies"), (2, "__syncthreads"), (3, "group_barrier"), (4, "__syncwarp")]
    assert points(source) == operations


def test_credit_comes_from_kills_of_today() -> None:
    shared = {"operation": "__syncthreads", "shared": True, "within": "agree 0", "direction": "forward"}
    stale = {**shared, "algorithm": "a", "killed_by": "b backward needs it: a data race"}
    alive = {**shared, "algorithm": "c", "killed_by": None}
    rows = [dict(stale), dict(alive)]
    _tool.credit_helpers(rows)
    assert [row["killed_by"] for row in rows] == [None, None]
    assert _tool.survivors(rows) == {("agree", "0", "__syncthreads")}
    rows = [dict(stale), {**alive, "killed_by": "dx is off"}]
    _tool.credit_helpers(rows)
    assert rows[0]["killed_by"] == "c forward needs it: dx is off"
    assert _tool.survivors(rows) == set()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_no_mutant_survives(algorithm: str, tmp_path: Path) -> None:
    """Of one algorithm; what others need of the functions they share is in the record, which holds theirs."""
    out = tmp_path / "mutation.json"
    shutil.copy(RECORD, out)
    tool = [sys.executable, REPO / "tools" / "mutation.py", "--algorithm", algorithm, "--out", out]
    run = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [row for row in json.loads(out.read_text())["rows"] if row["algorithm"] == algorithm]
    assert len(rows) >= 4
    assert _tool.survivors(rows) <= _tool.SPARE
