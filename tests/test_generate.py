from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner, Result

import invpool
from helpers import TENSOR_CORES, fake_compiler
from invpool import generate as generate_room
from invpool.binding import import_package, output_lock, require_manifest
from invpool.cache import KernelCache
from invpool.check import Finding, Proof, prove, tolerance
from invpool.cli.app import app
from invpool.errors import CheckError, CompileError, EmulationError, OutputError, PlanError
from invpool.generate import Request, generate
from invpool.gpu import DEFAULT_ARCHS, known_gpu
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec

SPEC = PoolSpec(5, 3)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache", fake_compiler)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the pipeline; tests/gpu runs it with a GPU."""
    monkeypatch.setattr(generate_room, "present_gpu", lambda: None)


def test_without_a_gpu_five_archs_and_ptx_planned_for_the_default(tmp_path: Path, cache: KernelCache) -> None:
    result = generate(Request(SPEC, tmp_path / "p"), cache)
    assert result.archs == DEFAULT_ARCHS
    assert (result.gpu.name, result.gpu_is_present) == ("h200", False)
    assert [t.name for t, _ in result.kernels[0].images] == [*DEFAULT_ARCHS, "compute_75"]  # of three_pass
    assert result.kernel_proof is None
    assert result.cpu_proof.ok
    proof = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert proof["kernels"] is None
    assert proof["closed_form"]["device"] == "cpu"


def test_code_is_for_gpus_that_the_algorithm_can_serve(tmp_path: Path, cache: KernelCache) -> None:
    """Archs that are asked for limit what is chosen; PTX is for the oldest GPU that the algorithm knows."""
    spec = PoolSpec(16, 16)

    def made(name: str, **options: object) -> tuple[str, list[str]]:
        result = generate(Request(spec, tmp_path / name, **options), cache)  # type: ignore[arg-type]
        return result.planned.choice.algorithm.name, [t.name for t, _ in result.kernels[1].images]

    chosen, targets = made("new", archs=("sm_90",))
    assert chosen in TENSOR_CORES
    assert targets == (["sm_90a"] if chosen == "one_pass_wgmma" else ["sm_90", "compute_80"])
    assert made("warpgroups", algorithm="one_pass_wgmma", archs=("sm_90",)) == ("one_pass_wgmma", ["sm_90a"])
    chosen, targets = made("newer", archs=("sm_90", "sm_100"))
    assert chosen in ("one_pass_mma", "one_pass_streamed")
    assert targets == ["sm_90", "sm_100", "compute_80"]
    chosen, targets = made("old", archs=("sm_90", "sm_75"))
    assert chosen not in TENSOR_CORES
    assert targets == ["sm_90", "sm_75", "compute_75"]
    chosen, targets = made("t4", gpu=known_gpu("t4"))
    assert chosen not in TENSOR_CORES
    assert targets == ["sm_75", "compute_75"]
    assert made("named", algorithm="one_pass", archs=("sm_80",)) == ("one_pass", ["sm_80", "compute_75"])
    with pytest.raises(PlanError, match="one_pass_mma: needs sm_80 or newer, not sm_75"):
        made("never", algorithm="one_pass_mma", archs=("sm_75",))
    with pytest.raises(PlanError, match="one_pass_wgmma: needs sm_90, whose own features it uses, not sm_100"):
        made("never", algorithm="one_pass_wgmma", archs=("sm_90", "sm_100"))
    assert not (tmp_path / "never").exists()


