"""A real Ray cluster on this host, whose workers count on the emulator."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_crew import task

from invpool.errors import InvpoolError
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.crew import LocalCrew
from invpool.sweep.model import Budget, SweepRequest
from invpool.sweep.ray_crew import RayCrew
from invpool.sweep.records import RecordFile
from invpool.sweep.session import Session

pytestmark = pytest.mark.slow
REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two CPUs; Ray's own processes import what this one can."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = ["start", "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    subprocess.run([*ray, *start], check=True, env=environment, capture_output=True, timeout=300)
    try:
        yield "auto"
    finally:
        subprocess.run([*ray, "stop", "--force"], check=False, capture_output=True, timeout=120)


@contextlib.contextmanager
def crew_of(address: str) -> Iterator[RayCrew]:
    crew = RayCrew(address, "counters")
    try:
        yield crew
    finally:
        crew.close()


def ray_workers() -> list[int]:
    """The processes of Ray that answer our tasks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::_answer"):
                found.append(int(folder.name))
    return found


def test_a_cluster_finds_what_one_host_finds(cluster: str, tmp_path: Path) -> None:
    request = SweepRequest(
        PoolSpec(9, 20), KNOWN_GPUS["h200"], batches=(16, 4096), algorithms=("one_pass_mma",), budget=Budget(6)
    )
    local = LocalCrew("counters")
    try:
        alone = Session(request, local, RecordFile(tmp_path / "alone.jsonl")).run()
    finally:
        local.close()
    with crew_of(cluster) as crew:
        assert crew.size == 2
        together = Session(request, crew, RecordFile(tmp_path / "together.jsonl")).run()
    assert len(RecordFile(tmp_path / "together.jsonl")) == 6
    assert alone.table is not None
    assert together.table is not None
    assert together.device == alone.device
    assert together.table.provenance["ray"]
    assert [row.batch for row in together.table.rows] == [16, 4096]
    assert [row.choice.algorithm for row in together.table.rows] == [row.choice.algorithm for row in alone.table.rows]


def test_a_worker_killed_in_mid_task_is_retried_and_nothing_is_lost(cluster: str) -> None:
    with crew_of(cluster) as crew:
        futures: list[Any] = [crew.submit(task(64, registers)) for registers in (96, 128, 168, 255)]
        deadline, killed = time.monotonic() + 120, 0
        while not killed and time.monotonic() < deadline and not all(future.done() for future in futures):
            for pid in ray_workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.05)
        answers = [future.result(300) for future in futures]
    assert killed
    for answer in answers:
        assert [one.outcome for one in answer.subjects] == ["ok", "ok"]
        assert set(answer.subjects[1].times) == {16, 65536}


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvpoolError, match=r"the Ray cluster at 127\.0\.0\.1:1 cannot be reached"):
        RayCrew("127.0.0.1:1", "counters")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvpoolError, match=r"pip install 'invpool\[ray\]'"):
        RayCrew("auto", "counters")
