"""EmulatedOp: the shipped op's own launches, on the emulator; and what generate and check make of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers import Persistent, looping
from invpool import binding, generate
from invpool.abi import DIRECTIONS
from invpool.algorithms import Choice, choose
from invpool.check import Finding, Proof, prove
from invpool.cli.app import app
from invpool.emulator import EmulatedKernel, build
from invpool.emulator.op import EmulatedOp
from invpool.emulator.pool import EmulatedPool
from invpool.errors import CheckError, CompilerNotFoundError, EmulationError
from invpool.gpu import KNOWN_GPUS
from invpool.reference import norm_error, pool_ref
from invpool.render import render_kernel
from invpool.spec import PoolSpec


def write_package(
    folder: Path, spec: PoolSpec, edit=lambda source: source, algorithm: str | None = None, choice: Choice | None = None
) -> Path:
    """A package without machine code: all that the emulator needs."""
    choice = choice or choose(spec, KNOWN_GPUS["h200"], algorithm)
    kernels = [
        binding.BuiltKernel(choice.algorithm, plan, edit(render_kernel(choice.algorithm, spec, plan)), ())
        for plan in (choice.forward, choice.backward)
    ]
    folder.mkdir(parents=True)
    for name, data in binding.package_files(spec, "h200", kernels, (binding.TableRow(0, 0, 1),)).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "spec",
    [
        PoolSpec(33, 17),
        PoolSpec(33, 17, masked=True),
        PoolSpec(17, 8, "float16", "bkh"),
        PoolSpec(5, 3, "float64"),
    ],
    ids=lambda spec: spec.slug,
)
def test_a_right_package_is_proved(spec: PoolSpec, tmp_path: Path) -> None:
    op = EmulatedOp(write_package(tmp_path / "package", spec))
    proof = prove(op, "cpu", name=op.device_name)
    assert proof.ok, proof
    assert proof.device.startswith("emulator (g++ ")


def test_it_is_the_kernel_that_runs(tmp_path: Path) -> None:
    spec = PoolSpec(9, 4)
    edited = write_package(
        tmp_path / "p", spec, lambda s: s.replace("result += pooled[t]", "result += 2 * pooled[t]"), "three_pass"
    )
    op = EmulatedOp(edited)
    proof = prove(op, "cpu", name="emulator")
    assert not proof.ok
    assert proof.worst("out").error > 0.1
    # The closed form of the same package knows nothing of it.
    assert prove(binding.import_package(op.folder).op, "cpu").ok


def test_arguments_come_from_the_manifest(tmp_path: Path) -> None:
    spec = PoolSpec(7, 5, layout="bkh")
    op = EmulatedOp(write_package(tmp_path / "p", spec))
    x = torch.randn(6, 7, 5).mT  # strided: the op makes it dense
    x.requires_grad_()
    g = torch.randn(1, 1).expand(6, 7)  # what sum() sends
    out = op(x, 0.7)
    (dx,) = torch.autograd.grad(out, x, g)
    truth = pool_ref(x, g, "bkh", 0.7)
    assert norm_error(out.detach(), truth.out) < 1e-6
    assert norm_error(dx, truth.dx) < 1e-6


def test_an_unwritten_output_is_an_error_with_its_name(tmp_path: Path) -> None:
    folder = write_package(
        tmp_path / "p",
        PoolSpec(9, 4),
        lambda s: s.replace("lse[row_index] =", "if (h != 4) lse[row_index] ="),
        "three_pass",
    )
    with pytest.raises(
        EmulationError, match=r"h9_k4_f32_bhk forward: lse: 2 of 18 elements are poison, first at \[0, 4\]"
    ):
        EmulatedOp(folder)(torch.randn(2, 9, 4))


@pytest.mark.parametrize("spec", [PoolSpec(9, 4), PoolSpec(33, 17, masked=True)], ids=lambda spec: spec.slug)
def test_a_persistent_kernel_is_launched_with_its_cap(spec: PoolSpec, tmp_path: Path) -> None:
    algorithm = Persistent()
    plans = [dataclasses.replace(algorithm.legal(spec, KNOWN_GPUS["t4"], d)[0], most_blocks=2) for d in DIRECTIONS]
    choice = Choice(algorithm, *plans)
    op = EmulatedOp(write_package(tmp_path / "loops", spec, looping, choice=choice))
    x, g = torch.randn(5, spec.H, spec.K, requires_grad=True), torch.randn(5, spec.H)
    out = op(x)
    (dx,) = torch.autograd.grad(out, x, g)
    truth = pool_ref(x, g, "bhk")
    assert norm_error(out.detach(), truth.out) < 1e-6
    assert norm_error(dx, truth.dx) < 1e-6
    assert prove(op, "cpu", name="emulator").ok
    # Only the cap makes these fail: without a loop, two blocks write two items, in a package and without one.
    with pytest.raises(EmulationError, match=rf"forward: out: {3 * spec.H} of {5 * spec.H} elements are poison"):
        EmulatedOp(write_package(tmp_path / "does_not_loop", spec, choice=choice))(x)
    with pytest.raises(EmulationError, match=r"elements are poison, first at \[2, 0\]"):
        EmulatedPool(spec, choice).forward(
            x.detach(), torch.ones(5, spec.H, dtype=torch.uint8) if spec.masked else None
        )


def test_two_ops_of_one_manifest_keep_apart(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "p", PoolSpec(3, 2))
    emulated, shipped = EmulatedOp(folder), binding.import_package(folder).op
    assert emulated.namespace != shipped.namespace
    assert emulated.namespace.startswith("invpool_emulated_")


def test_where_kernels_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "present_gpu", lambda: None)
    none = generate.gpu_obstacle()
    assert generate.proving_places(None, none) == (False, True)
    assert generate.proving_places("emulator", none) == (False, True)
    for on in ("gpu", "both"):
        with pytest.raises(CheckError, match=f"\\(--on {on}; use --on emulator\\): there is none here"):
            generate.proving_places(on, none)
    monkeypatch.setattr(generate, "present_gpu", lambda: KNOWN_GPUS["h200"])
    assert generate.gpu_obstacle() is None
    assert generate.proving_places(None, None) == (True, False)
    assert generate.proving_places("both", None) == (True, True)
    assert generate.proving_places("emulator", None) == (False, True)
    monkeypatch.setenv("INVPOOL_GXX", "/nowhere/g++")
    assert generate.proving_places(None, None) == (True, False)
    with pytest.raises(CompilerNotFoundError, match=r"not an executable file"):
        generate.proving_places("both", None)


def test_no_header_for_16_bits_is_no_failure_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_package(tmp_path / "p", PoolSpec(2, 2, "bfloat16"))

    def nothing() -> Path:
        raise CompilerNotFoundError("no header")

    monkeypatch.setattr(build, "_cuda_include", nothing)
    assert generate.prove_on_emulator(folder, required=False) is None
    with pytest.raises(CompilerNotFoundError, match="no header"):
        generate.prove_on_emulator(folder)


def test_the_record_says_where() -> None:
    proof = Proof("emulator", (Finding("out normal", 0.0, 1.0, "float64"),))
    record = json.loads(json.dumps(generate.proof_record(None, proof, proof)))
    assert record["kernels"] is None
    assert record["emulated"]["device"] == "emulator"


def test_a_rendered_source_names_its_one_kernel() -> None:
    spec = PoolSpec(2, 2)
    choice = choose(spec, KNOWN_GPUS["h200"])
    kernel = EmulatedKernel(render_kernel(choice.algorithm, spec, choice.forward))
    assert kernel.entry == f"{choice.algorithm.name}_forward_{spec.slug}"


def test_the_commands_say_where_kernels_were_proved(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "h5_k3_f32_bhk", PoolSpec(5, 3))
    runner = CliRunner()
    run = runner.invoke(app, ["check", str(folder), "--on", "emulator"])
    assert run.exit_code == 0, run.output
    assert "kernels on emulator (g++ " in run.output
    assert json.loads((folder / "proof.json").read_text())["emulated"]["ok"]
    assert "last checked on emulator (g++ " in runner.invoke(app, ["show", str(folder)]).output
    run = runner.invoke(app, ["check", str(folder), "--on", "tpu"])
    assert run.exit_code == 2
    assert "legal: gpu, emulator, both" in " ".join(run.output.split())


def test_a_wrong_kernel_fails_the_check(tmp_path: Path) -> None:
    folder = write_package(
        tmp_path / "p",
        PoolSpec(5, 3),
        lambda s: s.replace("pulled_part += pull", "pulled_part = pull"),
        "three_pass",
    )
    run = CliRunner().invoke(app, ["check", str(folder), "--on", "emulator"])
    assert run.exit_code == 1
    assert "WRONG" in run.output
