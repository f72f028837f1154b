"""One sweep: the search fed, candidates compiled ahead, measured and recorded; the best compared and chosen."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from typing import Any, Final, Literal

from invpool._version import __version__
from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import Choice, Plan, choose
from invpool.compile import Compiled, Target
from invpool.compile_pool import CompilePool
from invpool.errors import CompileError, TemplateError
from invpool.render import render_kernel, source_digest
from invpool.sweep.crew import Crew
from invpool.sweep.measure import FINAL_ROUNDS, NOT_MEASURED, Answer, Measured, Subject, Task, sort_batches
from invpool.sweep.model import Progress, SweepError, SweepRequest, SweepResult, Verdict
from invpool.sweep.records import Record, RecordFile, candidate_key, plan_key
from invpool.sweep.search import Search
from invpool.sweep.space import Candidate, list_space
from invpool.tuned import TunedRow, TunedTable, find_table

log = logging.getLogger("invpool")

# Plans of each direction that are compared once more at the end, beside the incumbent.
_FINALISTS: Final = 3
_FAILURES_TOLD: Final = 5


@dataclasses.dataclass
class _Pending:
    """A candidate on its way: compiling first, where it needs code, then with the crew."""

    candidate: Candidate
    digest: str
    compiling: dict[Direction, Future[Compiled]] = dataclasses.field(default_factory=dict)
    resources: dict[str, int] | None = None


# Of the best at the end: timed beside the incumbent, or it could not be; it is the incumbent; nothing was compared.
_Standing = Literal["timed", "lost", "same", "not compared"]


@dataclasses.dataclass(frozen=True)
class _Compared:
    """The best of one direction at one batch, and the time of what is there now, if that could be told."""

    choice: Choice
    time: Mapping[str, float]
    old: Mapping[str, float] | None
    standing: _Standing

    def loses(self, gain: float, spread: float) -> bool:
        """Whether the incumbent stays."""
        if self.standing != "timed":
            return self.standing != "not compared"
        return self.old is not None and not gain > spread

    @property
    def gain(self) -> float:
        return 0.0 if self.old is None else 1 - self.time["median_us"] / self.old["median_us"]

    @property
    def spread(self) -> float:
        """The widest quartile range over its median, of the best and the incumbent."""
        times = [self.time, *([self.old] if self.old is not None else [])]
        return max((time["upper_quartile_us"] - time["lower_quartile_us"]) / time["median_us"] for time in times)


class Session:
    """One sweep at work.

    Args:
        request: what is to be tuned.
        crew: who measures.
        records: what is known already, and where more is put.
        pool: who compiles; None where the crew needs no code.
        on_progress: called whenever something has come of a candidate.
    """

    def __init__(
        self,
        request: SweepRequest,
        crew: Crew,
        records: RecordFile,
        pool: CompilePool | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.request = dataclasses.replace(request, batches=sort_batches(request.batches, request.spec))
        self.crew, self.records, self._pool, self._on_progress = crew, records, pool, on_progress
        spec, gpu = request.spec, request.gpu
        # What every candidate is timed in turns with: the predicted plans.
        self.default = choose(spec, gpu)
        known = find_table(spec, dataclasses.replace(gpu, name=crew.device))
        self._tuned = known if known is not None and known.device == crew.device else None
        algorithms = request.algorithms
        if request.directions != DIRECTIONS:
            # One direction alone is of use only with the other one's algorithm.
            used = dict.fromkeys(self._incumbent(batch).algorithm.name for batch in self.request.batches)
            if algorithms and not set(used) <= set(algorithms):
                raise SweepError(
                    f"the other direction is of {', '.join(used)}, and both directions are of one algorithm; "
                    "sweep both directions, or leave --algorithm out"
                )
            algorithms = tuple(used)
        self.spaces = {
            d: list_space(spec, gpu, d, algorithms, request.extra, request.only_extra) for d in request.directions
        }
        today = [self.default, *(self._incumbent(batch) for batch in self.request.batches)]
        gives_up = not request.budget.is_whole_space
        self._searches = {d: Search(space, self.request.batches, today, gives_up) for d, space in self.spaces.items()}
        self._codes: dict[tuple[str, Any], Future[Compiled]] = {}
        self._seen: dict[tuple[str, ...], tuple[Candidate, Record]] = {}
        self._base_us: dict[tuple[Direction, int], float] = {}
        self._reference = {d: source_digest(self.default.algorithm, spec, self.default.plan(d)) for d in DIRECTIONS}
        self._digests: dict[tuple[str, Plan], str] = {}
        self.progress = Progress(total=request.budget.candidates)

    # ---- what is there now

    def _incumbent(self, batch: int) -> Choice:
        """The plans that a package gets today for a batch."""
        if self._tuned is None:
            return self.default
        return [choice for start, choice in self._tuned.starts() if start <= batch][-1]

    # ---- code

    def _code(self, choice: Choice, direction: Direction) -> Future[Compiled]:
        assert self._pool is not None
        key = (choice.algorithm.name, choice.plan(direction))
        if key not in self._codes:
            target = Target(choice.algorithm.arch_target(self.request.gpu.arch))
            source = render_kernel(choice.algorithm, self.request.spec, choice.plan(direction))
            self._codes[key] = self._pool.submit(source, target)
        return self._codes[key]

    def _subject(self, choice: Choice) -> Subject:
        """The kernels of a choice, compiled. Raises as the compiler does."""
        if self._pool is None:
            return Subject(choice)
        futures = {d: self._code(choice, d) for d in DIRECTIONS}
        return Subject(choice, {d: future.result().code for d, future in futures.items()})

    # ---- the search

    def run(self) -> SweepResult:
        """Searches, compares and chooses.

        Raises:
            SweepError: nothing that is right could be measured.
            CompilerNotFoundError: code is needed and there is no nvcc.
        """
        interrupted = False
        self._subject(self.default)  # without the reference there is nothing to measure: its own error says why
        try:
            self._search()
        except KeyboardInterrupt:
            interrupted = True
        rows: list[list[Verdict]] = []
        states = self._states() if self._seen else []
        usable = any(self._fastest(batch, state)[1] for batch in self.request.batches for state in states)
        if not usable and not interrupted:
            raise SweepError(self._why_nothing())
        try:
            rows = self._rows(compare=not interrupted) if usable else []
        except KeyboardInterrupt:
            interrupted = True
            rows = self._rows(compare=False)
        table = None
        if not interrupted:
            provenance = {"invpool": __version__, "measurer": self.crew.measurer, **self.crew.provenance}
            tuned = tuple(self._tuned_row(verdicts) for verdicts in rows)
            table = TunedTable(self.crew.device, self.request.gpu.arch, self.request.spec, tuned, provenance)
        return SweepResult(
            self.request,
            self.crew.device,
            tuple(verdict for verdicts in rows for verdict in verdicts),
            table,
            tuple(record for _, record in self._seen.values()),
            self._predictions(),
            interrupted,
        )

    def _search(self) -> None:
        started, budget = time.monotonic(), self.request.budget
        pending: dict[Future[Any], _Pending] = {}
        ahead = self.crew.size if self._pool is None else self._pool.jobs + 2 * self.crew.size

        def may_go_on() -> bool:
            tried = sum(search.tried for search in self._searches.values())
            in_time = budget.seconds is None or time.monotonic() - started < budget.seconds
            return in_time and (budget.candidates is None or tried < budget.candidates)

        self._recall()
        turns = collections.deque(self.request.directions)
        while True:
            while turns and len(pending) < ahead and may_go_on():
                direction = turns[0]
                turns.rotate(-1)
                candidate = self._searches[direction].next()
                if candidate is None:
                    if not pending:
                        turns.remove(direction)
                        continue
                    break  # what is on its way may open something
                self._begin(candidate, pending)
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                self._go_on(future, pending.pop(future), pending)
            self._report_pace(started)

    def _recall(self) -> None:
        """Takes what is known of the space from the records, so that a search goes on where one was stopped."""
        known = {(record.direction, record.algorithm, plan_key(record.plan)) for record in self.records}
        for direction, space in self.spaces.items():
            for candidate in space.candidates:
                if (direction, candidate.algorithm.name, plan_key(candidate.plan.knobs)) not in known:
                    continue
                record = self._known(candidate)
                if record is not None:
                    self._take(candidate, record)

    def _known(self, candidate: Candidate) -> Record | None:
        """The record of a candidate, if nothing is left to measure."""
        if candidate.rejected is not None:
            return None
        key = candidate_key(self.crew.measurer, self.crew.device, self.request.spec, candidate, self._digest(candidate))
        record = self.records.get(key)
        reference = self._reference[candidate.direction]
        return record if record is not None and record.covers(self.request.batches, reference) else None

    def _digest(self, candidate: Candidate) -> str:
        """Of the candidate's kernel and its partner's: neither can change without the record being another one."""
        choice = self._choice(candidate)
        found = []
        for d in (candidate.direction, *(d for d in DIRECTIONS if d != candidate.direction)):
            key = (choice.algorithm.name, choice.plan(d))
            if key not in self._digests:
                self._digests[key] = source_digest(choice.algorithm, self.request.spec, choice.plan(d))
            found.append(self._digests[key])
        return "-".join(found)

    def _report_pace(self, started: float) -> None:
        spent, done, budget = time.monotonic() - started, self.progress.done, self.request.budget
        if budget.seconds is not None:
            self.progress.seconds_left = max(0.0, budget.seconds - spent)
        elif done and budget.candidates is not None:
            self.progress.seconds_left = spent / done * max(0, budget.candidates - done)
        self._on_progress(self.progress)

    def _begin(self, candidate: Candidate, pending: dict[Future[Any], _Pending]) -> None:
        """Refuses, or sends to the compilers or the crew."""
        if candidate.rejected is not None:
            self._record(_Pending(candidate, ""), Measured("resources", candidate.rejected))
            return
        try:
            waiting = _Pending(candidate, self._digest(candidate))
            if self._pool is None:
                pending[self._send(waiting)] = waiting
                return
            choice = self._choice(candidate)
            waiting.compiling = {d: self._code(choice, d) for d in DIRECTIONS}
        except TemplateError as error:
            self._record(_Pending(candidate, ""), Measured("compile", str(error)))
            return
        pending[waiting.compiling[candidate.direction]] = waiting

    def _send(self, waiting: _Pending) -> Future[Answer]:
        subjects = (self._subject(self.default), self._subject(self._choice(waiting.candidate)))
        request, direction = self.request, waiting.candidate.direction
        return self.crew.submit(Task(request.spec, request.gpu, direction, subjects, request.batches))

    def _go_on(self, future: Future[Any], waiting: _Pending, pending: dict[Future[Any], _Pending]) -> None:
        """The next step of a candidate, of which one step is done."""
        if not waiting.compiling:
            answer: Answer = future.result()
            self._record(waiting, answer.subjects[-1], answer.subjects[0])
            return
        candidate = waiting.candidate
        waiting.compiling = {}
        try:
            compiled: Compiled = future.result()
            obstacle = self._resources(candidate, compiled, waiting)
            if obstacle is not None:
                self._record(waiting, Measured("resources", obstacle))
                return
            sent = self._send(waiting)
        except CompileError as error:
            self._record(waiting, Measured("compile", str(error)[:500]))
            return
        except BrokenExecutor:
            # Killed for want of memory, as a rule; the pool begins anew.
            for d in DIRECTIONS:
                self._codes.pop((candidate.algorithm.name, self._choice(candidate).plan(d)), None)
            self._record(
                waiting, Measured("compile", "the compiler was killed; MAX_JOBS lowers how many run at a time")
            )
            return
        pending[sent] = waiting

    def _choice(self, candidate: Candidate) -> Choice:
        """The candidate with its partner."""
        return candidate.choice(self.spaces[candidate.direction].partners)

    def _resources(self, candidate: Candidate, compiled: Compiled, waiting: _Pending) -> str | None:
        """Why the code cannot be launched. One that spills can: whether it is slow for that is measured."""
        used = compiled.resources
        if used is None:
            return None
        spilled = used.spill_stores + used.spill_loads
        waiting.resources = {"registers": used.registers, "spilled_bytes": spilled}
        launch = candidate.algorithm.launch(self.request.spec, candidate.plan)
        shared = launch.shared_bytes + used.static_shared
        if self.request.gpu.blocks_per_sm(launch.threads, shared, used.registers) < 1:
            return f"{launch.threads} threads of {used.registers} registers and {shared} bytes do not fit an SM"
        return None

    def _record(self, waiting: _Pending, measured: Measured, reference: Measured | None = None) -> None:
        candidate = waiting.candidate
        if measured.outcome == "ok" and reference is not None and reference.outcome != "ok":
            log.warning("the reference %s could not be measured: %s", self.default.algorithm.name, reference.reason)
        record = Record(
            self.crew.measurer,
            self.crew.device,
            self.request.spec.slug,
            candidate.direction,
            candidate.algorithm.name,
            candidate.plan.knobs,
            waiting.digest,
            measured.outcome,
            measured.reason,
            self._reference[candidate.direction],
            measured.times,
            measured.errors,
            waiting.resources,
            {"invpool": __version__, **self.crew.provenance},
        )
        self.records.append(record)
        # Times of other batches have joined what is right; what failed now counts as that, whatever was known before.
        joined = self.records.get(record.key) if record.outcome == "ok" else None
        self._take(candidate, joined or record)

    def _take(self, candidate: Candidate, record: Record) -> None:
        """Counts what came of a candidate, now or in an earlier sweep."""
        direction, batches = candidate.direction, self.request.batches
        self._seen[record.key] = (candidate, record)
        self.progress.done += 1
        if record.outcome == "ok":
            for batch in batches:
                if record.times[batch].get("reference_us"):
                    self._base_us.setdefault((direction, batch), record.times[batch]["reference_us"])
            seconds = {batch: 1e-6 * self._calibrated_us(record, direction, batch) for batch in batches}
            self._searches[direction].tell(candidate, seconds)
            for batch in batches:
                least = self.progress.best_us.get((direction, batch), float("inf"))
                self.progress.best_us[direction, batch] = min(least, 1e6 * seconds[batch])
        else:
            self.progress.failures[record.outcome] += 1
            self._searches[direction].tell(candidate, None)
        self._on_progress(self.progress)

    def _calibrated_us(self, record: Record, direction: Direction, batch: int) -> float:
        """The median as it would be, had the clock not drifted since the reference was timed first."""
        measured, base = record.times[batch], self._base_us.get((direction, batch), 0.0)
        reference = measured.get("reference_us", 0.0)
        return measured["median_us"] * (base / reference if base and reference else 1.0)

    def _why_nothing(self) -> str:
        failed = [(candidate, record) for candidate, record in self._seen.values() if record.outcome != "ok"]
        if not failed:
            if self._seen:
                return (
                    f"of {len(self._seen)} candidates there is none for each direction of one algorithm; raise --budget"
                )
            return f"there is no candidate for {self.request.spec.slug} on {self.request.gpu.name}"
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.progress.failures.items()))
        shown = [f"{c.direction} {c}: {r.outcome}: {r.reason}" for c, r in failed[:_FAILURES_TOLD]]
        more = [f"and {len(failed) - len(shown)} more"] if len(failed) > len(shown) else []
        return "\n  ".join((f"none of {len(failed)} candidates can be used ({counts}):", *shown, *more))

    # ---- the choice

    def _ranked(self, direction: Direction, batch: int, algorithm: str) -> list[tuple[float, Candidate, Record]]:
        """Time, candidate and record of what is right of an algorithm, the fastest first."""
        found = [
            (self._calibrated_us(record, direction, batch), candidate, record)
            for candidate, record in self._seen.values()
            if record.outcome == "ok" and candidate.direction == direction and candidate.algorithm.name == algorithm
        ]
        return sorted(found, key=lambda entry: (entry[0], str(entry[1])))

    def _best_us(self, batch: int, algorithm: str) -> float | None:
        """The least time of the searched directions together; None where one has nothing that is right."""
        total = 0.0
        for direction in self.request.directions:
            ranked = self._ranked(direction, batch, algorithm)
            if not ranked:
                return None
            total += ranked[0][0]
        return total

    def _rows(self, compare: bool) -> list[list[Verdict]]:
        """The verdicts of each batch. All rows have one kind of state, since a package has.

        The kind that is fastest over the batches is tried first. Where a batch would lose by it, all keep to the kind
        that is used today, by which none does.
        """
        self.progress.step = "compare"
        batches, spec = self.request.batches, self.request.spec
        states = [self._states()[0], *(self._incumbent(batch).algorithm.state(spec) for batch in batches)]
        if self._tuned is not None and any(row.batch not in batches for row in self._tuned.rows):
            # Rows of batches that are not swept now stay, and a table has one kind of state.
            states = [self._tuned.rows[0].choice.algorithm.state(spec)]
        rows: list[list[Verdict]] = []
        for state in dict.fromkeys(states):
            names = {batch: self._name_for(batch, state) for batch in batches}
            if not all(names.values()):
                # Of today's kind nothing was searched: all that was found is held against it, and none is taken.
                return [self._kept(verdicts) for verdicts in rows]
            rows = []
            for batch, name in names.items():
                finals = {d: self._compare(d, batch, name) if compare else None for d in self.request.directions}
                rows.append(self._decide(batch, name, finals))
            if {verdicts[0].choice.algorithm.state(spec) for verdicts in rows} == {state}:
                break
        return rows

    def _kept(self, verdicts: list[Verdict]) -> list[Verdict]:
        """The same with the incumbent in place of what was found."""
        choice = self._incumbent(verdicts[0].batch)
        return [dataclasses.replace(v, choice=choice, kept=True, time=v.incumbent or v.time) for v in verdicts]

    def _name_for(self, batch: int, state: tuple[str, ...]) -> str:
        """The algorithm of a batch's row: of one direction alone, the one that the other direction has."""
        if self.request.directions == DIRECTIONS:
            return self._fastest(batch, state)[1]
        name = self._incumbent(batch).algorithm.name
        return name if self._best_us(batch, name) is not None else ""

    def _fastest(self, batch: int, state: tuple[str, ...]) -> tuple[float, str]:
        """Time and name of the fastest algorithm with a kind of state; infinity and nothing where there is none."""
        names = {c.algorithm.name for c, _ in self._seen.values() if c.algorithm.state(self.request.spec) == state}
        times = [(time, name) for name in names if (time := self._best_us(batch, name)) is not None]
        return min(times, default=(math.inf, ""))

    def _states(self) -> list[tuple[str, ...]]:
        """The kinds of state that some algorithm has, the one that is fastest over the batches first."""
        states = {candidate.algorithm.state(self.request.spec) for candidate, _ in self._seen.values()}
        batches = self.request.batches
        best = {batch: min(self._fastest(batch, state)[0] for state in states) for batch in batches}

        def behind(state: tuple[str, ...]) -> float:
            return sum(self._fastest(batch, state)[0] / best[batch] for batch in batches if best[batch] < math.inf)

        return sorted(states, key=lambda state: (behind(state), state))

    def _tuned_row(self, verdicts: list[Verdict]) -> TunedRow:
        evidence = {v.direction: {**v.time, "gain": v.gain, "spread": v.spread} for v in verdicts}
        return TunedRow.of(self.request.spec, verdicts[0].batch, verdicts[0].choice, evidence)

    def _finalists(self, direction: Direction, batch: int, algorithm: str) -> list[Choice]:
        """The reference, the incumbent and the best, each kernel of the direction once."""
        ranked = self._ranked(direction, batch, algorithm)[:_FINALISTS]
        best = [self._choice(candidate) for _, candidate, _ in ranked]
        found: dict[tuple[str, Plan], Choice] = {}
        for choice in (self.default, self._incumbent(batch), *best):
            found.setdefault((choice.algorithm.name, choice.plan(direction)), choice)
        return list(found.values())

    def _compare(self, direction: Direction, batch: int, algorithm: str) -> Answer | None:
        """The finalists, checked and timed in turns once more. Whoever fails is left out, the others asked again."""
        request = self.request
        subjects = [self._subject(choice) for choice in self._finalists(direction, batch, algorithm)]
        outcomes: dict[int, Measured] = {}
        composite: Mapping[int, float] = {}
        places = list(range(len(subjects)))
        while places:
            chosen = tuple(subjects[place] for place in places)
            task = Task(request.spec, request.gpu, direction, chosen, (batch,), FINAL_ROUNDS, composite=True)
            answer = self.crew.submit(task).result()
            composite = answer.composite_us or composite
            outcomes |= dict(zip(places, answer.subjects, strict=True))
            left = [place for place in places if outcomes[place].outcome == "ok" and batch in outcomes[place].times]
            failed = [p for p in places if outcomes[p].outcome != "ok" and outcomes[p].reason != NOT_MEASURED]
            if len(left) == len(places) or not failed:
                break
            # Times are comparable within a task alone; one that killed the worker took the others with it.
            lonely = len(failed) == len(places) - 1 and len(places) > 2 and not left
            places = places[:2] if lonely else [place for place in places if place not in failed]
        self._on_progress(self.progress)
        return Answer(tuple(outcomes[place] for place in range(len(subjects))), composite)

    def _decide(self, batch: int, algorithm: str, finals: Mapping[Direction, Answer | None]) -> list[Verdict]:
        """The plans of a row. The incumbent stays unless it is beaten by more than the spread, or fails by itself."""
        incumbent = self._incumbent(batch)
        compared = {d: self._compared(d, batch, algorithm, finals.get(d)) for d in self.request.directions}
        gains = {d: one.gain for d, one in compared.items()}
        spreads = {d: one.spread for d, one in compared.items()}
        kept = {d: one.loses(gains[d], spreads[d]) for d, one in compared.items()}
        if incumbent.algorithm.name != algorithm:
            # The two directions of another algorithm come together or not at all.
            olds = [one.old for one in compared.values() if one.old is not None]
            total = sum(one.time["median_us"] for one in compared.values())
            joint = 1 - total / sum(old["median_us"] for old in olds) if len(olds) == len(compared) else 0.0
            gains, spreads = dict.fromkeys(gains, joint), dict.fromkeys(spreads, max(spreads.values()))
            kept = dict.fromkeys(kept, any(one.loses(gains[d], spreads[d]) for d, one in compared.items()))
        base = incumbent if all(kept.values()) else next(compared[d].choice for d in compared if not kept[d])
        plans = {d: base.plan(d) if d not in compared else compared[d].choice.plan(d) for d in DIRECTIONS}
        plans |= {d: incumbent.plan(d) for d in DIRECTIONS if kept.get(d, incumbent.algorithm is base.algorithm)}
        chosen = Choice(base.algorithm, **plans)
        shown = {d: one.old if kept[d] and one.old is not None else one.time for d, one in compared.items()}
        return [
            Verdict(d, batch, chosen, kept[d], gains[d], spreads[d], shown[d], one.old) for d, one in compared.items()
        ]

    def _compared(self, direction: Direction, batch: int, algorithm: str, answer: Answer | None) -> _Compared:
        """The best of the algorithm's finalists, and the incumbent; by the search alone where nothing was compared."""
        choices = self._finalists(direction, batch, algorithm)
        _, best, record = self._ranked(direction, batch, algorithm)[0]
        searched = (self._choice(best), record.times[batch])
        if answer is None:
            return _Compared(*searched, None, "not compared")
        composite = {"composite_us": answer.composite_us[batch]} if batch in answer.composite_us else {}
        times: dict[tuple[str, Plan], tuple[Choice, Mapping[str, float]]] = {
            (choice.algorithm.name, choice.plan(direction)): (choice, {**one.times[batch], **composite})
            for choice, one in zip(choices, answer.subjects, strict=True)
            if one.outcome == "ok" and batch in one.times
        }
        incumbent = self._incumbent(batch)
        own = (incumbent.algorithm.name, incumbent.plan(direction))
        timed = [pair for (name, _), pair in times.items() if name == algorithm]
        winner, its_time = min(timed, key=lambda pair: pair[1]["median_us"], default=searched)
        standing: _Standing = "timed" if timed else "lost"
        if (winner.algorithm.name, winner.plan(direction)) == own:
            standing = "same"
        return _Compared(winner, its_time, times[own][1] if own in times else None, standing)

    def _predictions(self) -> dict[tuple[str, ...], dict[int, float]]:
        spec, gpu = self.request.spec, self.request.gpu
        return {
            key: {batch: 1e6 * candidate.seconds(spec, gpu, batch) for batch in self.request.batches}
            for key, (candidate, _) in self._seen.items()
            if candidate.rejected is None
        }
