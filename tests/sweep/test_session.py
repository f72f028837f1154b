"""A sweep from beginning to end, with a crew that makes its times up: what is tried, recorded, chosen and told."""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from invpool.abi import DIRECTIONS
from invpool.algorithms import Choice, choose, find_algorithm
from invpool.compile import Compiled, Resources, Target
from invpool.errors import CompileError, InvpoolError
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.measure import Answer, Measured, Task, sort_batches
from invpool.sweep.model import Budget, Progress, SweepError, SweepRequest, SweepResult
from invpool.sweep.records import RecordFile
from invpool.sweep.replay import ReplayCrew
from invpool.sweep.session import Session
from invpool.sweep.space import Candidate, list_space
from invpool.tuned import TUNED_VARIABLE, read_table, write_table

H200 = KNOWN_GPUS["h200"]
SPEC = PoolSpec(33, 20)
DEFAULT = choose(SPEC, H200)
# Seconds by (algorithm, plan, batch) of one direction; None: it is wrong.
Rule = Callable[[Choice, str, int], float | None]


_list_space = functools.lru_cache(list_space)
_seconds = functools.lru_cache(maxsize=None)(Candidate.seconds)


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNED_VARIABLE, str(tmp_path / "tuned"))
    # What would take the time here: to render every candidate, and to list and predict the same space again and again.
    monkeypatch.setattr("invpool.sweep.session.source_digest", lambda algorithm, spec, plan: f"{algorithm.name} {plan}")
    monkeypatch.setattr("invpool.sweep.session.list_space", _list_space)
    monkeypatch.setattr(Candidate, "seconds", _seconds)


class MadeUpCrew:
    """Times by a rule; ``drift`` makes everything slower from task to task, as a GPU that grows hot does."""

    measurer, device, gpu, provenance, size = "gpu", "NVIDIA H200", H200, {"driver": "1"}, 1

    def __init__(self, rule: Rule, drift: float = 0.0, spread: float = 0.001) -> None:
        self.rule, self.drift, self.spread = rule, drift, spread
        self.tasks: list[Task] = []
        self.stop_after: int | None = None

    def submit(self, task: Task) -> Future[Answer]:
        if self.stop_after is not None and len(self.tasks) >= self.stop_after:
            raise KeyboardInterrupt
        self.tasks.append(task)
        slower = 1 + self.drift * len(self.tasks)
        measured = []
        for subject in task.subjects:
            times: dict[int, dict[str, float]] = {}
            for batch in task.batches:
                seconds = self.rule(subject.choice, task.direction, batch)
                if seconds is None:
                    break
                median = 1e6 * seconds * slower
                times[batch] = {
                    "median_us": median,
                    "lower_quartile_us": median * (1 - self.spread),
                    "upper_quartile_us": median * (1 + self.spread),
                }
            right = len(times) == len(task.batches)
            measured.append(Measured("ok", times=times) if right else Measured("correctness", "dx normal: error nan"))
        for batch, of_reference in measured[0].times.items():
            measured = [
                dataclasses.replace(
                    one, times={**one.times, batch: {**one.times[batch], "reference_us": of_reference["median_us"]}}
                )
                if batch in one.times
                else one
                for one in measured
            ]
        composite = dict.fromkeys(task.batches, 1000000.0) if task.composite else {}
        future: Future[Answer] = Future()
        future.set_result(Answer(tuple(measured), composite))
        return future

    def close(self) -> None: ...


def predicted(choice: Choice, direction: str, batch: int) -> float:
    plan = choice.plan(direction)  # type: ignore[arg-type]
    return choice.algorithm.cost(SPEC, plan, H200, batch).seconds(H200)


def favouring(algorithm: str, factor: float = 0.25) -> Rule:
    """As predicted, but for one algorithm, which takes a part of that."""
    return lambda choice, d, b: predicted(choice, d, b) * (factor if choice.algorithm.name == algorithm else 1.0)


def request_of(**changes: Any) -> SweepRequest:
    return SweepRequest(**{"spec": SPEC, "gpu": H200, "batches": (16, 4096), "budget": Budget(60), **changes})


