"""The figures table without a GPU: rows, goals, selection, what a failing candidate leaves, the shape of an entry."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import fake_compiler
from invpool.algorithms import Choice, choose
from invpool.bench.figures import GOALS, ROWS, Bench, Row, allowed_error, goal_table, select, verdicts
from invpool.bench.own import OwnMaker, forced, parse_plan
from invpool.bench.peers import Peer, Ready, peers
from invpool.bench.timing import Call, Failure, Stopwatch, Timing
from invpool.cache import KernelCache
from invpool.errors import PlanError
from invpool.gpu import known_gpu
from invpool.reference import composite
from invpool.runtime import closed_form_backward, closed_form_forward
from invpool.spec import PoolSpec

H200 = known_gpu("h200")
ROW = Row(5, 6, 4)


class FakeStopwatch:
    """Each call takes the microseconds that its name has coming, or a hundred; every call is made once."""

    l2_bytes = 400

    def __init__(self, times: Mapping[str, float] | None = None) -> None:
        self.times = times or {}
        self.replays: list[int] = []

    def interleaved(self, calls: Mapping[str, Call], rounds: int = 3) -> dict[str, Timing | Failure]:
        found: dict[str, Timing | Failure] = {}
        for name, call in calls.items():
            try:
                call()
                found[name] = Timing.of([self.times.get(name, 100.0)] * 3)
            except Exception as error:
                found[name] = Failure.of(error)
        return found

    def replayed(self, calls: Sequence[Call]) -> Timing:
        self.replays.append(len(calls))
        calls[-1]()
        return Timing.of([2.0, 2.0])

    def peak_extra_bytes(self, call: Call) -> int:
        call()
        return 1000

    def copy_rate(self) -> float:
        return 4e12


@dataclasses.dataclass
class FakeOwn:
    """The closed form in place of kernels; a fault may be planted."""

    spec: PoolSpec
    fault: Callable[[Tensor], Tensor] = lambda out: out

    @property
    def resources(self) -> dict[str, str]:
        return {"forward": "99 registers"}

    def _seen(self, x: Tensor) -> Tensor:
        return x if self.spec.layout == "bhk" else x.mT

    def op(self, x: Tensor) -> Tensor:
        return composite(self._seen(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(closed_form_forward(self._seen(x), None, None))

    def backward(self, x: Tensor, g: Tensor) -> Tensor:
        return self._seen(closed_form_backward(self._seen(x), g, None, None)).contiguous()

    def forward_backward(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(x), self.backward(x, g)

    def backward_call(self, x: Tensor, g: Tensor) -> Call:
        return functools.partial(self.backward, x, g)


class FakeMaker:
    def __init__(self, fault: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        self.fault = fault

    def choice(self, spec: PoolSpec, algorithm: str | None) -> Choice:
        if algorithm == "broken":
            raise PlanError("no legal plan:\n  none at all")
        return choose(spec, H200, algorithm or "one_pass")

    def make(self, spec: PoolSpec, choice: Choice) -> FakeOwn:
        return FakeOwn(spec, self.fault)

    def predictions(self, spec: PoolSpec, choice: Choice, batch: int) -> dict[str, dict[str, Any]]:
        return {
            "forward": {"predicted_us": 10.0, "bound": "fma"},
            "backward": {"predicted_us": 20.0, "bound": "dram"},
        }


def made(*candidates: Peer, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Entries of one small row on the CPU, and what was said on the way."""
    lines: list[str] = []
    settings: dict[str, Any] = {"maker": FakeMaker(), "stopwatch": FakeStopwatch(), "rows": [ROW]} | options
    rows, maker, stopwatch = settings.pop("rows"), settings.pop("maker"), settings.pop("stopwatch")
    bench = Bench(stopwatch, maker, device="cpu", peers_of=lambda spec, which: candidates, say=lines.append, **settings)
    return bench.run(rows), lines


# ---- rows and goals


def test_rows_are_those_of_the_table_and_each_goal_names_one() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {"b16384_h128_k32_f32", "b16384_h128_k32_f32_tf32", "b16384_h128_k32_bf16", "b64_h883_k720_f32"} <= set(
        names
    )
    assert {goal.row for goal in GOALS} <= set(names)
    for row in ROWS:
        both = row.dtype == "float32" and row.precision == "exact"
        assert row.layouts == (("bhk", "bkh") if both else ("bhk",)), row.name


