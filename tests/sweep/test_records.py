"""Records: whole after a kill, never lost or doubled."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import run_processes
from invpool.errors import OutputError
from invpool.sweep.records import Record, RecordFile, read_records

TIMES = {16: {"median_us": 2.0, "lower_quartile_us": 1.9, "upper_quartile_us": 2.1, "reference_us": 3.0}}
RECORD = Record(
    "gpu", "NVIDIA H200", "h9_k20_f32_bhk", "forward", "one_pass", {"rows": 16}, "abc", "ok", "", "ref", TIMES
)


def numbered(number: int) -> Record:
    return dataclasses.replace(RECORD, plan={"rows": number})


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "records.jsonl"
    file = RecordFile(path)
    failed = dataclasses.replace(
        numbered(1), outcome="correctness", reason="dx is off", errors={"dx": None, "out": 0.5}, times={}
    )
    file.append(RECORD)
    file.append(failed)
    assert list(RecordFile(path)) == [RECORD, failed]
    assert RecordFile(path).get(RECORD.key) == RECORD
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"measurer": "counters"},
        {"device": "NVIDIA H100"},
        {"slug": "h9_k20_f64_bhk"},
        {"direction": "backward"},
        {"algorithm": "three_pass"},
        {"plan": {"rows": 32}},
        {"source": "abd"},
    ],
)
def test_d22_the_key_covers_what_decides_the_time(change: dict) -> None:
    assert dataclasses.replace(RECORD, **change).key != RECORD.key


def test_provenance_is_no_part_of_the_key() -> None:
    assert dataclasses.replace(RECORD, provenance={"driver": "1"}).key == RECORD.key


def test_the_last_record_of_a_key_counts_and_its_times_join(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.jsonl")
    file.append(RECORD)
    assert RECORD.covers([16], "ref")
    assert not RECORD.covers([16], "another reference")
    assert not RECORD.covers([16, 4096], "ref")
    file.append(dataclasses.replace(RECORD, times={4096: TIMES[16]}))
    (joined,) = RecordFile(file.path)  # type: ignore[arg-type]
    assert joined.covers([16, 4096], "ref")
    # What was right is not lost to what says nothing of that; to a wrong result it is.
    file.append(dataclasses.replace(RECORD, outcome="timeout", times={}))
    assert list(RecordFile(file.path)) == [joined]
    file.append(dataclasses.replace(RECORD, reference="other"))
    assert [list(record.times) for record in file] == [[16]]
    file.append(dataclasses.replace(RECORD, outcome="correctness", times={}))
    (last,) = file
    assert last.covers([16, 4096, 65536], "ref")
    for outcome in ("runtime", "timeout", "compile"):
        assert not dataclasses.replace(RECORD, outcome=outcome).covers([16], "ref")


@pytest.mark.parametrize("torn", [1, 10, 200])
def test_a_torn_line_never_counted_and_is_gone(tmp_path: Path, torn: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordFile(path)
    file.append(numbered(1))
    whole = path.read_bytes()
    line = numbered(2).line()
    path.write_bytes(whole + line[:torn])
    with caplog.at_level(logging.WARNING):
        again = RecordFile(path)
    assert not caplog.messages
    assert list(again) == [numbered(1)]
    assert path.read_bytes() == whole
    path.write_bytes(whole + line[:torn])  # of another process, while this one has the file
    again.append(numbered(3))
    assert path.read_bytes() == whole + numbered(3).line()


def test_a_first_line_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(RECORD.line()[:-1])
    assert list(RecordFile(path)) == []
    assert path.read_bytes() == b""


def test_foreign_lines_are_passed_over_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.jsonl"
    newer = RECORD.line().replace(b'"schema": 1', b'"schema": 2')
    odd = RECORD.line().replace(b'"outcome": "ok"', b'"outcome": "fine"')
    path.write_bytes(b"{}\nno JSON\n\xff\xfe\n[]\n" + newer + odd + numbered(5).line())
    assert read_records(path) == [numbered(5)]
    (warning,) = caplog.messages
    assert "6 lines" in warning
    assert str(path) in warning


def test_what_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="choose another with --records"):
        RecordFile(tmp_path)
    with pytest.raises(OutputError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_without_a_file_records_are_kept_in_memory() -> None:
    file = RecordFile(None)
    file.append(RECORD)
    assert list(file) == [RECORD]


def _append_many(path: str, first: int) -> None:
    file = RecordFile(Path(path))
    for number in range(first, first + 25):
        file.append(numbered(number))


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert run_processes(_append_many, [(str(path), 25 * n) for n in range(8)]) == [0] * 8
    assert sorted(record.plan["rows"] for record in RecordFile(path)) == list(range(200))
    assert len(path.read_bytes().splitlines()) == 200


def test_a_kill_at_any_point_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    code = (
        "import dataclasses, sys; from pathlib import Path\n"
        "from invpool.sweep.records import Record, RecordFile\n"
        "file = RecordFile(Path(sys.argv[1]))\n"
        "for n in range(100_000):\n"
        "    file.append(Record('gpu', 'd', 's', 'forward', 'a', {'n': n, 'long': 'x' * 3000}, 'abc', 'ok'))\n"
    )
    known = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 20_000):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        file = RecordFile(path)
        numbers = sorted(record.plan["n"] for record in file)
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= max(5, known)
        known = len(numbers)