def sweep(crew: Any, records: RecordFile | None = None, **changes: Any) -> SweepResult:
    return Session(request_of(**changes), crew, RecordFile(None) if records is None else records).run()


def test_the_fastest_plans_are_found_and_become_rows() -> None:
    result = sweep(MadeUpCrew(favouring("one_pass_wgmma")))
    assert result.table is not None
    assert [row.batch for row in result.table.rows] == [16, 4096]
    for row in result.table.rows:
        assert row.choice.algorithm.name == "one_pass_wgmma"
        for d in DIRECTIONS:
            ranked = [
                c.seconds(SPEC, H200, row.batch) for c in list_space(SPEC, H200, d, ["one_pass_wgmma"]).candidates
            ]
            assert predicted(row.choice, d, row.batch) == pytest.approx(min(ranked), rel=0.05)
            evidence = row.evidence[d]
            assert evidence["gain"] > 0.5 > evidence["spread"]
            assert evidence["composite_us"] == 1e6
            assert evidence["reference_us"] > evidence["median_us"]
    assert result.table.provenance == {"invpool": result.table.provenance["invpool"], "measurer": "gpu", "driver": "1"}
    assert result.table.device == "NVIDIA H200"


def test_the_reference_is_timed_beside_every_candidate_and_drift_cancels() -> None:
    crew = MadeUpCrew(favouring("one_pass_mma", 0.9), drift=0.05)
    result = sweep(crew)
    assert all(task.subjects[0].choice == DEFAULT for task in crew.tasks)
    steady = sweep(MadeUpCrew(favouring("one_pass_mma", 0.9)))
    assert result.table is not None
    assert steady.table is not None
    for row, same in zip(result.table.rows, steady.table.rows, strict=True):
        assert row.choice.algorithm == same.choice.algorithm
        for d in DIRECTIONS:  # of plans that are predicted alike, any will do
            assert predicted(row.choice, d, row.batch) == pytest.approx(predicted(same.choice, d, row.batch))


def test_the_incumbent_stays_unless_the_gain_exceeds_the_spread() -> None:
    best = DEFAULT.algorithm.name

    def rule(choice: Choice, direction: str, batch: int) -> float:
        return 1e-3 if choice == DEFAULT or choice.plan(direction) == DEFAULT.plan(direction) else 0.97e-3  # type: ignore[arg-type]

    noisy = sweep(MadeUpCrew(rule, spread=0.02), algorithms=(best,))
    assert [verdict.kept for verdict in noisy.verdicts] == [True] * 4
    assert noisy.verdicts[0].choice == DEFAULT
    assert noisy.verdicts[0].gain == pytest.approx(0.03)
    assert noisy.verdicts[0].spread == pytest.approx(0.04)
    quiet = sweep(MadeUpCrew(rule, spread=0.01), algorithms=(best,))
    assert [verdict.kept for verdict in quiet.verdicts] == [False] * 4
    assert quiet.table is not None
    write_table(quiet.table)
    # What was stored is the incumbent of the next sweep.
    again = sweep(MadeUpCrew(rule, spread=0.01), algorithms=(best,))
    assert [verdict.choice for verdict in again.verdicts] == [verdict.choice for verdict in quiet.verdicts]
    assert [verdict.kept for verdict in again.verdicts] == [True] * 4


def _failing_finals(crew: MadeUpCrew, fails: Callable[[Task, int], str]) -> None:
    """Comparisons at the end go wrong: what comes of the subject at each place."""
    plain = crew.submit

    def submit(task: Task) -> Future[Answer]:
        future = plain(task)
        if not task.composite:
            return future
        outcomes = [fails(task, place) for place in range(len(task.subjects))]
        subjects = tuple(
            one if outcome == "ok" else Measured(outcome, "no")  # type: ignore[arg-type]
            for one, outcome in zip(future.result().subjects, outcomes, strict=True)
        )
        other: Future[Answer] = Future()
        other.set_result(Answer(subjects))
        return other

    crew.submit = submit  # type: ignore[method-assign]


