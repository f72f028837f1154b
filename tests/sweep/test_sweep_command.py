"""``invpool sweep`` as people type it, by the emulator's counters: D20 and D21, what is printed and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from invpool.algorithms import find_algorithm
from invpool.cli.app import app
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.records import read_records
from invpool.tuned import TUNED_VARIABLE

H200 = KNOWN_GPUS["h200"]
ONE_PASS = find_algorithm("one_pass")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TUNED_VARIABLE, str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def sweep(*words: str) -> Any:
    return CliRunner().invoke(app, ["sweep", "--measure", "counters", *words])


def plan_with(spec: PoolSpec, direction: str, registers: int) -> dict[str, Any]:
    """The knobs of a legal plan of one_pass; a fault planted by its registers is its own."""
    plans = ONE_PASS.legal(spec, H200, direction)  # type: ignore[arg-type]
    return next(plan.knobs for plan in plans if plan.knobs["registers"] == registers)


def write_plans(path: Path, *entries: tuple[str, str, dict[str, Any]]) -> str:
    path.write_text(json.dumps([{"algorithm": a, "direction": d, "plan": knobs} for a, d, knobs in entries]))
    return str(path)


@pytest.mark.slow
def test_d20_what_cannot_run_is_recorded_and_the_sweep_goes_on(plant, tmp_path: Path, store: Path) -> None:
    spec = PoolSpec(30, 128)
    mma = find_algorithm("one_pass_mma")
    plans = (mma.fitted(spec, plan, H200) for plan in mma.candidates(spec, "forward"))
    too_large = next(plan for plan in plans if "bytes of shared memory" in (mma.reject(spec, plan, H200) or ""))
    assert mma.launch(spec, too_large).shared_bytes > 250 * 1024
    broken = plan_with(spec, "forward", 96)
    odd = broken | {"rows": 4096}
    path = write_plans(
        tmp_path / "plans.json",
        ("one_pass_mma", "forward", too_large.knobs),
        ("one_pass", "forward", broken),
        ("one_pass", "forward", odd),
    )
    plant({("forward", 96): "does not compile"})
    words = ["--algorithm", "one_pass", "--algorithm", "one_pass_mma", "--batch", "64", "--plans", path, "--json"]
    result = sweep("--H", "30", "--K", "128", "--budget", "7", *words)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    records = read_records(store / "emulator-x86-64" / f"{spec.slug}.jsonl")
    assert len(records) == data["candidates"] == 7
    by_plan = {(r.algorithm, json.dumps(dict(r.plan), sort_keys=True)): r for r in records if r.direction == "forward"}

    def record_of(algorithm: str, knobs: dict[str, Any]) -> Any:
        return by_plan[algorithm, json.dumps(knobs, sort_keys=True)]

    large = record_of("one_pass_mma", too_large.knobs)
    assert large.outcome == "resources"
    assert "bytes of shared memory" in large.reason
    assert record_of("one_pass", broken).outcome == "compile"
    assert record_of("one_pass", odd).outcome == "resources"
    assert data["failures"]["compile"] >= 1
    assert data["failures"]["resources"] == 2
    assert {v["direction"] for v in data["verdicts"]} == {"forward", "backward"}
    for verdict in data["verdicts"]:
        assert (verdict["algorithm"], verdict["plan"]) != ("one_pass", broken)
    assert data["table"] is None


def test_d20_a_space_of_bad_plans_is_an_error_with_reasons_and_stores_nothing(plant, store: Path) -> None:
    every = sorted({plan.knobs["registers"] for plan in ONE_PASS.legal(PoolSpec(9, 20), H200, "forward")})
    plant({("forward", registers): "does not compile" for registers in every})
    result = sweep("--H", "9", "--K", "20", "--algorithm", "one_pass", "--batch", "64", "--budget", "3")
    assert result.exit_code != 0
    assert "none of 3 candidates can be used (3 compile)" in str(result.exception)
    assert not list(store.rglob("*.json"))


@pytest.mark.slow
def test_d20_exactly_48_kib_of_dynamic_shared_memory_run(store: Path) -> None:
    spec = PoolSpec(96, 126)
    found = find_algorithm("three_pass")
    exact = [plan for plan in found.legal(spec, H200, "backward") if found.launch(spec, plan).shared_bytes == 48 * 1024]
    assert exact
    words = ["--algorithm", "three_pass", "--batch", "64", "--budget", "2", "--json"]
    path = write_plans(store.parent / "plans.json", ("three_pass", "backward", exact[0].knobs))
    result = sweep("--H", "96", "--K", "126", "--plans", path, *words)
    assert result.exit_code == 0, result.output
    (record,) = [
        record
        for record in read_records(store / "emulator-x86-64" / f"{spec.slug}.jsonl")
        if dict(record.plan) == exact[0].knobs
    ]
    assert record.outcome == "ok"


def test_d21_a_fast_kernel_that_is_wrong_is_shown_as_wrong_and_never_wins(plant, tmp_path: Path, store: Path) -> None:
    spec = PoolSpec(20, 12)  # no multiple of any tile
    faults = {
        ("forward", 96): "skips a tile",
        ("forward", 128): "writes NaN",
        ("backward", 96): "skips a tile",
        ("backward", 128): "writes NaN",
    }
    plant(faults)
    planted = [("one_pass", d, plan_with(spec, d, registers)) for d, registers in faults]
    path = write_plans(tmp_path / "plans.json", *planted)
    words = ["--algorithm", "one_pass", "--batch", "64", "--budget", "10", "--plans", path]
    result = sweep("--H", "20", "--K", "12", *words)
    assert result.exit_code == 0, result.output
    wrong = {
        (r.direction, json.dumps(dict(r.plan), sort_keys=True)): r
        for r in read_records(store / "emulator-x86-64" / f"{spec.slug}.jsonl")
        if r.outcome == "correctness"
    }
    for (_, direction, knobs), name in zip(planted, faults.values(), strict=True):
        record = wrong[direction, json.dumps(knobs, sort_keys=True)]
        assert "allowed" in record.reason
        assert ("nan" in record.reason) == (name == "writes NaN")
        assert not record.times
    assert f"{len(wrong)} correctness" in result.stdout
    assert "wrong: forward one_pass" in result.stdout
    again = json.loads(sweep("--H", "20", "--K", "12", *words, "--json").stdout)
    for verdict in again["verdicts"]:
        assert verdict["plan"]["registers"] not in (96, 128)


@pytest.mark.slow
def test_the_table_and_the_plot(tmp_path: Path, store: Path) -> None:
    words = ["--H", "64", "--K", "8", "--algorithm", "one_pass_mma", "--batch", "16,4096", "--budget", "6"]
    result = sweep(*words, "--plot", str(tmp_path / "sweep.png"), "--records", str(tmp_path / "r.jsonl"))
    assert result.exit_code == 0, result.output
    for text in ("h64_k8_f32_bhk on emulator", "forward", "4096", "one_pass_mma row_blocks=", "failed:   none"):
        assert text in result.stdout
    assert "stored:   nothing: no GPU was measured" in result.stdout
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_records(tmp_path / "r.jsonl")) == 6
    assert not list(store.rglob("*.json"))
    replayed = CliRunner().invoke(app, ["sweep", *words, "--replay", str(tmp_path / "r.jsonl"), "--json"])
    assert replayed.exit_code == 0, replayed.output
    data = json.loads(replayed.stdout)
    assert data["device"].startswith("emulator")
    assert data["failures"].get("correctness") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a generated package, or --H and --K"),
        (["--H", "7"], "give a generated package, or --H and --K"),
        (["--H", "7", "--K", "8", "--batch", "16,x"], "--batch is '16,x'"),
        (["--H", "7", "--K", "8", "--batch", "0"], "--batch is '0'"),
        (["--H", "7", "--K", "8", "--budget", "soon"], "budget is 'soon'"),
        (["--H", "7", "--K", "8", "--direction", "up"], "--direction is 'up'"),
        (["--H", "7", "--K", "8", "--algorithm", "magic"], "algorithm is 'magic'"),
        (["--H", "7", "--K", "8", "--measure", "guess"], "--measure is 'guess'"),
    ],
)
def test_usage(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["sweep", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output


def test_without_a_gpu_the_message_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from invpool.sweep import run

    monkeypatch.setattr(run, "has_pycuda", lambda: True)
    monkeypatch.setattr(run, "gpu_numbers", lambda: ())
    result = CliRunner().invoke(app, ["sweep", "--H", "7", "--K", "8"])
    assert "--measure counters" in str(result.exception)
    monkeypatch.setattr(run, "has_pycuda", lambda: False)
    result = CliRunner().invoke(app, ["sweep", "--H", "7", "--K", "8"])
    assert "pip install 'invpool[cuda]'" in str(result.exception)


@pytest.mark.parametrize("command", ["generate", "check", "explain", "sweep", "clean", "show"])
def test_help_loses_no_word_to_markup(command: str) -> None:
    """Square brackets are markup in a help text: what they hold is not shown."""
    import inspect

    from invpool.cli import app as room

    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "250", "TERM": "dumb"})
    shown = " ".join(result.output.replace("│", " ").split())
    for parameter in inspect.signature(getattr(room, command)).parameters.values():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if option.help:
                assert " ".join(option.help.split()) in shown


def test_the_tool_is_the_command() -> None:
    import subprocess
    import sys

    from helpers import REPO

    run = subprocess.run(
        [sys.executable, REPO / "tools" / "sweep.py", "--help"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "invpool sweep" in run.stdout
