"""Those who measure: a worker process a GPU, each with a thread here that hands it tasks and buries it if it dies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final, Protocol

from invpool.errors import InvpoolError
from invpool.gpu import Gpu
from invpool.sweep.measure import Answer, Measured, MeasurerName, Task
from invpool.sweep.records import Outcome

log = logging.getLogger("invpool")

# Of what a dead worker said last, so much is told.
_LAST_WORDS: Final = 2000
_START_SECONDS: Final = 300.0
# A place where so many workers in a row could not be started is given up.
_MOST_FAILED_STARTS: Final = 2
# A task may take so many seconds.
TASK_SECONDS: Final = 120.0


class Crew(Protocol):
    """Whoever answers tasks. ``device``, ``gpu`` and ``provenance`` are those of its GPUs, which are all alike.

    ``gpu`` is None where none is there.
    """

    measurer: MeasurerName
    device: str
    gpu: Gpu | None
    provenance: Mapping[str, Any]
    size: int

    def submit(self, task: Task) -> Future[Answer]:
        """Never fails for what a candidate does: that is part of the answer."""

    def close(self) -> None:
        """Stops everything, at once."""


def charged(task: Task, outcome: Outcome, reason: str) -> Answer:
    """The answer to a task that killed its worker. The reference was fine before: the others are charged."""
    fine = Measured("ok") if len(task.subjects) > 1 else Measured(outcome, reason)
    return Answer((fine, *(Measured(outcome, reason) for _ in task.subjects[1:])))


class WorkerDiedError(InvpoolError):
    """A worker did not start, or died, or took too long. ``killed``: from outside, which no candidate can do."""

    def __init__(self, reason: str, outcome: Outcome = "runtime", killed: bool = False) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome
        self.killed = killed


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a worker says first."""

    device: str
    gpu: Gpu | None
    provenance: Mapping[str, Any]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Hello:
        gpu = None if data["gpu"] is None else Gpu(**data["gpu"])
        return cls(str(data["device"]), gpu, dict(data["provenance"]))


class Worker:
    """One child process. Raises WorkerDiedError where it does not start."""

    def __init__(self, measurer: MeasurerName, device: int) -> None:
        command = [sys.executable, "-m", "invpool.sweep.worker", measurer, str(device)]
        # A group of its own: Ctrl-C is for the sweep, which then stops its workers, compilers and all.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._last_words: collections.deque[bytes] = collections.deque(maxlen=40)
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_answers, self._read_words)]
        for reader in self._readers:
            reader.start()
        try:
            hello = self._receive(_START_SECONDS)
        except WorkerDiedError:
            self.kill()
            raise
        self.hello = Hello.parse(hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words.append(line)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise WorkerDiedError(f"no answer in {seconds:.0f} s", "timeout") from None
        if line is None:
            code = self._process.wait()
            self._readers[1].join(5)
            said = b"".join(self._last_words).decode(errors="replace").strip()[-_LAST_WORDS:]
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"the worker died ({name}){': ' + said if said else ''}"
            raise WorkerDiedError(reason, killed=code == -signal.SIGKILL)
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, task: Task, seconds: float) -> tuple[Answer, bool]:
        """The worker's answer, and whether it can take another task.

        Raises:
            WorkerDiedError: it cannot, and has not answered.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task.as_dict()).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead: receiving says how it died
        said = self._receive(seconds)
        return Answer.parse(said), bool(said["sound"])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class CannotStartError(WorkerDiedError):
    """No worker could be started: no candidate's fault."""


class Post:
    """A place for one worker at a time: whoever dies, or is spoilt, is replaced before the next task."""

    def __init__(self, measurer: MeasurerName, device: int, seconds: float) -> None:
        self._measurer: MeasurerName = measurer
        self.expected: str | None = None  # the device that every worker must have
        self._device, self._seconds = device, seconds
        self._guard = threading.Lock()
        self._closed = False
        self._worker: Worker | None = None

    def worker(self) -> Worker:
        """Whoever is there, or somebody new. Raises CannotStartError where nobody can be started."""
        with self._guard:
            if self._closed:
                raise CannotStartError("the sweep has ended")
            if self._worker is None:
                try:
                    worker = Worker(self._measurer, self._device)
                except WorkerDiedError as error:
                    raise CannotStartError(f"GPU {self._device}: no worker could be started: {error}") from error
                if self.expected not in (None, worker.hello.device):
                    worker.kill()
                    raise CannotStartError(
                        f"GPU {self._device} is {worker.hello.device}, the first one {self.expected}; "
                        "sweep them one by one, with CUDA_VISIBLE_DEVICES"
                    )
                self._worker = worker
            return self._worker

    def answer(self, task: Task) -> Answer:
        """What the worker says, or that it died of the task. One that was killed from outside is replaced once.

        Raises:
            CannotStartError: there is nobody to ask.
        """
        for last_try in (False, True):
            try:
                answer, sound = self.worker().ask(task, self._seconds)
            except CannotStartError:
                raise
            except WorkerDiedError as error:
                self._bury()
                if last_try or not error.killed or self._closed:
                    return charged(task, error.outcome, str(error))
                continue
            if not sound:
                self._bury()
            return answer
        raise AssertionError

    def _bury(self) -> None:
        with self._guard:
            dead, self._worker = self._worker, None
        if dead is not None:
            dead.kill()

    def close(self) -> None:
        self._closed = True
        self._bury()


class LocalCrew:
    """Workers on this host, one for each of ``devices``.

    Args:
        measurer: ``gpu``, or ``counters`` for the emulator.
        devices: GPU numbers; of the counting measurer, each is one more process.
        seconds: a task that takes longer is stopped and charged.

    Raises:
        WorkerDiedError: no worker could be started; says what it said.
    """

    def __init__(self, measurer: MeasurerName, devices: tuple[int, ...] = (0,), seconds: float = TASK_SECONDS) -> None:
        self.measurer: MeasurerName = measurer
        self.size = len(devices)
        self.posts = [Post(measurer, device, seconds) for device in devices]
        first = self.posts[0].worker()
        self.device, self.gpu, self.provenance = first.hello.device, first.hello.gpu, first.hello.provenance
        for post in self.posts:
            post.expected = self.device
        self._manned = len(self.posts)
        self._guard = threading.Lock()
        self._tasks: queue.Queue[tuple[Task, Future[Answer]] | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._serve, args=(post,), daemon=True) for post in self.posts]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._tasks.put((task, future))
        return future

    def _serve(self, post: Post) -> None:
        failed_starts = 0
        while (job := self._tasks.get()) is not None:
            task, future = job
            try:
                future.set_result(post.answer(task))
                failed_starts = 0
            except CannotStartError as error:
                failed_starts += 1
                if failed_starts < _MOST_FAILED_STARTS:
                    self._tasks.put(job)
                elif self._retire(error):
                    self._tasks.put(job)
                    return
                else:
                    future.set_exception(error)
            except Exception as error:  # a fault of ours must not leave the sweep waiting for ever
                future.set_exception(error)

    def _retire(self, error: CannotStartError) -> bool:
        """Whether others are left who can do the work."""
        with self._guard:
            if self._manned == 1:
                return False
            self._manned -= 1
        log.warning("%s; the sweep goes on without it", error)
        return True

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for post in self.posts:
            post.close()
        for thread in self._threads:
            thread.join(10)


def gpu_numbers() -> tuple[int, ...]:
    """The numbers of this host's GPUs, asked of a child process, so that CUDA stays untouched here."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_START_SECONDS)
    return tuple(range(int(run.stdout.strip() or 0))) if run.returncode == 0 else ()