def test_goals_and_floors_agree_with_each_other() -> None:
    """A goal is beyond its floor; a share's floor in microseconds is the one that the prototype measured."""
    for goal in GOALS:
        assert goal.floor is None or goal.reached(goal.goal, goal.floor), goal
        assert bool(goal.against) == (goal.unit == "times"), goal
    least = PoolSpec(128, 32).least_bytes("forward", 16384)
    assert least / 4283e9 / 0.53 == pytest.approx(123e-6, rel=0.02)


def test_peers_that_goals_are_held_against_exist() -> None:
    names = {peer.name for peer in peers(PoolSpec(321, 96), "all")}
    assert {name for goal in GOALS for name in goal.against} <= names


def test_rows_are_selected_by_pattern_and_layout() -> None:
    assert [row.name for row in select(["h321"])] == ["b1024_h321_k96_f32"]
    assert [row.name for row in select(["b16_", "b256_h128"])] == ["b256_h128_k32_f32", "b16_h128_k32_f32"]
    assert len(select([])) == len(ROWS)
    assert all(row.layouts == ("bkh",) for row in select([], ["bkh"]))
    with pytest.raises(ValueError, match=r"no row matches 'h5'; rows: b16384_h128_k32_f32,"):
        select(["h5"])


def test_allowed_errors_follow_the_rule_of_the_goals() -> None:
    assert allowed_error(PoolSpec(128, 32), "out", 1e-6) == 3e-7
    assert allowed_error(PoolSpec(321, 96), "out", 1e-6) == 1e-6
    assert allowed_error(PoolSpec(321, 96), "dx", 1e-8) == 5e-7
    assert allowed_error(PoolSpec(128, 32, precision="tf32"), "dx", 1e-6) == 1e-3
    assert allowed_error(PoolSpec(128, 32, "bfloat16"), "dx", 2e-3) == 4e-3


# ---- running


def test_an_entry_holds_what_was_measured() -> None:
    entries, lines = made()
    assert [entry["layout"] for entry in entries] == ["bhk", "bkh"]
    entry = entries[0]
    assert {name: entry[name] for name in ("B", "H", "K", "dtype", "candidate", "kind", "failure")} == {
        "B": 5, "H": 6, "K": 4, "dtype": "float32", "candidate": "one_pass", "kind": "own", "failure": None,
    }  # fmt: skip
    assert set(entry["times"]) == {"forward", "backward", "forward+backward", "autograd"}
    for seen in entries:
        assert seen["error_out"] < 1e-6
        assert seen["error_dx"] < 1e-6
    assert (entry["bitwise_equal_runs"], entry["bitwise_runs"]) == (50, 50)
    assert entry["peak_beyond_results_bytes"] == 1000 - 4 * (5 * 6 * 4 + 5 * 6)
    forward, both = entry["times"]["forward"], entry["times"]["forward+backward"]
    # x and out, 150 floats, in 100 us, of 4 TB/s.
    assert forward["share"] == pytest.approx(600 / 100e-6 / 4e12)
    assert both["share"] == pytest.approx(1800 / 100e-6 / 4e12)
    assert (forward["predicted_us"], both["predicted_us"], both["bound"]) == (10.0, 30.0, "fma+dram")
    assert json.loads(json.dumps(entries)) == entries
    assert any("one_pass" in line and "predicted 10.00 (fma)" in line for line in lines)
    assert any("(99 registers), backward: " in line for line in lines)


def test_failing_candidates_are_recorded_and_the_rest_goes_on() -> None:
    def refuses(x: Tensor, g: Tensor, stopwatch: Stopwatch) -> Ready:
        raise RuntimeError("out of tiles")

    calls = iter(range(100))

    def breaks_later(x: Tensor) -> Tensor:
        if next(calls) >= 2:  # the errors and the memory are taken before the times
            raise RuntimeError("an illegal something")
        return composite(x)

    entries, lines = made(
        Peer("refuses", refuses),
        Peer("breaks", lambda x, g, stopwatch: Ready(breaks_later)),
        Peer("works", lambda x, g, stopwatch: Ready(composite, "as it is")),
        algorithms=["broken", "one_pass"],
    )
    found = {(entry["candidate"], entry["layout"]): entry for entry in entries}
    assert found["broken", "bhk"]["failure"] == "PlanError: no legal plan:\n  none at all"
    assert found["refuses", "bhk"]["failure"] == "RuntimeError: out of tiles"
    assert found["breaks", "bhk"]["times"]["forward"] == {"failure": "RuntimeError: an illegal something"}
    assert found["works", "bhk"]["times"]["forward"]["median_us"] == 100
    assert found["one_pass", "bkh"]["times"]["forward"]["median_us"] == 100
    assert any("FAILED RuntimeError: out of tiles" in line for line in lines)
    assert verdicts(entries)


