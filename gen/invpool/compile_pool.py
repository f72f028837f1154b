"""Compiles many sources at a time, in processes: PyCUDA says by warnings what ptxas used, which threads share."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Final

from invpool.cache import KernelCache
from invpool.compile import Compiled, Target
from invpool.errors import InvpoolError

JOBS_VARIABLE: Final = "MAX_JOBS"
# What nvcc takes for one of our kernels, with room to spare.
_BYTES_PER_JOB: Final = 1 << 30

_cache: KernelCache | None = None


def job_count() -> int:
    """As many compilers as there are cores for this process and memory for them, at most ``$MAX_JOBS``.

    Raises:
        InvpoolError: ``$MAX_JOBS`` is no positive number.
    """
    jobs = min(len(os.sched_getaffinity(0)), max(1, _available_bytes() // _BYTES_PER_JOB))
    most = os.environ.get(JOBS_VARIABLE)
    if most:
        if not most.isdecimal() or int(most) < 1:
            raise InvpoolError(f"{JOBS_VARIABLE} is {most!r}; it must be a number of compilers, at least 1")
        jobs = min(jobs, int(most))
    return jobs


def _available_bytes() -> int:
    """What new processes may take: what the kernel would give, but for the limit of a container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    return available


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
        self._root = root
        self._pool = self._open()

    def _open(self) -> ProcessPoolExecutor:
        # Not forked: the caller may have CUDA or threads in use.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.jobs, context, _open_cache, (self._root,))

    def submit(self, source: str, target: Target) -> Future[Compiled]:
        """The code, or what :meth:`invpool.cache.KernelCache.get` raises, or BrokenExecutor if a process was killed."""
        try:
            return self._pool.submit(_compile, source, target)
        except BrokenExecutor:
            self._pool = self._open()
            return self._pool.submit(_compile, source, target)

    def close(self) -> None:
        """Drops what has not begun; what has is finished, for the cache."""
        self._pool.shutdown(wait=False, cancel_futures=True)
