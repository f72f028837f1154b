"""The process that measures: ``python -m invpool.sweep.worker gpu 0``. One JSON line a task in, one line an answer out.

It has a CUDA context of its own: whatever a candidate does to it, neither the sweep nor the other candidates see it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import queue
import sys
import threading
from typing import Any, Final


def _answer(stream: Any, data: dict[str, Any]) -> None:
    stream.write(json.dumps(data, allow_nan=False) + "\n")
    stream.flush()


def _tasks() -> queue.SimpleQueue[str | None]:
    """The lines of stdin. When it ends while one is being worked on, the parent is dead: nobody wants the answer."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            _is_busy.set()  # until it is answered
            found.put(line)
        if _is_busy.is_set():
            os._exit(1)  # a kernel may never end
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


_is_busy: Final = threading.Event()


def serve(measurer_name: str, device: int) -> int:
    """Answers tasks until there are no more."""
    from invpool.sweep.measure import MEASURERS, Task, measure

    # Only answers go to stdout; whatever else writes there goes to stderr, where the parent looks when this dies.
    answers = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8")
    os.dup2(2, 1)
    measurer = MEASURERS[measurer_name](device)  # type: ignore[index,call-arg]
    gpu = None if measurer.gpu is None else dataclasses.asdict(measurer.gpu)
    _answer(answers, {"device": measurer.device, "provenance": measurer.provenance, "gpu": gpu})
    for line in iter(_tasks().get, None):
        answer = measure(measurer, Task.parse(json.loads(line)))
        _is_busy.clear()
        _answer(answers, answer.as_dict() | {"sound": measurer.is_sound()})
    with contextlib.suppress(RuntimeError):
        measurer.close()
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2])))
