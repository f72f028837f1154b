"""Times on the present GPU: L2 cold, the host out of the figure, candidates in turns, medians and quartiles."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

Call = Callable[[], object]

# Samples of one candidate, and the seconds that all candidates of a shape may take together; never fewer than the last.
ROUNDS: Final = 30
_BUDGET: Final = 1.5
_FEWEST_ROUNDS: Final = 7
# Rounds that are run first and thrown away: the clock rises, caches of the host fill.
_DISCARDED: Final = 3
_COPY_BYTES: Final = 2**30
# A GPU runs at most this many cycles a microsecond: torch.cuda._sleep counts cycles.
_CYCLES_PER_US: Final = 2000
_SHORTEST_SPIN_US: Final = 50.0
_LONGEST_SPIN_US: Final = 50_000.0
# Launches in a graph, so that the gap between two replays does not count.
GRAPH_LAUNCHES: Final = 128


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call. ``host_bound``: the GPU had to wait for the host, so the figure is the host's."""

    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float
    samples: int
    host_bound: bool = False

    @classmethod
    def of(cls, samples: Sequence[float], host_bound: bool = False) -> Timing:
        """Median and quartiles of at least two samples."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples), host_bound)

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        if not self.host_bound:
            del fields["host_bound"]
        return fields


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a candidate has no figure: a value among the results, so that the others are measured all the same."""

    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The kind of error and the beginning of what it says."""
        return cls(f"{type(error).__name__}: {str(error).strip()[:500]}")


class Stopwatch(Protocol):
    """What the tables ask of a GPU; tests give one that counts instead."""

    l2_bytes: int

    def interleaved(self, calls: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Timing | Failure]:
        """Each call's time, in turns, L2 cold."""

    def replayed(self, calls: Sequence[Call]) -> Timing:
        """Time of one of the calls, launched one after the other by a graph."""

    def peak_extra_bytes(self, call: Call) -> int:
        """The most memory that a call holds beyond what was there before, its results included."""

    def copy_rate(self) -> float:
        """Bytes a second of a large copy, read and written."""


@dataclasses.dataclass
class _Runner:
    """A warmed-up call: how long the GPU must be kept busy while the host queues it."""

    call: Call
    spin_us: float
    seconds: float
    samples: list[float] = dataclasses.field(default_factory=list)

    @property
    def may_spin_longer(self) -> bool:
        return self.spin_us < _LONGEST_SPIN_US


class GpuStopwatch:
    """The stopwatch of torch's current GPU."""

    def __init__(self) -> None:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(properties.L2_cache_size)
        # Reading this leaves nothing of interest in L2, and nothing that would have to be written back later.
        self._flush = torch.zeros(max(3 * self.l2_bytes, 2**26) // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def interleaved(
        self, calls: Mapping[str, Call], rounds: int = ROUNDS, seconds: float = _BUDGET
    ) -> dict[str, Timing | Failure]:
        """Each call's time in turns, the first of a round another each time; a call that fails leaves the race.

        Fewer rounds, but some, where these would take all calls together more than so many seconds.
        """
        outcomes: dict[str, Timing | Failure] = {}
        runners: dict[str, _Runner] = {}
        for name, call in calls.items():
            try:
                runners[name] = self._warmed(call)
            except Exception as error:  # whatever a peer raises is its result
                outcomes[name] = Failure.of(error)
        affordable = int(seconds / max(1e-9, sum(runner.seconds for runner in runners.values())))
        rounds = max(min(rounds, _FEWEST_ROUNDS), min(rounds, affordable))
        for number in range(-min(_DISCARDED, rounds // 2), rounds):
            names = [name for name in runners if name not in outcomes]
            first = number % len(names) if names else 0
            queued: list[tuple[str, float | None, torch.cuda.Event, torch.cuda.Event]] = []
            for name in names[first:] + names[:first]:
                try:
                    queued.append((name, *self._queue(runners[name])))
                except Exception as error:
                    outcomes[name] = Failure.of(error)
            torch.cuda.synchronize()
            for name, late_us, start, end in queued:
                runner = runners[name]
                if late_us is not None and runner.may_spin_longer:
                    runner.spin_us = min(_LONGEST_SPIN_US, late_us)
                elif number >= 0:
                    runner.samples.append(1e3 * start.elapsed_time(end))
        for name, runner in runners.items():
            if name in outcomes:
                continue
            if len(runner.samples) < 2:
                outcomes[name] = Failure("the host was too slow in all rounds to keep the GPU busy")
            else:
                outcomes[name] = Timing.of(runner.samples, host_bound=not runner.may_spin_longer)
        return {name: outcomes[name] for name in calls}

    def _warmed(self, call: Call) -> _Runner:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return _Runner(call, 1.5e6 * host + _SHORTEST_SPIN_US, time.perf_counter() - start + 2 * host + 1e-4)

    def _queue(self, runner: _Runner) -> tuple[float | None, torch.cuda.Event, torch.cuda.Event]:
        """Spin, flush, the call between two events. A spin that ended too early: how long the next should be."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(runner.spin_us * _CYCLES_PER_US))
        torch.sum(self._flush, dim=0, out=self._sum)
        start.record()
        runner.call()
        end.record()
        return (2 * runner.spin_us if start.query() else None), start, end

    def replayed(self, calls: Sequence[Call], replays: int = ROUNDS) -> Timing:
        """Time of one call of a graph that holds them all; each waits for the one before it."""
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        samples = []
        for number in range(-_DISCARDED, replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(4 * _SHORTEST_SPIN_US * _CYCLES_PER_US))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 0:
                samples.append(1e3 * start.elapsed_time(end) / len(calls))
        return Timing.of(samples)

    def peak_extra_bytes(self, call: Call) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before

    def copy_rate(self) -> float:
        source = torch.empty(_COPY_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        timing = self.interleaved({"copy": lambda: target.copy_(source)}, rounds=15)["copy"]
        if isinstance(timing, Failure):
            raise RuntimeError(f"the copy bandwidth cannot be measured: {timing.text}")
        return 2 * _COPY_BYTES / (1e-6 * timing.median_us)
