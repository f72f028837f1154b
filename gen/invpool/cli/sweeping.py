"""What ``invpool sweep`` asks for and shows: options read, live progress, the final table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import find_algorithm
from invpool.cache import is_writable
from invpool.cli.tables import plain_table, print_json
from invpool.errors import OutputError
from invpool.gpu import Gpu
from invpool.spec import PoolSpec
from invpool.sweep import report
from invpool.sweep.measure import MEASURERS
from invpool.sweep.model import Budget, Progress, SweepRequest, SweepResult
from invpool.sweep.run import CrewOptions, run_sweep
from invpool.sweep.space import Candidate, read_plans


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of a sweep, read."""

    spec: PoolSpec
    gpu: Gpu | None
    crew: CrewOptions
    directions: tuple[Direction, ...]
    batches: tuple[int, ...]
    algorithms: tuple[str, ...]
    budget: Budget
    extra: tuple[Candidate, ...]
    records: Path | None

    @classmethod
    def parse(
        cls,
        spec: PoolSpec,
        batch: str,
        budget: str,
        direction: str | None,
        algorithms: list[str],
        measure: str,
        gpu: Gpu | None,
        ray: str | None,
        replay: Path | None,
        records: Path | None,
        plans: Path | None,
        timeout: float,
    ) -> Asked:
        """Raises ValueError for what is not legal."""
        batches = tuple(int(text) for text in batch.split(",") if text.strip().isdecimal())
        if not batches or len(batches) != len(batch.split(",")) or min(batches) < 1:
            raise ValueError(f"--batch is {batch!r}; one looks like 16,256,4096,65536")
        if direction is not None and direction not in DIRECTIONS:
            raise ValueError(f"--direction is {direction!r}; legal: {', '.join(DIRECTIONS)}")
        if measure not in MEASURERS:
            raise ValueError(f"--measure is {measure!r}; legal: {', '.join(MEASURERS)}")
        for name in algorithms:
            find_algorithm(name)
        return cls(
            spec,
            gpu,
            CrewOptions("gpu" if measure == "gpu" else "counters", ray, replay, timeout),
            tuple(d for d in DIRECTIONS if direction in (None, d)),
            batches,
            tuple(algorithms),
            Budget.parse(budget),
            tuple(read_plans(plans)) if plans is not None else (),
            records,
        )

    def request(self, gpu: Gpu) -> SweepRequest:
        return SweepRequest(self.spec, gpu, self.directions, self.batches, self.algorithms, self.budget, self.extra)


class _Live:
    """Progress on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, what: str) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("[red]{task.fields[failures]}[/]"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task = self._bars.add_task(what, total=None, best="", failures="", left="")

    def __enter__(self) -> _Live:
        self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.__exit__(None, None, None)

    def show(self, progress: Progress) -> None:
        best: dict[Direction, str] = {}
        for (direction, batch), time in sorted(progress.best_us.items(), key=lambda item: item[0][1]):
            best[direction] = f"{direction} {time:.1f} us at B={batch}"
        failures = ", ".join(f"{count} {kind}" for kind, count in sorted(progress.failures.items()))
        left = "comparing the best" if progress.step == "compare" else ""
        if not left and progress.seconds_left is not None:
            left = f"{progress.seconds_left:.0f} s left"
        self._bars.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            best=", ".join(best[d] for d in DIRECTIONS if d in best),
            failures=failures,
            left=left,
        )


def run(asked: Asked, err: Console, out: Console, json: bool, plot: Path | None) -> SweepResult:
    """Sweeps and prints what was found. Raises as :func:`invpool.sweep.run.run_sweep` does."""
    if plot is not None:
        report.require_matplotlib()
        if not is_writable(plot.absolute().parent):
            raise OutputError(f"{plot} cannot be written; choose another with --plot")
    with _Live(err, asked.spec.slug) as live:
        result, table = run_sweep(asked.crew, asked.spec, asked.gpu, asked.request, asked.records, live.show)
    if json:
        print_json(out, {**report.result_dict(result), "table": None if table is None else str(table)})
    else:
        print_result(out, result, table)
    if plot is not None:
        report.plot(result, plot)
    return result


def may_regenerate(result: SweepResult) -> bool:
    """Whether a package gains by being made again: a GPU was measured, to the end."""
    return result.table is not None and result.table.provenance["measurer"] == "gpu"


def print_result(console: Console, result: SweepResult, table: Path | None) -> None:
    """The verdicts, their plans, what failed, and where the table is."""
    rows = plain_table(
        f"{result.request.spec.slug} on {result.device}, {len(result.records)} candidates",
        *("direction", "B", "time", "spread", "roofline", "predicted plan", "composite", "gain"),
        left=("direction",),
    )
    for verdict in result.verdicts:
        entry = report.verdict_dict(result, verdict)
        predicted, composite = entry["times_faster_than_predicted_plan"], entry["times_faster_than_composite"]
        rows.add_row(
            verdict.direction,
            str(verdict.batch),
            f"{verdict.time['median_us']:.1f} us",
            f"{100 * verdict.spread:.1f} %",
            f"{100 * entry['roofline']:.0f} %",
            f"{predicted:.2f}x" if predicted else "",
            f"{composite:.1f}x" if composite else "",
            "kept" if verdict.kept else f"{100 * verdict.gain:.1f} %",
        )
    console.print(rows)
    shown: set[tuple[str, str]] = set()
    for verdict in result.verdicts:
        plan = f"{verdict.choice.algorithm.name} {verdict.choice.plan(verdict.direction)}"
        if (verdict.direction, plan) not in shown:
            shown.add((verdict.direction, plan))
            console.print(f"{verdict.direction + ':':<10}{plan}, from B={verdict.batch}", soft_wrap=True)
    failures = ", ".join(f"{count} {kind}" for kind, count in sorted(result.failures.items()))
    console.print(f"failed:   {failures or 'none'}")
    for record in [record for record in result.records if record.outcome == "correctness"][:3]:
        knobs = " ".join(f"{name}={value}" for name, value in record.plan.items())
        console.print(
            f"  wrong: {record.direction} {record.algorithm} {knobs}: {escape(record.reason)}", soft_wrap=True
        )
    if result.interrupted:
        console.print("stopped: nothing was stored; the same command goes on where it was")
    elif table is not None:
        console.print(f"stored:   {escape(str(table))}", soft_wrap=True)
        command = f"invpool generate {result.request.spec.cli_arguments()}"
        console.print(f"use it:   [bold]{command}[/]", soft_wrap=True)
    else:
        console.print("stored:   nothing: no GPU was measured")
