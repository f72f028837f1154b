"""What a sweep shows: a table of its verdicts, and a plot of measured against predicted time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from invpool.abi import DIRECTIONS
from invpool.errors import InvpoolError
from invpool.sweep.model import SweepResult, Verdict
from invpool.sweep.records import Record


def roofline(result: SweepResult, verdict: Verdict) -> float:
    """The share of the GPU's DRAM bandwidth that the least traffic would need in the time measured."""
    bytes_moved = result.request.spec.least_bytes(verdict.direction, verdict.batch)
    return bytes_moved / (1e-6 * verdict.time["median_us"]) / result.request.gpu.dram


def verdict_dict(result: SweepResult, verdict: Verdict) -> dict[str, Any]:
    """One verdict for scripts; times in microseconds, the rest shares or ratios."""
    time = verdict.time
    median = time["median_us"]
    return {
        "direction": verdict.direction,
        "batch": verdict.batch,
        "algorithm": verdict.choice.algorithm.name,
        "plan": verdict.choice.plan(verdict.direction).knobs,
        "kept": verdict.kept,
        "gain": verdict.gain,
        "spread": verdict.spread,
        "time": dict(time),
        "roofline": roofline(result, verdict),
        "times_faster_than_predicted_plan": time["reference_us"] / median if "reference_us" in time else None,
        "times_faster_than_composite": time["composite_us"] / median if "composite_us" in time else None,
    }


def result_dict(result: SweepResult) -> dict[str, Any]:
    """Everything that a sweep found, for scripts."""
    return {
        "slug": result.request.spec.slug,
        "device": result.device,
        "interrupted": result.interrupted,
        "candidates": len(result.records),
        "failures": dict(result.failures),
        "verdicts": [verdict_dict(result, verdict) for verdict in result.verdicts],
    }


def _points(result: SweepResult, direction: str, batch: int) -> Iterator[tuple[Record, float, float | None]]:
    """(record, predicted, measured) in microseconds; measured is None for a failure."""
    for record in result.records:
        predicted = result.predicted_us.get(record.key)
        if record.direction == direction and predicted is not None:
            time = record.times.get(batch) if record.outcome == "ok" else None
            yield record, predicted[batch], None if time is None else time["median_us"]


def require_matplotlib() -> None:
    """Raises InvpoolError, which says what to install, before a sweep has run for nothing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvpoolError(f"--plot needs matplotlib ({error}); pip install 'invpool[plot]'") from error


def plot(result: SweepResult, path: Path) -> None:
    """Measured against predicted time of every candidate, a panel for each direction and batch.

    Failures lie on the upper edge, where they were predicted; the winner is ringed and named.

    Raises:
        InvpoolError: there is no matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    request = result.request
    directions = [d for d in DIRECTIONS if d in request.directions]
    figure = Figure(figsize=(4.2 * len(request.batches), 0.9 + 4.0 * len(directions)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(directions), len(request.batches), squeeze=False)
    names = sorted({record.algorithm for record in result.records})
    # Colours that are told apart in print and by most eyes (Okabe and Ito).
    palette = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
    colours = {name: palette[number % len(palette)] for number, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for row, direction in enumerate(directions):
        for column, batch in enumerate(request.batches):
            axis = axes[row][column]
            points = list(_points(result, direction, batch))
            measured = [(record, guess, time) for record, guess, time in points if time is not None]
            top = 1.6 * max((time for _, _, time in measured), default=1.0)
            for name in names:
                own = [(guess, time) for record, guess, time in measured if record.algorithm == name]
                if own:
                    handles[name] = axis.scatter(*zip(*own, strict=True), s=14, color=colours[name], alpha=0.8)
                failed = [guess for record, guess, time in points if time is None and record.algorithm == name]
                if failed:
                    marks = axis.scatter(failed, [top] * len(failed), s=22, marker="x", color=colours[name])
                    handles.setdefault("failed", marks)
            axis.set(xscale="log", yscale="log")
            axis.set_title(_title(result, direction, batch), fontsize=9)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
                side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                side.set_minor_formatter(NullFormatter())
            low, high = min((guess for _, guess, _ in points), default=1.0), max((g for _, g, _ in points), default=1.0)
            handles["as predicted"] = axis.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0)[0]
            _ring_winner(axis, result, direction, batch, measured)
            axis.set_xlabel("predicted, us" if row == len(directions) - 1 else "")
            axis.set_ylabel("measured, us" if column == 0 else "")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    figure.suptitle(f"{request.spec.slug} on {result.device}: {len(result.records)} candidates")
    figure.savefig(path, dpi=120)


def _winner(result: SweepResult, direction: str, batch: int) -> Verdict | None:
    return next((v for v in result.verdicts if (v.direction, v.batch) == (direction, batch)), None)


def _title(result: SweepResult, direction: str, batch: int) -> str:
    """The panel's name, and its winner."""
    lines = [f"{direction}, B={batch}"]
    winner = _winner(result, direction, batch)
    if winner is not None:
        knobs = winner.choice.plan(winner.direction).knobs
        lines[0] += f": {winner.choice.algorithm.name}, {winner.time['median_us']:.3g} us"
        words = [f"{name}={value}" for name, value in knobs.items() if name != "most_blocks"]
        lines += textwrap.wrap(" ".join(words), 58)
    return "\n".join(lines)


def _ring_winner(
    axis: Any, result: SweepResult, direction: str, batch: int, measured: list[tuple[Record, float, float]]
) -> None:
    winner = _winner(result, direction, batch)
    if winner is None:
        return
    name, knobs = winner.choice.algorithm.name, winner.choice.plan(winner.direction).knobs
    for record, guess, time in measured:
        if (record.algorithm, dict(record.plan)) == (name, knobs):
            axis.scatter([guess], [time], s=90, facecolors="none", edgecolors="black", linewidths=1.3)
