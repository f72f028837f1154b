"""A crew of a Ray cluster: each task asks for one GPU, wherever it is. Needs the extra ``ray``.

Ray tries a task again elsewhere when its node or process dies; a candidate that kills its own worker is charged there,
by the same code as on one host. Hosts need this package and a GPU of the same model; code travels with the task.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from invpool.errors import InvpoolError
from invpool.sweep.crew import TASK_SECONDS, Hello, Post
from invpool.sweep.measure import Answer, MeasurerName, Task

_CONNECT_SECONDS: Final = 10.0
_post: Post | None = None


def _post_of(measurer: MeasurerName, seconds: float) -> Post:
    """The worker of this Ray process, kept from task to task."""
    global _post
    if _post is None:
        # Ray shows a task the GPU that is its own as number 0.
        _post = Post(measurer, 0, seconds)
    return _post


def _hello(measurer: MeasurerName, seconds: float) -> Hello:
    return _post_of(measurer, seconds).worker().hello


def _answer(measurer: MeasurerName, seconds: float, task: dict[str, Any]) -> dict[str, Any]:
    return _post_of(measurer, seconds).answer(Task.parse(task)).as_dict()


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes. Raises InvpoolError where nothing listens at ``host:port``."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise InvpoolError(f"the Ray cluster at {address} cannot be reached: {error}") from error


class RayCrew:
    """Workers of a Ray cluster, as many at a time as it has GPUs.

    Args:
        address: of a running cluster, ``auto``, or ``local`` for one that is started here.
        measurer: ``gpu``, or ``counters``, which asks for one CPU a task instead.
        seconds: a task that takes longer is stopped and charged.

    Raises:
        InvpoolError: Ray is not installed, or the cluster cannot be reached or has no GPU.
    """

    def __init__(self, address: str, measurer: MeasurerName, seconds: float = TASK_SECONDS) -> None:
        # Nothing of what is tuned here is anybody else's business.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise InvpoolError(f"--ray needs Ray ({error}); pip install 'invpool[ray]'") from error
        _require_answer(address)
        self._ray: Any = ray
        self.measurer: MeasurerName = measurer
        self._seconds = seconds
        unit = "GPU" if measurer == "gpu" else "CPU"
        try:
            self._ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
            self.size = int(self._ray.cluster_resources().get(unit, 0))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InvpoolError(f"the Ray cluster at {address} cannot be reached: {error}") from error
        if self.size < 1:
            self._ray.shutdown()
            raise InvpoolError(f"the Ray cluster at {address} has no {unit}")
        options = {"num_gpus": 1} if measurer == "gpu" else {"num_cpus": 1}
        # A process that dies is no candidate's fault here: candidates run in workers of their own.
        remote = self._ray.remote(max_retries=3, **options)
        self._answer = remote(_answer)
        hello: Hello = self._ray.get(remote(_hello).remote(measurer, seconds))
        self.device, self.gpu = hello.device, hello.gpu
        self.provenance: Mapping[str, Any] = {**hello.provenance, "ray": self._ray.__version__}

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        found: Future[Any] = self._answer.remote(self.measurer, self._seconds, task.as_dict()).future()

        def pass_on(done: Future[Any]) -> None:
            try:
                future.set_result(Answer.parse(done.result()))
            except Exception as error:  # Ray gave up: the sweep must hear of it
                future.set_exception(InvpoolError(f"a task was lost: {error}"))

        found.add_done_callback(pass_on)
        return future

    def close(self) -> None:
        self._ray.shutdown()