def test_what_cannot_be_compared_does_not_win() -> None:
    crew = MadeUpCrew(favouring("one_pass_wgmma"))
    _failing_finals(crew, lambda task, place: "timeout")
    assert [verdict.kept for verdict in sweep(crew).verdicts] == [True] * 4
    # The best fails alone: the next best, which can be compared, is taken.
    crew = MadeUpCrew(favouring("one_pass_wgmma"))
    _failing_finals(crew, lambda task, place: "runtime" if place == 1 and len(task.subjects) > 3 else "ok")
    result = sweep(crew)
    assert {verdict.choice.algorithm.name for verdict in result.verdicts} == {"one_pass_wgmma"}


def test_an_incumbent_that_fails_is_replaced() -> None:
    def rule(choice: Choice, direction: str, batch: int) -> float | None:
        fails = choice.algorithm is DEFAULT.algorithm and choice.plan(direction) == DEFAULT.plan(direction)  # type: ignore[arg-type]
        return None if fails else 1e-3

    result = sweep(MadeUpCrew(rule))
    assert not any(verdict.kept for verdict in result.verdicts)


def test_one_direction_of_an_algorithm_that_the_other_is_not_of_is_refused() -> None:
    with pytest.raises(SweepError, match="leave --algorithm out"):
        sweep(MadeUpCrew(predicted), directions=("forward",), algorithms=("three_pass",))


def test_a_direction_with_nothing_right_is_an_error() -> None:
    with pytest.raises(SweepError, match="none for each direction|can be used"):
        sweep(MadeUpCrew(lambda c, d, b: predicted(c, d, b) if d == "forward" else None))
    with pytest.raises(SweepError, match="raise --budget"):
        sweep(MadeUpCrew(predicted), budget=Budget(1))


def test_rows_of_other_batches_are_not_lost_to_another_kind_of_state() -> None:
    first = sweep(MadeUpCrew(favouring("one_pass_wgmma")), batches=(16, 65536))
    assert first.table is not None
    write_table(first.table)
    second = sweep(MadeUpCrew(favouring("three_pass", 0.01)), batches=(256,))
    assert second.table is not None
    kept = read_table(write_table(second.table))
    assert kept is not None
    assert [row.batch for row in kept.rows] == [16, 256, 65536]


def test_another_reference_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    sweep(MadeUpCrew(predicted), RecordFile(path), budget=Budget(10))
    lines = path.read_text().replace('"reference": "', '"reference": "0')
    path.write_text(lines)
    crew = MadeUpCrew(predicted)
    sweep(crew, RecordFile(path), budget=Budget(10))
    assert len([task for task in crew.tasks if not task.composite]) == 10


