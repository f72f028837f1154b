"""The figures table: our kernels and their peers over the shapes that matter, held against goals.

A result is a list of entries, one a candidate of a row, plain enough for JSON; :func:`verdicts` reads it back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from invpool.algorithms import Choice
from invpool.bench.peers import Peer, Which, forget_compiled, peers
from invpool.bench.timing import GRAPH_LAUNCHES, Call, Failure, Stopwatch, Timing
from invpool.reference import Truth, composite_errors, norm_error, pool_ref
from invpool.spec import DType, Layout, PoolSpec, Precision

# Errors are taken over so many items at most: float64 is slow, and they are all alike.
_TRUTH_ITEMS: Final = 64
_BITWISE_RUNS: Final = 50
# Argument sets of a cold replay hold so many times L2; not more of them than a graph is quickly made of.
_TIMES_L2: Final = 3
_MOST_SETS: Final = 2048

Quantity = Literal[
    "forward",
    "backward",
    "forward+backward",
    "autograd",
    "forward replay",
    "backward replay",
    "forward replay, cold",
    "backward replay, cold",
]


# ---------------------------------------------------------------- rows and goals, as data


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape, in one or both layouts. ``replay``: too small for events, timed by graph replay as well."""

    B: int
    H: int
    K: int
    dtype: DType = "float32"
    precision: Precision = "exact"
    layouts: tuple[Layout, ...] = ("bhk", "bkh")
    replay: bool = False

    @property
    def name(self) -> str:
        """``b16384_h128_k32_f32[_tf32]``: the slug without the layout."""
        return f"b{self.B}_" + self.spec("bhk").slug.replace("_bhk", "")

    def spec(self, layout: Layout) -> PoolSpec:
        return PoolSpec(self.H, self.K, self.dtype, layout, self.precision)