def test_a_lost_gpu_keeps_what_was_known() -> None:
    class Lost(FakeStopwatch):
        def interleaved(self, calls: Mapping[str, Call], rounds: int = 3) -> dict[str, Timing | Failure]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    entries, _ = made(stopwatch=Lost())
    assert entries[0]["error_out"] < 1e-6
    assert entries[0]["times"]["forward"]["failure"].startswith("RuntimeError: CUDA error")


def test_a_row_that_cannot_begin_leaves_the_others() -> None:
    saved: list[int] = []
    entries, lines = made(rows=[Row(2**40, 64, 64), ROW], save=lambda entries: saved.append(len(entries)))
    assert entries[0]["failure"]
    assert entries[0]["row"] == "b1099511627776_h64_k64_f32"
    assert entries[1]["failure"] is None
    assert saved == [1, 3]
    assert any(line.startswith("b1099511627776") for line in lines)


def test_small_batches_are_replayed_over_one_input_and_over_more_than_l2_holds() -> None:
    stopwatch = FakeStopwatch()
    entries, _ = made(stopwatch=stopwatch, rows=[dataclasses.replace(ROW, replay=True, layouts=("bhk",))])
    # x has 480 bytes, L2 400: three times that is held by three sets.
    assert stopwatch.replays == [128, 128, 3, 3]
    assert entries[0]["times"]["backward replay, cold"]["median_us"] == 2


def test_numbers_that_are_wrong_or_nan_or_change_do_not_pass() -> None:
    poisoned, _ = made(maker=FakeMaker(lambda out: out * math.nan))
    assert poisoned[0]["error_out"] is None
    runs = iter(range(1000))
    shaky, _ = made(maker=FakeMaker(lambda out: out + (1e-3 if next(runs) == 30 else 0.0)))
    assert shaky[0]["bitwise_equal_runs"] == 49
    reached = {verdict.what: verdict.reached for verdict in verdicts(shaky[:1])}
    assert reached == {"error of out": "yes", "equal runs": "no"}
    assert [(v.what, v.measured, v.reached) for v in verdicts(poisoned)][2:3] == [
        ("error of out", "NaN (one_pass bhk)", "no")
    ]


def test_the_matmul_setting_is_that_of_the_row_and_is_put_back() -> None:
    seen: list[bool] = []

    def look(x: Tensor, g: Tensor, stopwatch: Stopwatch) -> Ready:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return Ready(composite)

    before = torch.backends.cuda.matmul.allow_tf32
    made(Peer("looks", look), rows=[dataclasses.replace(ROW, precision="tf32", layouts=("bhk",)), ROW])
    assert seen == [True, False]
    assert torch.backends.cuda.matmul.allow_tf32 == before


# ---- verdicts


def entry(row: str, candidate: str, layout: str = "bhk", kind: str = "own", **times: Any) -> dict[str, Any]:
    timed = {name.replace("_", "+"): {"median_us": us, "share": share} for name, (us, share) in times.items()}
    return {"row": row, "candidate": candidate, "layout": layout, "kind": kind, "failure": None, "times": timed}


