"""Workers: what a candidate does to one is charged to that candidate alone, and the sweep goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from invpool.algorithms import Choice, choose, find_algorithm
from invpool.check import Finding
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.crew import CannotStartError, LocalCrew, Post, Worker, WorkerDiedError, charged
from invpool.sweep.measure import NOT_MEASURED, Answer, CountingMeasurer, Measured, Subject, Task, _looping, measure

H200 = KNOWN_GPUS["h200"]
SPEC = PoolSpec(9, 20)
ONE_PASS = find_algorithm("one_pass")


def choice_of(registers: int) -> Choice:
    plans = [
        next(p for p in ONE_PASS.legal(SPEC, H200, d) if p.knobs["registers"] == 64) for d in ("forward", "backward")
    ]
    return Choice(ONE_PASS, *(dataclasses.replace(plan, registers=registers) for plan in plans))


def task(*registers: int, direction: str = "forward") -> Task:
    subjects = tuple(Subject(choice_of(number)) for number in registers)
    return Task(SPEC, H200, direction, subjects, (16, 65536))  # type: ignore[arg-type]


def test_tasks_and_answers_survive_the_way() -> None:
    coded = dataclasses.replace(task(64), subjects=(Subject(choice_of(64), {"forward": b"\0\xff", "backward": b"b"}),))
    for one in (task(64, 96), coded):
        assert Task.parse(one.as_dict()) == one
    answer = Answer((Measured("ok", times={16: {"median_us": 1.0}}), Measured("timeout", "no")), {16: 9.0})
    assert Answer.parse(answer.as_dict()) == answer


def test_a_crew_answers_and_what_it_says_is_in_order() -> None:
    crew = LocalCrew("counters", (0, 1))
    try:
        answers = [future.result(200) for future in [crew.submit(task(64, 96)) for _ in range(3)]]
    finally:
        crew.close()
    assert crew.device.startswith("emulator")
    assert crew.gpu is None
    for answer in answers:
        assert [one.outcome for one in answer.subjects] == ["ok", "ok"]
        assert answer == answers[0]
        time = answer.subjects[1].times[65536]
        assert time["reference_us"] == answer.subjects[0].times[65536]["median_us"]
        assert time["lower_quartile_us"] == time["median_us"] > answer.subjects[1].times[16]["median_us"]
        assert all(share is not None and share <= 1 for share in answer.subjects[0].errors.values())


@pytest.mark.slow
def test_a_candidate_that_kills_its_worker_is_charged_and_the_next_has_another(plant) -> None:
    plant({("backward", 96): "ends its process"})
    crew = LocalCrew("counters")
    try:
        deadly, fine = crew.submit(task(64, 96, direction="backward")), crew.submit(task(64, 64))
        assert [one.outcome for one in deadly.result(200).subjects] == ["ok", "runtime"]
        assert "the worker died (SIGABRT)" in deadly.result().subjects[1].reason
        assert [one.outcome for one in fine.result(200).subjects] == ["ok", "ok"]
    finally:
        crew.close()


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_what_a_candidate_does_is_charged_to_it_alone(plant, direction: str) -> None:
    plant(
        {
            (direction, 96): "reads what is not there",
            (direction, 128): "does not compile",
            (direction, 168): "writes NaN",
            (direction, 255): "skips a tile",
        }
    )
    crew = LocalCrew("counters")
    try:
        found = {
            registers: crew.submit(task(64, registers, direction=direction)).result(200)
            for registers in (96, 128, 168, 255, 64)
        }
    finally:
        crew.close()
    outcomes = {registers: [one.outcome for one in answer.subjects] for registers, answer in found.items()}
    assert outcomes == {
        96: ["ok", "runtime"],
        128: ["ok", "compile"],
        168: ["ok", "correctness"],
        255: ["ok", "correctness"],
        64: ["ok", "ok"],
    }
    assert "Segmentation fault" in found[96].subjects[1].reason
    assert "error" in found[128].subjects[1].reason
    nan = found[168].subjects[1]
    assert "nan" in nan.reason
    assert None in nan.errors.values()
    assert "allowed" in found[255].subjects[1].reason
    for registers in (168, 255):
        assert not found[registers].subjects[1].times  # what is wrong is never timed


@pytest.mark.slow
def test_a_candidate_that_never_ends_is_stopped(plant) -> None:
    plant({("forward", 128): "never ends"})
    crew = LocalCrew("counters", seconds=60)
    try:
        crew.submit(task(64)).result(200)
        started = time.monotonic()
        stuck, fine = crew.submit(task(64, 128)), crew.submit(task(64, 96))
        assert [one.outcome for one in stuck.result(200).subjects] == ["ok", "timeout"]
        assert "no answer in 60 s" in stuck.result().subjects[1].reason
        assert [one.outcome for one in fine.result(200).subjects] == ["ok", "ok"]
        assert time.monotonic() - started >= 60
    finally:
        crew.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_from_outside_is_replaced_and_its_task_done(plant) -> None:
    plant({("forward", 128): "never ends"})
    post = Post("counters", 0, 120)
    assert [one.outcome for one in post.answer(task(64, 96)).subjects] == ["ok", "ok"]  # built, from here on
    first = post.worker()

    def kill_soon() -> None:
        time.sleep(3)
        os.kill(first.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_soon)
    killer.start()
    short = Post("counters", 0, 45)
    short._worker = first
    answer = short.answer(task(64, 128))  # the second worker is not killed, and runs into the limit
    killer.join()
    assert [one.outcome for one in answer.subjects] == ["ok", "timeout"]
    assert [one.outcome for one in short.answer(task(64, 96)).subjects] == ["ok", "ok"]
    short.close()
    post.close()


@pytest.mark.slow
def test_a_worker_whose_sweep_is_gone_ends_itself(plant) -> None:
    plant({("forward", 128): "never ends"})
    worker = Worker("counters", 0)
    process = worker._process
    assert process.stdin is not None
    process.stdin.write(json.dumps(task(128).as_dict()).encode() + b"\n")
    process.stdin.flush()
    time.sleep(1)
    process.stdin.close()  # as the system does when the parent dies
    try:
        assert process.wait(120) == 1
    finally:
        worker.kill()


def test_a_spoilt_worker_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post("counters", 0, 60)
    monkeypatch.setattr(Worker, "ask", lambda self, task, seconds: (charged(task, "runtime", "spoilt"), False))
    first = post.worker().pid
    assert post.answer(task(64)).subjects[0].reason == "spoilt"
    assert post.worker().pid != first
    post.close()
    with pytest.raises(WorkerDiedError, match="has ended"):
        post.worker()


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", "/nonexistent")
    monkeypatch.setenv("INVPOOL_CXX", "/nonexistent/g++")
    with pytest.raises(CannotStartError, match=r"(?s)GPU 0: no worker could be started.*exit code 1.*g\+\+"):
        LocalCrew("counters")


def test_a_place_where_nobody_starts_is_given_up_and_no_candidate_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = LocalCrew("counters", (0, 1))
    broken = CannotStartError("GPU 1 is busy")

    def fine(task: Task) -> Answer:
        time.sleep(0.02)
        return Answer(tuple(Measured("ok") for _ in task.subjects))

    def never(task: Task) -> Answer:
        raise broken

    monkeypatch.setattr(crew.posts[0], "answer", fine)
    monkeypatch.setattr(crew.posts[1], "answer", never)
    answers = [crew.submit(task(64, 96)) for _ in range(20)]
    assert all([one.outcome for one in answer.result(60).subjects] == ["ok", "ok"] for answer in answers)
    monkeypatch.setattr(crew.posts[0], "answer", never)
    with pytest.raises(CannotStartError, match="GPU 1 is busy"):
        crew.submit(task(64)).result(60)
    crew.close()


def test_a_worker_of_another_device_is_not_taken() -> None:
    post = Post("counters", 0, 60)
    post.expected = "NVIDIA H200"
    with pytest.raises(CannotStartError, match="the first one NVIDIA H200; sweep them one by one"):
        post.worker()
    post.close()


def test_after_a_spoilt_context_nobody_else_is_charged() -> None:
    class Spoilt:
        device, gpu, provenance = "d", None, {}

        def __init__(self) -> None:
            self.asked = 0

        def findings(self, task: Task, subject: Subject) -> list[Any]:
            self.asked += 1
            if self.asked == 2:
                raise RuntimeError("an illegal memory access was encountered")
            return [Finding("out normal", 0.0, 1.0, "float64")]

        def times(self, *_: Any) -> Any:
            raise AssertionError("nothing can be timed in a spoilt context")

        def is_sound(self) -> bool:
            return self.asked < 2

        def close(self) -> None: ...

    answer = measure(Spoilt(), task(64, 96, 128))
    assert [one.outcome for one in answer.subjects] == ["ok", "runtime", "runtime"]
    assert "illegal memory access" in answer.subjects[1].reason
    assert answer.subjects[2].reason == NOT_MEASURED


def test_counted_kernels_of_two_specs_are_not_mixed_up() -> None:
    measurer, choice = CountingMeasurer(), choice_of(64)
    pools = [measurer._pool(spec, choice) for spec in (SPEC, PoolSpec(10, 20), SPEC)]
    assert pools[0] is pools[2]
    assert [pool.spec for pool in pools] == [SPEC, PoolSpec(10, 20), SPEC]


def test_persistent_kernels_are_checked_with_blocks_that_go_from_item_to_item() -> None:
    choice = choose(PoolSpec(33, 20), H200, "one_pass_mma")
    assert choice.forward.knobs["most_blocks"] > 8
    looping = _looping(choice)
    assert looping.forward.knobs == choice.forward.knobs | {"most_blocks": 2}
    assert looping.algorithm.launch(PoolSpec(33, 20), looping.backward).blocks(100) == 2
    assert _looping(choice_of(64)) == choice_of(64)


def test_a_lonely_task_that_kills_its_worker_is_charged_itself() -> None:
    assert [one.outcome for one in charged(task(64), "runtime", "no").subjects] == ["runtime"]
    assert [one.outcome for one in charged(task(64, 80, 96), "runtime", "no").subjects] == ["ok", "runtime", "runtime"]