ROWS: Final = (
    Row(16384, 128, 32),
    Row(16384, 128, 32, precision="tf32", layouts=("bhk",)),
    Row(16384, 128, 32, "bfloat16", layouts=("bhk",)),
    Row(16384, 128, 32, "float16", layouts=("bhk",)),
    Row(4096, 128, 32),
    Row(256, 128, 32),
    Row(16, 128, 32, replay=True),
    Row(1024, 321, 96),
    Row(256, 862, 96),
    Row(2048, 137, 96),
    Row(64, 883, 720),
    Row(65536, 7, 96),
    Row(16384, 21, 96),
)


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a row is to reach, and what a prototype reached (``floor``), in one unit.

    Attributes:
        unit: ``share`` of the copy bandwidth for the least traffic, ``us``, or ``times`` faster than the quickest of
            ``against``.
        recorded: microseconds of peers that were not timed in this run, as the goal's source has them.
    """

    row: str
    quantity: Quantity
    unit: Literal["share", "us", "times"]
    goal: float
    floor: float | None = None
    against: tuple[str, ...] = ()
    recorded: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def text(self, value: float) -> str:
        return {"share": f"{100 * value:.0f} %", "us": f"{value:.3g} us", "times": f"{value:.3g}x"}[self.unit]

    def reached(self, value: float, bound: float) -> bool:
        return value <= bound if self.unit == "us" else value >= bound


GOALS_SOURCE: Final = "issue 4, figures (one H200)"
_COMPILE: Final = ("compile", "compile_mean")
_TRITON: Final = ("triton_tf32x3",)
GOALS: Final = (
    Goal("b16384_h128_k32_f32", "forward", "share", 0.65, 0.53),
    Goal("b16384_h128_k32_f32", "forward+backward", "share", 0.60, 0.48),
    Goal("b16384_h128_k32_f32_tf32", "forward", "share", 0.75, 0.58),
    Goal("b16384_h128_k32_bf16", "forward", "share", 0.55, 0.42),
    Goal("b16384_h128_k32_bf16", "forward+backward", "share", 0.48, 0.36),
    Goal("b1024_h321_k96_f32", "forward", "us", 80, 127),
    Goal(
        "b1024_h321_k96_f32",
        "forward+backward",
        "times",
        10,
        against=_COMPILE + _TRITON,
        recorded={"compile": 3313, "compile_mean": 3313, "triton_tf32x3": 3330},
    ),
    Goal("b256_h862_k96_f32", "forward", "times", 5, against=_TRITON),
    Goal("b256_h862_k96_f32", "forward+backward", "times", 5, against=_TRITON),
    Goal("b2048_h137_k96_f32", "forward", "times", 5, against=_TRITON),
    Goal("b2048_h137_k96_f32", "forward+backward", "times", 5, against=_TRITON),
    Goal("b64_h883_k720_f32", "forward", "times", 5, against=_COMPILE),
    Goal("b64_h883_k720_f32", "forward+backward", "times", 5, against=_COMPILE),
    Goal("b65536_h7_k96_f32", "forward", "share", 0.80),
    Goal("b16384_h21_k96_f32", "forward", "share", 0.80),
    # L2 cold, as the others are: stricter than a replay over one and the same input.
    Goal("b16_h128_k32_f32", "forward replay, cold", "us", 2.5, 3),
    Goal("b16_h128_k32_f32", "backward replay, cold", "us", 4, 5),
)
# bkh may take so much longer than bhk, every row.
LAYOUT_GOAL: Final = 1.03
# Norm error of float32 exact at (., 128, 32); elsewhere the composite's own is allowed where it is larger.
_EXACT_ERRORS: Final = {"out": 3e-7, "dx": 5e-7}


def allowed_error(spec: PoolSpec, what: str, composite_error: float) -> float:
    """The norm error that the goals allow: a rule of its own, tighter than that of ``check.py``."""
    if spec.precision == "tf32":
        return 1e-3
    if spec.element_bytes == 2:
        return 2 * composite_error
    strict = _EXACT_ERRORS[what]
    return strict if (spec.H, spec.K) == (128, 32) else max(strict, composite_error)


def select(patterns: Sequence[str], layouts: Sequence[str] = ()) -> tuple[Row, ...]:
    """The rows whose name contains one of the patterns (wildcards allowed; none: all), in the layouts asked for.

    Raises:
        ValueError: nothing is left.
    """
    rows = []
    for row in ROWS:
        if patterns and not any(fnmatch.fnmatch(row.name, f"*{pattern}*") for pattern in patterns):
            continue
        kept = tuple(layout for layout in row.layouts if not layouts or layout in layouts)
        if kept:
            rows.append(dataclasses.replace(row, layouts=kept))
    if not rows:
        raise ValueError(f"no row matches {' '.join(patterns)!r}; rows: {', '.join(row.name for row in ROWS)}")
    return tuple(rows)


# ---------------------------------------------------------------- candidates


class Own(Protocol):
    """The raw launches of one of our ops; see :class:`invpool.bench.own.OwnOp`."""

    op: Callable[[Tensor], Tensor]

    @property
    def resources(self) -> dict[str, str]: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def forward_backward(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]: ...
    def backward_call(self, x: Tensor, g: Tensor) -> Call: ...


class Maker(Protocol):
    """Chooses plans and makes our ops; see :class:`invpool.bench.own.OwnMaker`."""

    def choice(self, spec: PoolSpec, algorithm: str | None) -> Choice: ...
    def make(self, spec: PoolSpec, choice: Choice) -> Own: ...
    def predictions(self, spec: PoolSpec, choice: Choice, batch: int) -> dict[str, dict[str, Any]]: ...


def through_autograd(pool: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """out and dx of a differentiable pool."""
    leaf = x.detach().requires_grad_()
    out = pool(leaf)
    (dx,) = torch.autograd.grad(out, leaf, g)
    return out.detach(), dx


def without_gradient(pool: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return pool(x)


def equal_runs(call: Callable[[], tuple[Tensor, ...]], runs: int = _BITWISE_RUNS) -> int:
    """How many of so many runs, the first included, gave the very bits of the first."""
    first = [result.clone() for result in call()]
    return 1 + sum(all(map(torch.equal, first, call())) for _ in range(runs - 1))


@dataclasses.dataclass
class _Candidate:
    """One entry on its way: what is known of it and the calls that are still to be timed."""

    entry: dict[str, Any]
    calls: dict[str, Call] = dataclasses.field(default_factory=dict)
    predictions: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


class Bench:
    """Times rows. ``say`` takes one line a measurement, ``save`` all entries after each row."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        maker: Maker,
        *,
        device: str = "cuda",
        algorithms: Sequence[str | None] = (None,),
        which: Which = "fast",
        peers_of: Callable[[PoolSpec, Which], tuple[Peer, ...]] = peers,
        say: Callable[[str], None] = print,
        save: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    ) -> None:
        self.stopwatch = stopwatch
        self.maker = maker
        self.device = device
        self.algorithms = tuple(algorithms)
        self.which = which
        self.peers_of = peers_of
        self.say = say
        self.save = save
        self.copy_rate = 0.0
        self.entries: list[dict[str, Any]] = []

    def run(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """All entries of the rows, each with its times or with what went wrong."""
        self.copy_rate = self.stopwatch.copy_rate()
        self.say(f"copy {self.copy_rate / 1e9:.0f} GB/s, read and written")
        for row in rows:
            try:
                with _matmul_precision(tf32=row.precision == "tf32"):
                    self.entries += self._row(row)
                self._free()
            except Exception as error:  # such as no memory for x: the other rows are measured all the same
                failure = Failure.of(error).text
                self.entries.append(self._entry(row, row.spec(row.layouts[0]), "none", "own") | {"failure": failure})
                self.say(f"{row.name}: {failure}")
            self.save(self.entries)
        return self.entries

    def _free(self) -> None:
        forget_compiled()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def _entry(row: Row, spec: PoolSpec, candidate: str, kind: str) -> dict[str, Any]:
        return {
            "row": row.name,
            "B": row.B,
            "H": row.H,
            "K": row.K,
            "dtype": row.dtype,
            "precision": row.precision,
            "layout": spec.layout,
            "candidate": candidate,
            "kind": kind,
            "failure": None,
            "times": {},
        }

    def _row(self, row: Row) -> list[dict[str, Any]]:
        generator = torch.Generator(self.device).manual_seed(row.B + row.H + row.K)
        dtype = getattr(torch, row.dtype)
        x = torch.randn(row.B, row.H, row.K, device=self.device, generator=generator).to(dtype)
        g = torch.randn(row.B, row.H, device=self.device, generator=generator).to(dtype)
        items = slice(0, _TRUTH_ITEMS)
        # The composite that errors are held against is of float32, whatever class the row is of.
        with _matmul_precision(tf32=False):
            truth = pool_ref(x[items], g[items])
            composite = composite_errors(x[items], g[items], truth)
        candidates = []
        for layout in row.layouts:
            spec = row.spec(layout)
            seen = x if layout == "bhk" else x.mT.contiguous()
            for algorithm in self.algorithms:
                candidates.append(self._own(row, spec, algorithm, seen, g, truth, composite))
        # Peers in the layout that suits them all.
        for peer in self.peers_of(row.spec("bhk"), self.which):
            candidates.append(self._peer(row, peer, x, g, truth))
        calls = {
            f"{number} {quantity}": call
            for number, candidate in enumerate(candidates)
            for quantity, call in candidate.calls.items()
        }
        try:
            outcomes = self.stopwatch.interleaved(calls)
        except Exception as error:  # the GPU is lost: what is known by now is kept
            outcomes = dict.fromkeys(calls, Failure.of(error))
        for number, candidate in enumerate(candidates):
            for quantity in candidate.calls:
                self._note(row, candidate, quantity, outcomes[f"{number} {quantity}"])
            self._tell(candidate.entry)
        return [candidate.entry for candidate in candidates]

    def _own(
        self,
        row: Row,
        spec: PoolSpec,
        algorithm: str | None,
        x: Tensor,
        g: Tensor,
        truth: Truth,
        composite: tuple[float, float],
    ) -> _Candidate:
        candidate = _Candidate(self._entry(row, spec, algorithm or "invpool", "own"))
        entry = candidate.entry
        try:
            choice = self.maker.choice(spec, algorithm)
            entry["candidate"] = choice.algorithm.name
            entry["plan"] = {"forward": str(choice.forward), "backward": str(choice.backward)}
            candidate.predictions = self.maker.predictions(spec, choice, row.B)
            own = self.maker.make(spec, choice)
            both = functools.partial(own.forward_backward, x, g)
            entry["resources"] = own.resources
            self._errors(entry, spec, both(), truth)
            for what, error in zip(("out", "dx"), composite, strict=True):
                entry[f"composite_error_{what}"] = _finite(error)
                entry[f"allowed_error_{what}"] = _finite(allowed_error(spec, what, error))
            self._memory(entry, both, x, g)
            entry["bitwise_runs"] = _BITWISE_RUNS
            entry["bitwise_equal_runs"] = equal_runs(both)
            calls: dict[str, Call] = {
                "forward": functools.partial(own.forward, x),
                "backward": own.backward_call(x, g),
                "forward+backward": both,
                "autograd": functools.partial(through_autograd, own.op, x, g),
            }
            if row.replay:
                self._replays(row, candidate, own, x, g)
            candidate.calls = calls
        except Exception as error:
            entry["failure"] = Failure.of(error).text
        return candidate

    def _peer(self, row: Row, peer: Peer, x: Tensor, g: Tensor, truth: Truth) -> _Candidate:
        candidate = _Candidate(self._entry(row, row.spec("bhk"), peer.name, "peer"))
        entry = candidate.entry
        try:
            ready = peer.make(x, g, self.stopwatch)
            entry["note"] = ready.note
            both = functools.partial(through_autograd, ready.pool, x, g)
            self._errors(entry, row.spec("bhk"), both(), truth)
            self._memory(entry, both, x, g)
            candidate.calls = {"forward": functools.partial(without_gradient, ready.pool, x), "forward+backward": both}
        except Exception as error:
            entry["failure"] = Failure.of(error).text
        return candidate

    @staticmethod
    def _errors(entry: dict[str, Any], spec: PoolSpec, got: tuple[Tensor, Tensor], truth: Truth) -> None:
        out, dx = got
        dx = dx if spec.layout == "bhk" else dx.mT
        entry["error_out"] = _finite(norm_error(out[:_TRUTH_ITEMS], truth.out))
        entry["error_dx"] = _finite(norm_error(dx[:_TRUTH_ITEMS], truth.dx))

    def _memory(self, entry: dict[str, Any], both: Call, x: Tensor, g: Tensor) -> None:
        """The peak of forward and backward, and what of it is neither out nor dx."""
        peak = self.stopwatch.peak_extra_bytes(both)
        results = x.numel() * x.element_size() + g.numel() * g.element_size()
        entry["peak_extra_bytes"] = peak
        entry["peak_beyond_results_bytes"] = peak - results

    def _replays(self, row: Row, candidate: _Candidate, own: Own, x: Tensor, g: Tensor) -> None:
        """Kernel-only times by graph replay, over one input and over so many that L2 holds none of them."""
        backward = own.backward_call(x, g)
        repeated: dict[str, list[Call]] = {
            "forward replay": [functools.partial(own.forward, x)] * GRAPH_LAUNCHES,
            "backward replay": [backward] * GRAPH_LAUNCHES,
        }
        bytes_each = x.numel() * x.element_size()
        sets = [x.clone() for _ in range(min(_MOST_SETS, math.ceil(_TIMES_L2 * self.stopwatch.l2_bytes / bytes_each)))]
        repeated["forward replay, cold"] = [functools.partial(own.forward, other) for other in sets]
        repeated["backward replay, cold"] = [own.backward_call(other, g) for other in sets]
        for quantity, calls in repeated.items():
            try:
                outcome: Timing | Failure = self.stopwatch.replayed(calls)
            except Exception as error:
                outcome = Failure.of(error)
            self._note(row, candidate, quantity, outcome)

    def _note(self, row: Row, candidate: _Candidate, quantity: str, outcome: Timing | Failure) -> None:
        times = candidate.entry["times"]
        if isinstance(outcome, Failure):
            times[quantity] = {"failure": outcome.text}
            return
        spec = row.spec(candidate.entry["layout"])
        directions = [d for d in ("forward", "backward") if d in quantity] or ["forward", "backward"]
        least = sum(spec.least_bytes(direction, row.B) for direction in directions)
        note = outcome.as_dict() | {"share": least / (1e-6 * outcome.median_us) / self.copy_rate}
        if candidate.predictions and quantity != "autograd":
            foretold = [candidate.predictions[direction] for direction in directions]
            note["predicted_us"] = sum(float(part["predicted_us"]) for part in foretold)
            note["bound"] = "+".join(str(part["bound"]) for part in foretold)
        times[quantity] = note

    def _tell(self, entry: dict[str, Any]) -> None:
        head = f"{entry['row']:<26} {entry['layout']} {entry['candidate']:<14}"
        if entry["failure"]:
            self.say(f"{head} FAILED {entry['failure']}")
            return
        facts = [f"errors {_error_text(entry['error_out'])} {_error_text(entry['error_dx'])}"]
        facts.append(f"extra {entry['peak_beyond_results_bytes'] / 1e6:.1f} MB")
        if "bitwise_runs" in entry:
            facts.append(f"bitwise {entry['bitwise_equal_runs']}/{entry['bitwise_runs']}")
        if entry.get("note"):
            facts.append(entry["note"])
        for direction, plan in entry.get("plan", {}).items():
            facts.append(f"{direction}: {plan} ({entry['resources'].get(direction, 'resources unknown')})")
        self.say(f"{head} {', '.join(facts)}")
        for quantity, time in entry["times"].items():
            self.say(f"{head} {quantity:<21} {_time_text(time)}")


def _time_text(time: Mapping[str, Any]) -> str:
    if "failure" in time:
        return f"FAILED {time['failure']}"
    text = (
        f"{time['median_us']:9.2f} us [{time['lower_quartile_us']:.2f} {time['upper_quartile_us']:.2f}]"
        f" {100 * time['share']:5.1f} %"
    )
    if "predicted_us" in time:
        text += f"  predicted {time['predicted_us']:.2f} ({time['bound']})"
    return text + ("  HOST-BOUND" if time.get("host_bound") else "")


def _error_text(error: float | None) -> str:
    return "NaN" if error is None else f"{error:.1e}"


def _finite(number: float) -> float | None:
    """For JSON, which has no NaN: null instead."""
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def _matmul_precision(tf32: bool) -> Iterator[None]:
    """What float32 products of matrices may be made of, by cuBLAS and by torch.compile."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---------------------------------------------------------------- goals


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One line of the goal table. ``reached``: yes, no, ``no, floor kept``, or ``open`` where a figure is missing."""

    row: str
    what: str
    goal: str
    floor: str
    measured: str
    reached: str


def _best(entries: Iterable[Mapping[str, Any]], quantity: str) -> tuple[float, Mapping[str, Any]] | None:
    """Least median of a quantity, and whose it is."""
    timed = [(entry["times"].get(quantity, {}).get("median_us"), entry) for entry in entries]
    found = [(float(median), entry) for median, entry in timed if median is not None]
    return min(found, key=lambda pair: pair[0], default=None)


def _judged(goal: Goal, entries: Sequence[Mapping[str, Any]]) -> Verdict:
    of_row = [entry for entry in entries if entry["row"] == goal.row]
    best = _best((e for e in of_row if e["kind"] == "own" and e["layout"] == "bhk"), goal.quantity)
    floor = "" if goal.floor is None else goal.text(goal.floor)
    head = (goal.row, goal.quantity, goal.text(goal.goal), floor)
    if best is None:
        return Verdict(*head, "not measured", "open")
    microseconds, entry = best
    name, missing = str(entry["candidate"]), []
    if goal.unit == "share":
        value, note = float(entry["times"][goal.quantity]["share"]), f"{microseconds:.1f} us, {name}"
    elif goal.unit == "us":
        value, note = microseconds, name
        warm = entry["times"].get(goal.quantity.removesuffix(", cold"), {}).get("median_us")
        if goal.quantity.endswith(", cold") and warm is not None:
            note += f"; warm {warm:.3g} us"
    else:
        rivals: dict[str, float] = {}
        for rival in goal.against:
            timed = _best((e for e in of_row if e["candidate"] == rival), goal.quantity)
            if timed is not None:
                rivals[rival] = timed[0]
            elif rival in goal.recorded:
                rivals[f"{rival} as recorded"] = goal.recorded[rival]
            else:
                missing.append(rival)
        if not rivals:
            return Verdict(*head, f"{microseconds:.1f} us, {name}; no {' '.join(missing)}", "open")
        quickest = min(rivals, key=lambda rival: rivals[rival])
        value = rivals[quickest] / microseconds
        note = f"{microseconds:.1f} us, {name}; {quickest} {rivals[quickest]:.1f} us"
        if missing:
            note += f"; no {' '.join(missing)}"
    if not goal.reached(value, goal.goal):
        kept = goal.floor is not None and goal.reached(value, goal.floor)
        reached = "no, floor kept" if kept else "no"
    else:
        reached = "open" if missing else "yes"
    return Verdict(*head, f"{goal.text(value)} ({note})", reached)


def _layout_verdicts(row: str, own: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    found = []
    for quantity in ("forward", "forward+backward"):
        bhk = _best((entry for entry in own if entry["layout"] == "bhk"), quantity)
        bkh = _best((entry for entry in own if entry["layout"] == "bkh"), quantity)
        if bhk is None or bkh is None:
            continue
        ratio = bkh[0] / bhk[0]
        measured = f"{ratio:.3f} ({bkh[0]:.1f} / {bhk[0]:.1f} us)"
        reached = "yes" if ratio <= LAYOUT_GOAL else "no"
        found.append(Verdict(row, f"bkh / bhk {quantity}", f"{LAYOUT_GOAL}", "", measured, reached))
    return found


def _worst_error(entry: Mapping[str, Any], what: str) -> float:
    """Error over what is allowed; NaN is null here and passes nothing."""
    error, bound = entry[f"error_{what}"], entry[f"allowed_error_{what}"]
    if error is None or bound is None:
        return math.inf
    return float(error / bound) if bound else (0.0 if error == 0 else math.inf)


def _quality_verdicts(row: str, own: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The worst of ours: largest error against what is allowed, fewest equal runs."""
    found = []
    judged = [(entry, what) for entry in own if "allowed_error_dx" in entry for what in ("out", "dx")]
    if judged:
        entry, what = max(judged, key=lambda pair: _worst_error(*pair))
        error, bound = _error_text(entry[f"error_{what}"]), _error_text(entry[f"allowed_error_{what}"])
        reached = "yes" if _worst_error(entry, what) <= 1 else "no"
        found.append(
            Verdict(row, f"error of {what}", bound, "", f"{error} ({entry['candidate']} {entry['layout']})", reached)
        )
    repeated = [entry for entry in own if "bitwise_runs" in entry]
    if repeated:
        entry = min(repeated, key=lambda entry: int(entry["bitwise_equal_runs"]))
        equal, runs = entry["bitwise_equal_runs"], entry["bitwise_runs"]
        reached = "yes" if equal == runs else "no"
        found.append(
            Verdict(row, "equal runs", str(runs), "", f"{equal} ({entry['candidate']} {entry['layout']})", reached)
        )
    return found


def verdicts(entries: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The goals of the rows that were run, each with what was measured; then layouts, errors and determinism."""
    names = list(dict.fromkeys(str(entry["row"]) for entry in entries))
    found = [_judged(goal, entries) for goal in GOALS if goal.row in names]
    for name in names:
        own = [entry for entry in entries if entry["row"] == name and entry["kind"] == "own"]
        found += _layout_verdicts(name, own) + _quality_verdicts(name, own)
    return found


def goal_table(found: Sequence[Verdict]) -> list[str]:
    """The lines of the table: row, what, goal, floor, measured, reached."""
    lines = [("row", "what", "goal", "floor", "measured", "reached"), *map(dataclasses.astuple, found)]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
