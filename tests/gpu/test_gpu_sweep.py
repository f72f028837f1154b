"""The sweep on a GPU: what it finds is right, what a candidate does is its own affair, what is stored is used."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import invpool
from invpool.algorithms import choose, find_algorithm
from invpool.gpu import present_gpu
from invpool.reference import norm_error, pool_ref
from invpool.spec import PoolSpec
from invpool.sweep.crew import LocalCrew
from invpool.sweep.measure import Subject, Task
from invpool.sweep.records import read_records
from invpool.tuned import TUNED_VARIABLE, device_folder
from planted import plant

pytest.importorskip("pycuda")
__all__ = ["plant"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TUNED_VARIABLE, str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invpool.cli.app", *words], capture_output=True, text=True, check=False, timeout=400
    )


def test_a_sweep_stores_what_generate_then_takes(tmp_path: Path, store: Path) -> None:
    spec, folder = PoolSpec(33, 20), tmp_path / "h33_k20_f32_bhk"
    made = run("generate", "--H", "33", "--K", "20", "--out", str(folder))
    assert made.returncode == 0, made.stderr
    swept = run("sweep", str(folder), "--batch", "16,4096", "--budget", "24", "--json")
    assert swept.returncode == 0, swept.stderr
    data = json.loads(swept.stdout)
    device = torch.cuda.get_device_name()
    assert data["device"] == device
    assert data["candidates"] == 24
    assert Path(data["table"]) == store / device_folder(device) / f"{spec.slug}.json"
    for verdict in data["verdicts"]:
        assert verdict["time"]["median_us"] > 0
        assert verdict["times_faster_than_composite"] > 1
    op = invpool.load(folder)
    assert op.manifest["tuned_on"] == device
    x = torch.randn(5, 33, 20, device="cuda", requires_grad=True)
    g = torch.randn(5, 33, device="cuda")
    truth = pool_ref(x.detach(), g)
    for row in range(len(op.row_starts)):
        with op.only_row(row):
            out = op(x)
            (dx,) = torch.autograd.grad(out, x, g)
        assert norm_error(out.detach(), truth.out) < 1e-6
        assert norm_error(dx, truth.dx) < 2e-6
    again = run("sweep", str(folder), "--batch", "16,4096", "--budget", "24", "--json")
    assert json.loads(again.stdout)["candidates"] == 24
    assert len(read_records(store / device_folder(device) / f"{spec.slug}.jsonl")) == 24


def test_what_a_candidate_does_to_its_context_is_charged_to_it_alone(plant) -> None:
    from invpool.compile import Target
    from invpool.compile_pool import CompilePool
    from invpool.render import render_kernel

    plant(
        {("forward", 96): "reads what is not there", ("forward", 128): "writes NaN", ("forward", 168): "skips a tile"}
    )
    spec, gpu, found = PoolSpec(40, 20), present_gpu(), find_algorithm("one_pass")
    assert gpu is not None
    plans = {
        r: [p for p in found.legal(spec, gpu, "forward") if p.knobs["registers"] == r][-1] for r in (64, 96, 128, 168)
    }
    default = choose(spec, gpu, "one_pass")
    pool = CompilePool()

    def subject(registers: int) -> Subject:
        choice = dataclasses.replace(default, forward=plans[registers])
        code = {
            d: pool.submit(render_kernel(found, spec, choice.plan(d)), Target(gpu.arch)).result(300).code  # type: ignore[union-attr]
            for d in ("forward", "backward")
        }
        return Subject(choice, code)  # type: ignore[arg-type]

    crew = LocalCrew("gpu")
    try:
        answers = [
            crew.submit(Task(spec, gpu, "forward", (subject(64), subject(r)), (16, 4096))).result(300)
            for r in (96, 128, 168, 64)
        ]
    finally:
        crew.close()
        pool.close()
    outcomes = [[one.outcome for one in answer.subjects] for answer in answers]
    assert outcomes == [["ok", "runtime"], ["ok", "correctness"], ["ok", "correctness"], ["ok", "ok"]]
    assert set(answers[-1].subjects[1].times) == {16, 4096}


def test_d20_exactly_48_kib_of_dynamic_shared_memory_run(tmp_path: Path, store: Path) -> None:
    spec, gpu, found = PoolSpec(96, 126), present_gpu(), find_algorithm("three_pass")
    assert gpu is not None
    exact = next(p for p in found.legal(spec, gpu, "backward") if found.launch(spec, p).shared_bytes == 48 * 1024)
    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps([{"algorithm": "three_pass", "direction": "backward", "plan": exact.knobs}]))
    words = ["--algorithm", "three_pass", "--batch", "64", "--budget", "4", "--plans", str(plans)]
    swept = run("sweep", "--H", "96", "--K", "126", *words)
    assert swept.returncode == 0, swept.stderr
    records = read_records(store / device_folder(torch.cuda.get_device_name()) / f"{spec.slug}.jsonl")
    assert [r.outcome for r in records if dict(r.plan) == exact.knobs and r.direction == "backward"] == ["ok"]


def test_d22_other_specs_do_not_take_the_entry(tmp_path: Path, store: Path) -> None:
    swept = run("sweep", "--H", "40", "--K", "24", "--dtype", "float16", "--batch", "16", "--budget", "8")
    assert swept.returncode == 0, swept.stderr
    assert len(list(store.rglob("*.json"))) == 1
    for number, words in enumerate((["--dtype", "float64"], ["--dtype", "float16", "--layout", "bkh"])):
        made = run("generate", "--H", "40", "--K", "24", *words, "--out", str(tmp_path / str(number)), "--json")
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["tuned_on"] is None
    made = run("generate", "--H", "40", "--K", "24", "--dtype", "float16", "--out", str(tmp_path / "same"), "--json")
    assert json.loads(made.stdout)["tuned_on"] == torch.cuda.get_device_name()


def test_the_caller_s_cuda_is_untouched(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from invpool.cli.app import app\n"
        "from typer.testing import CliRunner\n"
        "words = ['sweep', '--H', '9', '--K', '20', '--batch', '16', '--budget', '4', '--algorithm', 'one_pass']\n"
        "if __name__ == '__main__':\n"
        "    result = CliRunner().invoke(app, words)\n"
        "    assert result.exit_code == 0, (result.output, result.exception)\n"
        "    assert not torch.cuda.is_initialized()\n"
    )
    script = tmp_path / "sweep.py"  # a file: compilers are spawned, and a spawned process looks for its parent's main
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