def test_a_failure_at_another_batch_leaves_what_is_known_and_counts_now(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = sweep(MadeUpCrew(predicted), RecordFile(path), batches=(16,), budget=Budget(10))
    crew = MadeUpCrew(predicted)
    plain = crew.submit

    def submit(task: Task) -> Future[Answer]:
        future = plain(task)
        if task.composite or task.subjects[1].choice == DEFAULT:
            return future
        failed: Future[Answer] = Future()
        failed.set_result(Answer((future.result().subjects[0], Measured("timeout", "no answer"))))
        return failed

    crew.submit = submit  # type: ignore[method-assign]
    second = sweep(crew, RecordFile(path), batches=(16, 4096), budget=Budget(10))
    assert second.failures["timeout"] == 8
    assert {verdict.choice for verdict in second.verdicts} == {DEFAULT}
    assert len([record for record in RecordFile(path) if record.outcome == "ok"]) == len(first.records)


def test_what_failed_for_want_of_something_is_tried_again_and_what_is_wrong_is_not(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    sweep(MadeUpCrew(predicted), RecordFile(path), budget=Budget(8))
    text = path.read_text().splitlines()
    outcomes = ["runtime", "timeout", "compile", "correctness"]
    lines = [line.replace('"outcome": "ok"', f'"outcome": "{o}"') for line, o in zip(text[-4:], outcomes, strict=True)]
    path.write_text("\n".join(text[:-4] + lines) + "\n")
    crew = MadeUpCrew(predicted)
    sweep(crew, RecordFile(path), budget=Budget(8))
    assert len([task for task in crew.tasks if not task.composite]) == 3


class SlowCrew(MadeUpCrew):
    """Answers when nobody asks any more: many candidates are on their way at a time."""

    size = 6

    def submit(self, task: Task) -> Future[Answer]:
        done = super().submit(task)
        later: Future[Answer] = Future()
        threading.Timer(0.01, lambda: later.set_result(done.result())).start()
        return later


def test_a_sweep_with_many_on_their_way_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    sweep(SlowCrew(favouring("one_pass_wgmma")), RecordFile(path), budget=Budget(30))
    assert len(RecordFile(path)) == 30
    crew = SlowCrew(favouring("one_pass_wgmma"))
    again = sweep(crew, RecordFile(path), budget=Budget(30))
    assert all(task.composite for task in crew.tasks)
    assert len(again.records) == len(RecordFile(path)) == 30


def test_ctrl_c_before_anything_is_no_error() -> None:
    crew = MadeUpCrew(predicted)
    crew.stop_after = 0
    result = sweep(crew)
    assert result.interrupted
    assert result.verdicts == ()
    assert result.table is None


def test_a_reference_that_does_not_compile_ends_the_sweep_with_its_own_error(tmp_path: Path) -> None:
    def compiled(source: str) -> Compiled:
        raise CompileError("kernel.cu(9): error: the reference")

    path = tmp_path / "records.jsonl"
    with pytest.raises(CompileError, match="the reference"):
        Session(request_of(), MadeUpCrew(predicted), RecordFile(path), _Pool(compiled)).run()  # type: ignore[arg-type]
    assert len(RecordFile(path)) == 0


def test_all_rows_have_one_kind_of_state_and_no_batch_loses() -> None:
    """One kind is far better at one batch, the other one at the other: the package cannot have both."""
    states = {name: find_algorithm(name).state(SPEC) for name in ("one_pass_wgmma", "three_pass")}
    assert len(set(states.values())) == 2

    def rule(choice: Choice, direction: str, batch: int) -> float:
        favoured = {16: "three_pass", 4096: "one_pass_wgmma"}[batch]
        return 1e-3 if choice.algorithm.name == favoured else 2e-3 if choice == DEFAULT else 4e-3

    result = sweep(MadeUpCrew(rule))
    assert result.table is not None
    assert len({row.choice.algorithm.state(SPEC) for row in result.table.rows}) == 1
    for verdict in result.verdicts:
        assert verdict.time["median_us"] <= 1e6 * rule(DEFAULT, verdict.direction, verdict.batch)


def test_what_is_slower_than_an_incumbent_of_another_kind_is_not_taken() -> None:
    """The algorithms that were asked for leave another state than today's, and lose: all stays as it is."""
    other = next(
        n for n in ("three_pass", "one_pass") if find_algorithm(n).state(SPEC) != DEFAULT.algorithm.state(SPEC)
    )
    result = sweep(MadeUpCrew(lambda c, d, b: 1e-3 if c == DEFAULT else 5e-3), algorithms=(other,))
    assert [verdict.choice for verdict in result.verdicts] == [DEFAULT] * 4
    assert all(verdict.kept and verdict.gain < 0 for verdict in result.verdicts)
    assert all(verdict.time["median_us"] == pytest.approx(1e3) for verdict in result.verdicts)


def test_a_wrong_plan_never_wins_however_fast() -> None:
    def rule(choice: Choice, direction: str, batch: int) -> float | None:
        return None if choice.algorithm.name == "one_pass_wgmma" else predicted(choice, direction, batch)

    result = sweep(MadeUpCrew(rule), algorithms=("one_pass_wgmma", "one_pass_mma"))
    assert {row.choice.algorithm.name for row in result.table.rows} == {"one_pass_mma"}  # type: ignore[union-attr]
    assert result.failures["correctness"] > 4


def test_nothing_right_is_an_error_with_the_reasons_and_no_table() -> None:
    with pytest.raises(SweepError, match=r"none of \d+ candidates can be used \(\d+ correctness\)") as error:
        sweep(MadeUpCrew(lambda *_: None))
    assert "dx normal: error nan" in str(error.value)
    assert "one_pass" in str(error.value)


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    rule, path = favouring("one_pass_wgmma"), tmp_path / "records.jsonl"
    whole = sweep(MadeUpCrew(rule), RecordFile(tmp_path / "other.jsonl"))
    stopped = MadeUpCrew(rule)
    stopped.stop_after = 25
    first = sweep(stopped, RecordFile(path))
    assert first.interrupted
    assert first.table is None
    assert len(first.verdicts) == 4
    assert len(RecordFile(path)) == 25
    crew = MadeUpCrew(rule)
    second = sweep(crew, RecordFile(path))
    searched = [task for task in crew.tasks if not task.composite]
    assert len(searched) == len(whole.records) - 25 > 10
    assert second.table is not None
    assert whole.table is not None
    assert [row.choice for row in second.table.rows] == [row.choice for row in whole.table.rows]
    third = MadeUpCrew(rule)
    sweep(third, RecordFile(path))
    assert all(task.composite for task in third.tasks)


def test_another_batch_is_measured_and_what_is_known_stays(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    sweep(MadeUpCrew(predicted), RecordFile(path), batches=(16,), budget=Budget(10))
    crew = MadeUpCrew(predicted)
    sweep(crew, RecordFile(path), batches=(16, 4096), budget=Budget(10))
    assert len([task for task in crew.tasks if not task.composite]) == 10
    assert all(set(record.times) == {16, 4096} for record in RecordFile(path) if 4096 in record.times)


def test_one_direction_alone_keeps_the_other_and_its_algorithm() -> None:
    result = sweep(
        MadeUpCrew(lambda c, d, b: predicted(c, d, b) * (0.5 if c != DEFAULT else 1)), directions=("forward",)
    )
    assert {verdict.direction for verdict in result.verdicts} == {"forward"}
    assert result.table is not None
    for row in result.table.rows:
        assert row.choice.algorithm.name == DEFAULT.algorithm.name
        assert row.choice.backward == DEFAULT.backward


def test_what_another_sweep_found_can_be_timed_alone() -> None:
    found = sweep(MadeUpCrew(favouring("one_pass_wgmma")))
    extra = tuple(
        Candidate(verdict.choice.algorithm, verdict.choice.plan(verdict.direction), asked_for=True)
        for verdict in found.verdicts
    )
    crew = MadeUpCrew(favouring("one_pass_wgmma"))
    again = sweep(crew, extra=extra, only_extra=True)
    assert [verdict.choice for verdict in again.verdicts] == [verdict.choice for verdict in found.verdicts]
    assert len(again.records) < 20 < len(found.records)


def test_the_budget_counts_candidates() -> None:
    crew = MadeUpCrew(predicted)
    result = sweep(crew, budget=Budget(17))
    assert len(result.records) == 17
    assert len([task for task in crew.tasks if not task.composite]) == 17


def test_all_is_all() -> None:
    result = sweep(MadeUpCrew(predicted), algorithms=("one_pass",), budget=Budget.parse("all"), batches=(16,))
    spaces = [list_space(SPEC, H200, d, ["one_pass"]) for d in DIRECTIONS]
    assert len(result.records) == sum(len(space.candidates) for space in spaces)


def test_progress_is_told() -> None:
    seen: list[Progress] = []
    Session(
        request_of(budget=Budget(12)),
        MadeUpCrew(predicted),  # type: ignore[arg-type]
        RecordFile(None),
        on_progress=lambda progress: seen.append(dataclasses.replace(progress, best_us=dict(progress.best_us))),
    ).run()
    assert [progress.done for progress in seen if progress.step == "search"][-1] == 12
    assert seen[-1].step == "compare"
    assert set(seen[-1].best_us) == {(d, batch) for d in DIRECTIONS for batch in (16, 4096)}
    assert seen[-1].total == 12


class _Pool:
    """A pool that compiles as it is told; ``jobs`` is one, so that candidates come one after the other."""

    jobs = 1

    def __init__(self, compiled: Callable[[str], Compiled]) -> None:
        self._compiled, self.targets = compiled, []

    def submit(self, source: str, target: Target) -> Future[Compiled]:
        self.targets.append(target.name)
        future: Future[Compiled] = Future()
        try:
            future.set_result(self._compiled(source))
        except CompileError as error:
            future.set_exception(error)
        return future

    def close(self) -> None: ...


def test_code_travels_with_the_task_and_what_cannot_be_launched_is_not_sent() -> None:
    space = list_space(SPEC, H200, "forward", ["one_pass"])
    ranked = sorted(space.candidates, key=lambda candidate: candidate.seconds(SPEC, H200, 16))
    broken = next(c.plan for c in ranked if c.plan != space.partners["one_pass"].forward)

    def compiled(source: str) -> Compiled:
        in_one_line = re.sub(r"\s*\n//\s*", " ", source)  # the head of a source is wrapped
        if f"one_pass forward: {broken}" in in_one_line:
            raise CompileError("kernel.cu(7): error: no such thing")
        return Compiled(in_one_line.encode(), Resources(64, 8, 0, 0, 0))

    pool, crew = _Pool(compiled), MadeUpCrew(predicted)
    result = Session(
        request_of(algorithms=("one_pass",), budget=Budget(1000)),
        crew,  # type: ignore[arg-type]
        RecordFile(None),
        pool,  # type: ignore[arg-type]
    ).run()
    assert result.failures["compile"] >= 1
    assert any("no such thing" in record.reason for record in result.records if record.outcome == "compile")
    for task in crew.tasks:
        for subject in task.subjects:
            assert subject.code is not None
            assert all(str(subject.choice.plan(d)).encode() in subject.code[d] for d in DIRECTIONS)
    fine = next(record for record in result.records if record.outcome == "ok")
    assert fine.resources == {"registers": 64, "spilled_bytes": 8}
    assert set(pool.targets) <= {"sm_90", "sm_90a"}


def test_registers_that_do_not_fit_are_a_failure_of_resources() -> None:
    pool = _Pool(lambda source: Compiled(b"", Resources(1000, 0, 0, 0, 0)))
    with pytest.raises(SweepError, match=r"resources: \d+ threads of 1000 registers"):
        Session(request_of(budget=Budget(5)), MadeUpCrew(predicted), RecordFile(None), pool).run()  # type: ignore[arg-type]


def test_a_replay_finds_what_a_sweep_found_and_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = sweep(MadeUpCrew(favouring("one_pass_wgmma")), RecordFile(path))
    crew = ReplayCrew(RecordFile(path), SPEC)
    again = sweep(crew)
    assert first.table is not None
    assert again.table is not None
    assert [row.choice for row in again.table.rows] == [row.choice for row in first.table.rows]
    assert crew.asked
    with pytest.raises(InvpoolError, match="no record of h1_k1_f32_bhk"):
        ReplayCrew(RecordFile(path), PoolSpec(1, 1))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("200", Budget(200)),
        ("90s", Budget(None, 90.0)),
        ("5m", Budget(None, 300.0)),
        ("1h", Budget(None, 3600.0)),
        ("all", Budget(None)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "0", "-1", "5x", "m", "1.5m"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match="one looks like 200"):
        Budget.parse(text)


def test_batches_are_capped_by_the_bytes_of_x() -> None:
    assert sort_batches((65536, 16, 16), PoolSpec(128, 32)) == (16, 65536)
    assert sort_batches((16, 65536), PoolSpec(862, 96)) == (16, 4 * 10**9 // (862 * 96 * 4))
    assert sort_batches((16,), PoolSpec(8000, 4096), most_bytes=1) == (1,)