def judged(*entries: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {verdict.what: (verdict.measured, verdict.reached) for verdict in verdicts(entries)}


def test_shares_are_judged_by_the_best_of_ours() -> None:
    name = "b16384_h128_k32_f32"
    fast, slow = entry(name, "mma", forward=(110.0, 0.59)), entry(name, "one_pass", forward=(300.0, 0.2))
    assert judged(slow, fast)["forward"] == ("59 % (110.0 us, mma)", "no, floor kept")
    assert judged(slow)["forward"] == ("20 % (300.0 us, one_pass)", "no")
    assert judged(entry(name, "mma", forward=(95.0, 0.68)))["forward"][1] == "yes"
    assert judged(slow)["forward+backward"] == ("not measured", "open")


def test_peers_are_judged_by_their_quickest() -> None:
    name = "b64_h883_k720_f32"
    ours = entry(name, "mma", forward=(100.0, 0.1))
    slow = entry(name, "compile", kind="peer", forward=(700.0, 0.1))
    fast = entry(name, "compile_mean", kind="peer", forward=(450.0, 0.1))
    assert judged(ours)["forward"] == ("100.0 us, mma; no compile compile_mean", "open")
    assert judged(ours, slow)["forward"] == ("7x (100.0 us, mma; compile 700.0 us; no compile_mean)", "open")
    assert judged(ours, slow, fast)["forward"] == ("4.5x (100.0 us, mma; compile_mean 450.0 us)", "no")


def test_recorded_peers_stand_in_for_those_not_timed() -> None:
    ours = entry("b1024_h321_k96_f32", "mma", forward_backward=(300.0, 0.1))
    triton = entry("b1024_h321_k96_f32", "triton_tf32x3", kind="peer", forward_backward=(3900.0, 0.1))
    measured, reached = judged(ours, triton)["forward+backward"]
    assert measured == "11x (300.0 us, mma; compile as recorded 3313.0 us)"
    assert reached == "yes"


def test_layouts_are_compared() -> None:
    name = "b256_h128_k32_f32"
    bhk = entry(name, "mma", forward=(100.0, 0.1))
    assert judged(bhk, entry(name, "mma", "bkh", forward=(102.0, 0.1)))["bkh / bhk forward"][1] == "yes"
    assert judged(bhk, entry(name, "mma", "bkh", forward=(104.0, 0.1)))["bkh / bhk forward"] == (
        "1.040 (104.0 / 100.0 us)",
        "no",
    )


def test_cold_replays_say_what_warm_ones_took() -> None:
    row = entry("b16_h128_k32_f32", "mma")
    row["times"] = {
        "forward replay, cold": {"median_us": 2.9, "share": 0.1},
        "forward replay": {"median_us": 2.2, "share": 0.1},
    }
    assert judged(row)["forward replay, cold"] == ("2.9 us (mma; warm 2.2 us)", "no, floor kept")


def test_the_table_has_a_line_for_each_verdict() -> None:
    lines = goal_table(verdicts([entry("b16384_h128_k32_f32", "mma", forward=(95.0, 0.68))]))
    assert lines[0].split(" | ")[0].strip() == "row"
    assert [cell.strip() for cell in lines[1].split("|")] == [
        "b16384_h128_k32_f32", "forward", "65 %", "53 %", "68 % (95.0 us, mma)", "yes",
    ]  # fmt: skip


# ---- our own ops


def test_plans_are_read_from_the_command_line() -> None:
    assert parse_plan("forward:rows=64,shared_order=padded") == ("forward", {"rows": 64, "shared_order": "padded"})
    for wrong in ("rows=64", "sideways:rows=64", "forward:", "forward:rows", "forward:rows="):
        with pytest.raises(ValueError, match="one looks like forward:rows=64"):
            parse_plan(wrong)


def test_forced_parameters_replace_those_of_the_choice() -> None:
    spec = PoolSpec(128, 32)
    choice = choose(spec, H200, "one_pass")
    changed = forced(choice, spec, H200, {"backward": {"k_step": 16}})
    assert changed.forward == choice.forward
    assert changed.backward.knobs == choice.backward.knobs | {"k_step": 16}
    with pytest.raises(PlanError, match=r"one_pass forward, .*k_step is 17; legal"):
        forced(choice, spec, H200, {"forward": {"k_step": 17}})
    with pytest.raises(ValueError, match="one_pass has no plan parameter tile"):
        forced(choice, spec, H200, {"forward": {"tile": 1}})


def test_a_bound_op_has_the_forced_plan_and_is_compiled_ahead(tmp_path: Path) -> None:
    compiled: list[str] = []

    def compiler(source: str, target: Any) -> Any:
        compiled.append(target.name)
        return fake_compiler(source, target)

    maker = OwnMaker(H200, tmp_path / "ops", {"forward": {"k_step": 16}}, KernelCache(tmp_path / "cache", compiler))
    spec = PoolSpec(9, 20)
    maker.compile_ahead([spec, spec], ["one_pass", "no_such"], 2)
    assert compiled == ["sm_90", "sm_90"]
    own = maker.make(spec, maker.choice(spec, "one_pass"))
    assert compiled == ["sm_90", "sm_90"]
    forward, backward = own.op.manifest["kernels"]
    assert own.resources["backward"].startswith("64 registers, 0 + 0 bytes spilled, ")
    assert (forward["plan"]["k_step"], backward["direction"]) == (16, "backward")
    assert set(maker.predictions(spec, maker.choice(spec, "one_pass"), 100)) == {"forward", "backward"}
    x = torch.randn(3, 9, 20)
    torch.testing.assert_close(own.op(x), composite(x))
