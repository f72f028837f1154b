"""Compiles many sources at a time, in processes: PyCUDA says by warnings what ptxas used, which threads share."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Final

from invpool.cache import KernelCache
from invpool.compile import Compiled, Target

JOBS_VARIABLE: Final = "MAX_JOBS"
# What nvcc takes for one of our kernels, with room to spare.
_BYTES_PER_JOB: Final = 1 << 30

_cache: KernelCache | None = None


def job_count() -> int:
    """As many compilers as there are cores for this process and memory for them, at most ``$MAX_JOBS``.

    Raises:
        ValueError: ``$MAX_JOBS`` is no positive number.
    """
    jobs = len(os.sched_getaffinity(0))
    jobs = min(jobs, max(1, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _BYTES_PER_JOB))
    most = os.environ.get(JOBS_VARIABLE)
    if most:
        if not most.isdecimal() or int(most) < 1:
            raise ValueError(f"{JOBS_VARIABLE} is {most!r}; it must be a number of compilers, at least 1")
        jobs = min(jobs, int(most))
    return jobs


def _open_cache(root: Path | None) -> None:
    global _cache
    # Ctrl-C is for the parent, which shuts the pool down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _cache = KernelCache(root)


def _compile(source: str, target: Target) -> Compiled:
    assert _cache is not None
    return _cache.get(source, target)


class CompilePool:
    """Processes that compile through the cache. ``jobs`` None takes :func:`job_count`."""

    def __init__(self, root: Path | None = None, jobs: int | None = None) -> None:
        self.jobs = job_count() if jobs is None else jobs
        # Not forked: the caller may have CUDA or threads in use.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self.jobs, context, _open_cache, (root,))

    def submit(self, source: str, target: Target) -> Future[Compiled]:
        """The code, or what :meth:`invpool.cache.KernelCache.get` raises."""
        return self._pool.submit(_compile, source, target)

    def close(self) -> None:
        """Drops what has not begun; what has is finished, for the cache."""
        self._pool.shutdown(wait=False, cancel_futures=True)