def test_a_package_of_newer_gpus_says_what_serves_an_older_one(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither hint names the algorithm, which could not be generated for that GPU."""
    folder = tmp_path / "p"
    generate(Request(SPEC, folder, algorithm="one_pass_mma"), cache)
    plain = f"invpool generate {SPEC.cli_arguments()} "
    monkeypatch.setattr(generate_room, "present_gpu", lambda: known_gpu("t4"))
    obstacle = generate_room.package_obstacle(folder, require_manifest(folder))
    assert obstacle == (
        "the forward plan, made for h200, is not legal on t4: needs sm_80 or newer, not sm_75 (t4); "
        f"regenerate with: {plain}--out {folder} --force"
    )
    op = import_package(folder).op
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"no code for sm_75 \(Tesla T4\); present: .*compute_80; ") as caught:
        op._load(0, op._kernels[0])
    assert str(caught.value).endswith(f"regenerate with: {plain}--arch sm_75")


def test_archs_asked_for_or_of_the_gpu_asked_for(tmp_path: Path, cache: KernelCache) -> None:
    assert generate(Request(SPEC, tmp_path / "a", known_gpu("a10")), cache).archs == ("sm_86",)
    assert generate(Request(SPEC, tmp_path / "b", archs=("sm_80", "sm_80", "sm_120")), cache).archs == (
        "sm_80",
        "sm_120",
    )


def test_again_is_the_same_package_left_in_place(tmp_path: Path, cache: KernelCache) -> None:
    generate(Request(SPEC, tmp_path / "p"), cache)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "p").iterdir()}
    generate(Request(SPEC, tmp_path / "p"), cache)
    after = {path.name: path.stat().st_ino for path in (tmp_path / "p").iterdir()}
    before.pop("proof.json"), after.pop("proof.json")
    assert before == after
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["p"]


def test_one_output_is_made_by_one_process_at_a_time_whatever_its_cache(tmp_path: Path) -> None:
    """The lock is taken here, so a process with a cache of its own must wait; it leaves no file behind."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from invpool.binding import import_package, output_lock\n"
        "print('started', flush=True)\n"
        "with output_lock(Path('p')):\n"
        "    print('inside', flush=True)\n"
    )
    env = os.environ | {"INVPOOL_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with output_lock(tmp_path / "p"):
        other = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "started\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    assert other.communicate(timeout=60)[0] == "inside\n"
    assert not list(tmp_path.iterdir())


def test_generate_holds_the_lock_of_its_output(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_package = generate_room.prove_package

    def locked(folder: Path, on_gpu: bool) -> tuple[Proof | None, Proof]:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        return prove_package(folder, on_gpu)

    monkeypatch.setattr(generate_room, "prove_package", locked)
    for _ in range(2):
        generate(Request(SPEC, tmp_path / "p"), cache)


def test_another_spec_in_the_same_folder_replaces_it(tmp_path: Path, cache: KernelCache) -> None:
    generate(Request(SPEC, tmp_path / "p"), cache)
    generate(Request(PoolSpec(4, 3), tmp_path / "p"), cache)
    assert invpool.load(tmp_path / "p")(torch.zeros(1, 4, 3)).shape == (1, 4)


def test_the_op_still_loads_after_it_moved_into_place(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw ops stay bound to the op that was proved, and it reads its code when a GPU first asks for it."""
    staged = []

    def capturing(folder: Path) -> ModuleType:
        staged.append(import_package(folder))
        return staged[-1]

    monkeypatch.setattr(generate_room, "import_package", capturing)
    generate(Request(SPEC, tmp_path / "p"), cache)
    assert {module.op.folder for module in staged} == {tmp_path / "p"}
    assert staged[0].__name__ not in sys.modules
    op = invpool.load(tmp_path / "p")
    assert op.folder == tmp_path / "p"
    registered = getattr(torch.ops, op.namespace).forward
    assert registered(torch.ones(1, 5, 3), None, None)[0].shape == (1, 5)


def test_plans_for_another_gpu_are_proved_on_this_one_only_if_legal_here(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H=800, K=64 fills the shared memory of an H200 with its plan, more than an L4 has."""
    spec, asked = PoolSpec(800, 64), []

    def not_run(folder: Path, on_gpu: bool) -> tuple[Proof | None, Proof]:
        asked.append(on_gpu)
        return None, Proof("cpu", (Finding("out normal", 0.0, 1.0, "float64"),))

    monkeypatch.setattr(generate_room, "prove_package", not_run)
    monkeypatch.setattr(generate_room, "has_gxx", lambda: False)
    request = Request(spec, tmp_path / "p", known_gpu("h200"), algorithm="three_pass")
    for present in ("l4", "h200"):
        monkeypatch.setattr(generate_room, "present_gpu", lambda present=present: known_gpu(present))
        result = generate(request, cache)
        assert result.kernel_proof is None
    assert asked == [False, True]
    monkeypatch.setattr(generate_room, "present_gpu", lambda: known_gpu("l4"))
    with pytest.raises(
        CheckError, match=r"\(--on gpu; use --on emulator\): the forward plan is not legal on l4: needs"
    ):
        generate(dataclasses.replace(request, on="gpu"), cache)


def test_check_asks_whether_the_recorded_plans_are_legal_here(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, asked = tmp_path / "p", []
    proof = Proof("cpu", (Finding("out normal", 0.0, 1.0, "float64"),))

    def not_run(folder: Path, on_gpu: bool) -> tuple[Proof | None, Proof]:
        asked.append(on_gpu)
        return None, proof

    monkeypatch.setattr(generate_room, "prove_package", not_run)
    monkeypatch.setattr(
        generate_room, "prove_on_emulator", lambda *_, **__: dataclasses.replace(proof, device="emulator")
    )
    monkeypatch.setattr(generate_room, "has_gxx", lambda: True)
    generate(Request(PoolSpec(800, 64), folder, known_gpu("h200"), algorithm="three_pass"), cache)

    def check(present: str | None, *words: str) -> Result:
        monkeypatch.setattr(generate_room, "present_gpu", lambda: known_gpu(present) if present else None)
        asked.clear()
        caplog.clear()
        return CliRunner().invoke(app, ["check", str(folder), *words])

    reason = (
        "the forward plan, made for h200, is not legal on l4: "
        "needs 208000 bytes of shared memory a block, l4 has 101376; K <= 29 at H=800 or H <= 384 at K=64 would fit; "
        "regenerate with: invpool generate --H 800 --K 64 "
        f"--algorithm three_pass --out {folder} --force"
    )
    run = check("l4")
    assert (run.exit_code, asked) == (0, [False]), run.output
    assert caplog.messages == [f"kernels are not proved on the GPU: {reason}"]
    assert "kernels on emulator" in run.output
    before = (folder / "proof.json").read_bytes()
    for on in ("gpu", "both"):
        run = check("l4", "--on", on)
        assert isinstance(run.exception, CheckError)
        assert str(run.exception) == f"kernels cannot be proved on a GPU (--on {on}; use --on emulator): {reason}"
        assert (asked, caplog.messages) == ([], [])
    assert (folder / "proof.json").read_bytes() == before
    assert (check("l4", "--on", "emulator").exit_code, asked, caplog.messages) == (0, [False], [])
    # Where they fit, and where there is no GPU, there is nothing to say.
    assert (check("h200").exit_code, asked, caplog.messages) == (0, [True], [])
    assert (check(None).exit_code, asked, caplog.messages) == (0, [False], [])

    # Plans of another version of the generator are not judged: the package brings its own run time.
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["kernels"][0]["plan"]["stages"] = 3
    path.write_text(json.dumps(manifest))
    assert (check("l4").exit_code, asked) == (0, [True])
    assert [message.partition(": ")[2].partition(";")[0] for message in caplog.messages] == [
        "three_pass has no plan parameter stages"
    ]


def test_a_wrong_kernel_is_not_put_in_place(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_room, "prove_package", lambda folder, on_gpu: (None, _wrong_proof()))
    with pytest.raises(CheckError, match=r"h5_k3_f32_bhk is wrong on cpu; nothing was put in"):
        generate(Request(SPEC, tmp_path / "p"), cache)
    assert not (tmp_path / "p").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_package_in_place_that_turns_out_wrong_stays_and_its_record_says_so(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(Request(SPEC, tmp_path / "p"), cache)
    monkeypatch.setattr(generate_room, "prove_package", lambda folder, on_gpu: (None, _wrong_proof()))
    with pytest.raises(CheckError, match=r"is wrong on cpu; .*p already holds it and stays; its proof.json says so"):
        generate(Request(SPEC, tmp_path / "p"), cache)
    assert (tmp_path / "p" / "__init__.py").is_file()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    proof = json.loads((tmp_path / "p" / "proof.json").read_text(), parse_constant=refuse)
    assert proof["closed_form"]["ok"] is False
    assert proof["closed_form"]["findings"][0]["error"] is None


def test_a_proof_that_breaks_off_leaves_no_older_one(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p"

    def breaking(*_: object, **__: object) -> None:
        raise EmulationError("the block diverged")

    for again in (
        lambda: generate(Request(SPEC, folder), cache),
        lambda: CliRunner().invoke(app, ["check", str(folder)], catch_exceptions=False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(generate_room, "prove_on_emulator", lambda *_, **__: None)
            generate(Request(SPEC, folder), cache)
        assert (folder / "proof.json").is_file()
        monkeypatch.setattr(generate_room, "prove_package", breaking)
        with pytest.raises(EmulationError):
            again()
        assert not (folder / "proof.json").exists()
        monkeypatch.undo()
        monkeypatch.setattr(generate_room, "present_gpu", lambda: None)


def test_the_op_of_a_relative_output_is_found_from_anywhere(
    tmp_path: Path, cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = []

    def capturing(folder: Path) -> ModuleType:
        staged.append(import_package(folder))
        return staged[-1]

    monkeypatch.setattr(generate_room, "import_package", capturing)
    monkeypatch.chdir(tmp_path)
    generate(Request(SPEC, Path("p")), cache)
    assert staged[-1].op.folder == tmp_path / "p"


def test_numbers_that_json_lacks_become_null() -> None:
    infinite = Proof("cpu", (Finding("gradcheck", float("inf"), float("nan"), "x"), Finding("out", 1.0, 2.0, "x")))
    assert [(f["error"], f["tolerance"], f["ok"]) for f in infinite.as_dict()["findings"]] == [
        (None, None, False),
        (1.0, 2.0, True),
    ]


def _wrong_proof() -> Proof:
    return Proof("cpu", (Finding("out normal", float("nan"), 3e-7, "float64"),))


def test_refusals_leave_nothing(tmp_path: Path, cache: KernelCache) -> None:
    with pytest.raises(PlanError):
        generate(Request(PoolSpec(2000, 3), tmp_path / "p", algorithm="three_pass"), cache)
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").touch()
    with pytest.raises(OutputError, match="did not make"):
        generate(Request(SPEC, tmp_path / "q"), cache)

    def failing(source: str, target: object) -> object:
        raise CompileError("kernel.cu(1): error: no")

    with pytest.raises(CompileError):
        generate(Request(SPEC, tmp_path / "p"), KernelCache(tmp_path / "other", failing))  # type: ignore[arg-type]
    assert not (tmp_path / "p").exists()
    assert sorted(path.name for path in (tmp_path / "q").iterdir()) == ["mine"]


class _Spoilt:
    """An op whose results are off by what a test says."""

    def __init__(self, op: GeneratedOp, out: float = 0.0, gradient: float = 0.0) -> None:
        self.op, self.out, self.gradient = op, out, gradient

    def __getattr__(self, name: str) -> object:
        return getattr(self.op, name)

    def __call__(self, x: torch.Tensor, scale: None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = self.op(x, scale, mask)
        # The value is untouched by the second term, the gradient is not.
        return out + self.out * out.detach() + self.gradient * (out - out.detach())


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        ({}, set()),
        ({"out": 1e-5}, {"out"}),
        ({"out": float("nan")}, {"out"}),
        ({"gradient": 1e-5}, {"dx"}),
        ({"gradient": float("nan")}, {"out", "dx"}),
    ],
)
def test_a_proof_finds_what_is_wrong_nan_included(
    tmp_path: Path, cache: KernelCache, spoil: dict[str, float], names: set[str]
) -> None:
    generate(Request(SPEC, tmp_path / "p"), cache)
    proof = prove(_Spoilt(invpool.load(tmp_path / "p"), **spoil), "cpu")  # type: ignore[arg-type]
    assert proof.ok == (not spoil)
    assert {finding.name.split()[0] for finding in proof.findings if not finding.ok} == names
    if names:
        worst = proof.worst(names.copy().pop())
        assert not worst.ok


def test_a_proof_of_float64_has_gradcheck(tmp_path: Path, cache: KernelCache) -> None:
    generate(Request(dataclasses.replace(SPEC, dtype="float64"), tmp_path / "p"), cache)
    op = invpool.load(tmp_path / "p")
    assert {f.name: f.ok for f in prove(op, "cpu").findings}["gradcheck"]
    spoilt = prove(_Spoilt(op, gradient=0.1), "cpu")  # type: ignore[arg-type]
    assert not {f.name: f.ok for f in spoilt.findings}["gradcheck"]


def test_tolerances() -> None:
    assert tolerance(SPEC, "out", 0.0) == 3e-7
    assert tolerance(SPEC, "dx", 1e-6) == 2e-6
    assert tolerance(PoolSpec(5, 3, "float64"), "dx", 0.0) == 1e-12
    assert tolerance(PoolSpec(5, 3, "float16"), "out", 0.0) == pytest.approx(3e-7 * 2**13)
    assert tolerance(PoolSpec(5, 3, precision="tf32"), "out", 0.1) == 1e-3
