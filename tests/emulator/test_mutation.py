"""The mutation run: every barrier of every kernel is needed, and the recorded result is of these kernels."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
# Operations that nothing was seen to need (algorithm, direction, operation). To take them out wants a GPU.
SPARE = {
    ("one_pass_streamed", "backward", "__syncthreads"),  # between chunks of rows that are staged for their sums alone
    ("one_pass_wgmma", "forward", "__syncthreads"),  # at the end of an item, where nothing is fetched meanwhile
    ("one_pass_wgmma", "backward", "group_wait"),  # between two sums of products that are added to each other
}


def survivors(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["algorithm"], row["direction"], row["operation"]) for row in rows if row["killed_by"] is None}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_record_has_every_synchronisation_point(algorithm: str) -> None:
    record = json.loads((REPO / "docs" / "results" / "mutation.json").read_text(encoding="utf-8"))
    assert survivors([row for row in record["rows"] if row["algorithm"] == algorithm]) <= SPARE
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


@pytest.mark.slow
def test_no_mutant_survives(tmp_path: Path) -> None:
    out = tmp_path / "mutation.json"
    run = subprocess.run(
        [sys.executable, REPO / "tools" / "mutation.py", "--out", out], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert survivors(json.loads(out.read_text())["rows"]) <= SPARE
