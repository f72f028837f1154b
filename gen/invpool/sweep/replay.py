"""A crew that remembers: answers come from records, so that a search can be tried where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from invpool.errors import InvpoolError
from invpool.gpu import Gpu
from invpool.spec import PoolSpec
from invpool.sweep.measure import Answer, Measured, MeasurerName, Subject, Task
from invpool.sweep.records import Record, record_key


class ReplayCrew:
    """Answers from the records of one device.

    The digest of a source is not asked for: what is replayed is a search, not kernels.

    Raises:
        InvpoolError: the records hold nothing of the spec.
    """

    size = 1

    def __init__(self, records: Iterable[Record], spec: PoolSpec) -> None:
        own = [record for record in records if record.slug == spec.slug]
        if not own:
            raise InvpoolError(f"there is no record of {spec.slug} to replay")
        self.measurer: MeasurerName = own[0].measurer  # type: ignore[assignment]
        self.device = own[0].device
        self.gpu: Gpu | None = None
        self.provenance: Mapping[str, Any] = {"replayed": True}
        self._records = {self._key(r.direction, r.algorithm, r.plan): r for r in own if r.device == self.device}
        self.asked: list[Record] = []

    @staticmethod
    def _key(direction: str, algorithm: str, plan: Mapping[str, Any]) -> tuple[str, ...]:
        return record_key("", "", "", direction, algorithm, plan, "")

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(Answer(tuple(self._measured(task, subject) for subject in task.subjects)))
        return future

    def _measured(self, task: Task, subject: Subject) -> Measured:
        plan = subject.choice.plan(task.direction)
        record = self._records.get(self._key(task.direction, subject.choice.algorithm.name, plan.knobs))
        if record is None:
            return Measured("runtime", "it is not among the records")
        self.asked.append(record)
        missing = [batch for batch in task.batches if batch not in record.times]
        if record.outcome == "ok" and missing:
            return Measured("runtime", f"the record has no time at B={missing}")
        return Measured(record.outcome, record.reason, record.times, record.errors)

    def close(self) -> None:
        pass
