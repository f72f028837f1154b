"""What came of every candidate, one JSON line each: appended as it comes, whole after a kill at any point.

A record belongs to (measurer, device, direction, slug, algorithm, plan, digest of the source). Toolkit, driver and
versions are provenance: they are written down and never asked for.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from invpool.errors import OutputError
from invpool.spec import PoolSpec
from invpool.sweep.space import Candidate

log = logging.getLogger("invpool")

_SCHEMA: Final = 1
Outcome = Literal["ok", "compile", "resources", "runtime", "correctness", "timeout"]
FAILURES: Final[tuple[Outcome, ...]] = ("compile", "resources", "runtime", "correctness", "timeout")


@dataclasses.dataclass(frozen=True)
class Record:
    """What came of one candidate.

    Attributes:
        outcome: ``ok``, or the step that failed; ``reason`` says how.
        source: digests of the two kernels that were measured, its own and its partner's.
        reference: digest of the kernel that was timed in turns with it.
        times: by batch: median_us, lower_quartile_us, upper_quartile_us, and ``reference_us``, the median of the
            reference.
        errors: of each check against float64, the error over what is allowed.
        resources: what ptxas gave: registers and spills.
    """

    measurer: str
    device: str
    slug: str
    direction: str
    algorithm: str
    plan: Mapping[str, Any]
    source: str
    outcome: Outcome
    reason: str = ""
    reference: str = ""
    times: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    resources: Mapping[str, int] | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        return record_key(self.measurer, self.device, self.slug, self.direction, self.algorithm, self.plan, self.source)

    def covers(self, batches: Iterable[int], reference: str) -> bool:
        """Whether nothing is left to measure: it cannot be right, or was timed at all batches beside this reference.

        What failed otherwise is tried again by the next sweep: a compiler may be there by then, or a GPU be free.
        """
        if self.outcome != "ok":
            return self.outcome in ("correctness", "resources")
        return self.reference == reference and all(batch in self.times for batch in batches)

    def line(self) -> bytes:
        fields = dataclasses.asdict(self)
        return (json.dumps({"schema": _SCHEMA, **fields}, allow_nan=False, sort_keys=True) + "\n").encode()

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Raises ValueError, KeyError or TypeError for anything but a record of this schema."""
        fields = json.loads(line)
        if fields.pop("schema") != _SCHEMA:
            raise ValueError("another schema")
        times = {int(batch): dict(time) for batch, time in fields.pop("times").items()}
        record = cls(times=times, **fields)
        if record.outcome != "ok" and record.outcome not in FAILURES:
            raise ValueError(f"outcome {record.outcome!r}")
        return record


def record_key(
    measurer: str, device: str, slug: str, direction: str, algorithm: str, plan: Mapping[str, Any], source: str
) -> tuple[str, ...]:
    return measurer, device, slug, direction, algorithm, plan_key(plan), source


def plan_key(plan: Mapping[str, Any]) -> str:
    """A plan's parameters, to look it up by."""
    return json.dumps(dict(plan), sort_keys=True)


def candidate_key(measurer: str, device: str, spec: PoolSpec, candidate: Candidate, digest: str) -> tuple[str, ...]:
    """The key of the record that a candidate would have."""
    return record_key(
        measurer, device, spec.slug, candidate.direction, candidate.algorithm.name, candidate.plan.knobs, digest
    )


class RecordFile:
    """The records of a file, or of none: kept in memory alone. Several processes may append to it at once.

    Raises:
        OutputError: the file cannot be opened or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._records: dict[tuple[str, ...], Record] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _Locked(path) as descriptor:
                _cut_torn_line(descriptor)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}; choose another with --records") from error
        for record in read_records(path):
            self._records[record.key] = record

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: tuple[str, ...]) -> Record | None:
        return self._records.get(key)

    def append(self, record: Record) -> None:
        """Adds a record, on the disk when this returns. Of one key the last one counts.

        Times of other batches join it; what was right and timed is not lost to a failure that says nothing of that.
        """
        old = self._records.get(record.key)
        if old is not None and old.outcome == "ok":
            if record.outcome == "ok" and old.reference == record.reference:
                record = dataclasses.replace(record, times={**old.times, **record.times})
            elif record.outcome not in ("ok", "correctness"):
                return
        self._records[record.key] = record
        if self.path is None:
            return
        try:
            with _Locked(self.path) as descriptor:
                _cut_torn_line(descriptor)  # of another process that was killed meanwhile
                os.write(descriptor, record.line())
                os.fsync(descriptor)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error


def _cut_torn_line(descriptor: int) -> None:
    """A line without its end was being written when its writer was killed: it never counted."""
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


class _Locked:
    """The file open for appending, with nobody else in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> list[Record]:
    """The records of a file, the last one of each key; lines that are none are passed over, with one warning.

    Raises:
        OutputError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    found: dict[tuple[str, ...], Record] = {}
    passed = 0
    for line in lines:
        try:
            record = Record.parse(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            passed += 1
            continue
        found[record.key] = record
    if passed:
        log.warning("%s: %d lines are no records of this schema and are passed over", path, passed)
    return list(found.values())
