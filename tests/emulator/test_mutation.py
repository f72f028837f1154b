"""The mutation run: every barrier of every kernel is needed, and the recorded result is of these kernels."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.pools import default_choice
from invpool.algorithms import ALGORITHMS
from invpool.emulator.pool import EmulatedPool
from invpool.render import inline_header
from invpool.spec import PoolSpec

REPO = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutation_tool", REPO / "tools" / "mutation.py")
assert _spec is not None
assert _spec.loader is not None
_tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tool)
points = _tool.points


def test_the_record_has_every_synchronisation_point() -> None:
    record = json.loads((REPO / "docs" / "results" / "mutation.json").read_text(encoding="utf-8"))
    assert record["survivors"] == 0
    spec = PoolSpec.from_slug(record["specs"][0])
    for algorithm in ALGORITHMS:
        for direction, source in EmulatedPool(spec, default_choice(spec, algorithm)).sources.items():
            variant = next(iter(_tool.VARIANTS.get(algorithm, _tool.DEFAULT)))
            wanted = (algorithm, direction, variant)
            rows = [r for r in record["rows"] if (r["algorithm"], r["direction"], r["variant"]) == wanted]
            operations = [row["operation"] for row in rows]
            assert [operation for _, operation in points(source)] == operations, (algorithm, direction)


def test_points_are_calls_and_no_definitions() -> None:
    assert points(inline_header("include/primitives.cuh")) == []
    source = (
        "wait_copies<1>();\n__syncthreads();  // group_barrier(1, 64)\ngroup_barrier(1, 64);\n  if (t) __syncwarp();"
    )
    operations = [(1, "wait_copies"), (2, "__syncthreads"), (3, "group_barrier"), (4, "__syncwarp")]
    assert points(source) == operations


@pytest.mark.slow
def test_no_mutant_survives(tmp_path: Path) -> None:
    out = tmp_path / "mutation.json"
    run = subprocess.run(
        [sys.executable, REPO / "tools" / "mutation.py", "--out", out], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(out.read_text())["survivors"] == 0
