"""What of the stopwatch needs no GPU, and the Triton peer under Triton's interpreter where Triton is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from helpers import REPO, run_python
from invpool.bench.timing import Call, Failure, GpuStopwatch, Timing


def test_quartiles() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.median_us, timing.lower_quartile_us, timing.upper_quartile_us, timing.samples) == (3, 2, 4, 5)
    assert timing.as_dict() == {"median_us": 3, "lower_quartile_us": 2, "upper_quartile_us": 4, "samples": 5}
    assert Timing.of([1.0, 1.0], host_bound=True).as_dict()["host_bound"] is True


def test_failures_say_what_and_not_too_much() -> None:
    assert Failure.of(ValueError("no such tile\n")).text == "ValueError: no such tile"
    assert len(Failure.of(ValueError("x" * 9999)).text) < 600


INTERPRETED = """
import torch
from invpool.bench import triton_pool
from invpool.reference import norm_error, pool_ref
for H, K, dtype, bound in ((7, 96, torch.float32, 2e-6), (37, 20, torch.float32, 2e-6), (33, 150, torch.float32, 3e-6),
                           (21, 720, torch.float32, 2e-6), (40, 32, torch.float16, 1e-3)):
    x, g = torch.randn(2, H, K).to(dtype), torch.randn(2, H).to(dtype)
    truth = pool_ref(x, g)
    forward, backward = (list(triton_pool.tiles(H, K, x.element_size(), d)) for d in ("forward", "backward"))
    for number in range(0, max(len(forward), len(backward)), 3):
        first, second = forward[number % len(forward)], backward[number % len(backward)]
        leaf = x.clone().requires_grad_()
        out = triton_pool.pool(first, second, "ieee")(leaf)
        (dx,) = torch.autograd.grad(out, leaf, g)
        errors = norm_error(out.detach(), truth.out), norm_error(dx, truth.dx)
        assert errors[0] <= bound and errors[1] <= bound, (H, K, dtype, first, second, errors)
"""


def test_the_triton_peer_is_the_operation(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join([f"{REPO}/gen", os.environ.get("PYTHONPATH", "")])
    run_python(INTERPRETED, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path})


class FakeGpu:
    """Events on a clock that calls move; the first so many spins of a call end before the host is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: int = 0) -> None:
        self.now = 0.0
        self.late = late
        self.spins: list[int] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def query(self) -> bool:
                gpu.late -= 1
                return gpu.late >= 0

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spins.append)

    def stopwatch(self) -> GpuStopwatch:
        stopwatch = GpuStopwatch.__new__(GpuStopwatch)
        stopwatch._flush, stopwatch._sum = torch.zeros(4), torch.zeros(())
        return stopwatch

    def takes(self, milliseconds: float, names: list[str], name: str) -> Call:
        def call() -> None:
            self.now += milliseconds
            names.append(name)

        return call


def test_calls_take_turns_and_a_failing_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, names = FakeGpu(monkeypatch), []
    count = iter(range(100))

    def fails_later() -> None:
        if next(count) > 4:
            raise RuntimeError("gone")

    found = gpu.stopwatch().interleaved(
        {"a": gpu.takes(2, names, "a"), "bad": fails_later, "b": gpu.takes(3, names, "b")}, rounds=8
    )
    assert list(found) == ["a", "bad", "b"]
    assert found["a"] == Timing(2000.0, 2000.0, 2000.0, 8)
    assert found["b"] == Timing(3000.0, 3000.0, 3000.0, 8)
    assert found["bad"] == Failure("RuntimeError: gone")
    assert {"".join(names[first : first + 2]) for first in range(6, len(names), 2)} == {"ab", "ba"}


def test_a_sample_that_the_host_delayed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, names = FakeGpu(monkeypatch, late=5), []
    found = gpu.stopwatch().interleaved({"a": gpu.takes(2, names, "a")}, rounds=8)
    # Three of the five late ones were to be thrown away in any case.
    assert found["a"] == Timing(2000.0, 2000.0, 2000.0, 6)
    assert gpu.spins[5] == pytest.approx(32 * gpu.spins[0], rel=1e-3)
    assert gpu.spins[-1] == gpu.spins[5]


def test_a_call_that_always_waits_for_the_gpu_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, names = FakeGpu(monkeypatch, late=10**6), []
    found = gpu.stopwatch().interleaved({"a": gpu.takes(2, names, "a")}, rounds=20)["a"]
    assert isinstance(found, Timing)
    assert found.host_bound
    assert max(gpu.spins) == 50_000 * 2000
