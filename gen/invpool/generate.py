"""The main job: choose plans, render, compile for every arch, bind, prove, put in place."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from invpool.abi import DIRECTIONS
from invpool.algorithms import Algorithm, Choice, Plan, choose
from invpool.binding import (
    BuiltKernel,
    TableRow,
    check_output,
    holds,
    import_package,
    output_lock,
    package_files,
    recorded_plans,
    remove_proof,
    replace_command,
    staged_package,
    write_proof,
)
from invpool.cache import KernelCache
from invpool.check import Proof, prove
from invpool.compile import Target
from invpool.emulator.build import find_gxx, gxx_version, has_gxx
from invpool.errors import CheckError, CompilerNotFoundError
from invpool.gpu import DEFAULT_ARCHS, DEFAULT_GPU, KNOWN_GPUS, Gpu, check_arch, present_gpu
from invpool.render import render_kernel
from invpool.spec import PoolSpec
from invpool.tuned import planned_rows

log = logging.getLogger("invpool")

_NO_GPU: Final = "there is none here"

# Where kernels are run to prove them.
On = Literal["gpu", "emulator", "both"]
ONS: Final[tuple[On, ...]] = get_args(On)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for. ``gpu`` None takes the present GPU, else the default; ``archs`` likewise.

    ``on`` is where the kernels are proved: None takes the GPU if there is one on which the plans are legal, else the
    emulator if there is g++. Plans are those of the GPU's tuned table, if it has one and ``tuned`` is true and no
    ``algorithm`` is named, else those of least predicted time.
    """

    spec: PoolSpec
    out: Path
    gpu: Gpu | None = None
    archs: tuple[str, ...] = ()
    algorithm: str | None = None
    force: bool = False
    on: On | None = None
    tuned: bool = True


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plans of a package: (first batch, plans) in rising order, and the device they were tuned on, if they were."""

    rows: tuple[tuple[int, Choice], ...]
    tuned_on: str | None = None

    @property
    def choice(self) -> Choice:
        """The plans of the smallest batches."""
        return self.rows[0][1]

    def kernels(self) -> list[tuple[Algorithm[Any], Plan]]:
        """Each kernel once, in the order in which the rows name them, forward first."""
        return list(dict.fromkeys((choice.algorithm, choice.plan(d)) for _, choice in self.rows for d in DIRECTIONS))

    def table(self) -> tuple[TableRow, ...]:
        """The rows by the positions of their kernels."""
        places = {kernel: number for number, kernel in enumerate(self.kernels())}
        return tuple(
            TableRow(start, *(places[choice.algorithm, choice.plan(d)] for d in DIRECTIONS))
            for start, choice in self.rows
        )


def plan(request: Request, gpu: Gpu, archs: tuple[str, ...]) -> Planned:
    """The plans that a request gets. Raises as :func:`invpool.algorithms.choose` does."""
    if request.tuned and request.algorithm is None:
        found = planned_rows(request.spec, gpu, archs)
        if found is not None:
            return Planned(tuple(found[0]), found[1])
    return Planned(((0, choose(request.spec, gpu, request.algorithm, archs=archs)),))


@dataclasses.dataclass(frozen=True)
class Generated:
    """What came of a request.

    ``kernel_proof`` is of the kernels on the GPU, ``emulated_proof`` of the same kernels on the emulator; None
    where they did not run there. ``cpu_proof`` is of the closed form.
    """

    request: Request
    gpu: Gpu
    gpu_is_present: bool
    archs: tuple[str, ...]
    planned: Planned
    kernels: tuple[BuiltKernel, ...]
    kernel_proof: Proof | None
    cpu_proof: Proof
    emulated_proof: Proof | None = None


def planning_gpu(gpu: Gpu | None) -> tuple[Gpu, bool]:
    """The GPU that plans are made for, and whether it is the one in this machine."""
    if gpu is not None:
        return gpu, False
    present = present_gpu()
    return (present, True) if present else (KNOWN_GPUS[DEFAULT_GPU], False)


def _archs(request: Request, gpu: Gpu, present: bool) -> tuple[str, ...]:
    if request.archs:
        return tuple(dict.fromkeys(check_arch(arch) for arch in request.archs))
    if present or request.gpu is not None:
        return (gpu.arch,)
    return DEFAULT_ARCHS


def build_kernels(
    spec: PoolSpec,
    planned: Planned,
    archs: Sequence[str],
    cache: KernelCache,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[BuiltKernel, ...]:
    """Renders each kernel and compiles it for every arch, and PTX for the newer rest.

    Raises:
        CompileError, CompilerNotFoundError, TemplateError: see there.
    """
    kernels = []
    for algorithm, plan in planned.kernels():
        source = render_kernel(algorithm, spec, plan)
        targets = [Target(algorithm.arch_target(arch)) for arch in archs]
        if not algorithm.only_oldest:
            targets.append(Target.ptx(algorithm.oldest_arch))
        images = []
        for target in targets:
            progress(f"{algorithm.name} {plan.direction} {target.name}")
            images.append((target, cache.get(source, target)))
        kernels.append(BuiltKernel(algorithm, plan, source, tuple(images)))
    return tuple(kernels)


def prove_package(folder: Path, arch_is_here: bool) -> tuple[Proof | None, Proof]:
    """Imports a package and checks it: its kernels where a GPU can run them, and its closed form on the CPU."""
    op = import_package(folder).op
    return (prove(op, "cuda") if arch_is_here else None), prove(op, "cpu")


def gpu_obstacle(
    spec: PoolSpec | None = None, plans: Iterable[tuple[Algorithm[Any], Plan]] = (), made_for: str | None = None
) -> str | None:
    """Why kernels, those of the plans if any are given, cannot be run on a GPU here; None if they can."""
    present = present_gpu()
    if present is None:
        return _NO_GPU
    for algorithm, plan in plans:
        assert spec is not None
        reason = algorithm.reject(spec, plan, present)
        if reason is not None:
            made = f", made for {made_for}," if made_for else ""
            return f"the {plan.direction} plan{made} is not legal on {present.name}: {reason}"
    return None


def package_obstacle(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Why the kernels of a package cannot be run on a GPU here, and what to type to get some that can."""
    present = present_gpu()
    if present is None:
        return _NO_GPU
    try:
        plans = recorded_plans(manifest)
    except ValueError as error:
        # The package brings its own run time and does not need this invpool to know its plans.
        log.warning("whether the plans of %s are legal on this GPU cannot be told: %s", folder, error)
        return None
    obstacle = gpu_obstacle(PoolSpec(**manifest["spec"]), plans, manifest["planned_for"])
    too_old = any(algorithm.reject_arch(present.arch) for algorithm, _ in plans)
    return obstacle and f"{obstacle}; regenerate with: {replace_command(folder, manifest, too_old)}"


def proving_places(on: On | None, obstacle: str | None) -> tuple[bool, bool]:
    """Whether kernels are to be proved on the GPU, unless something stands against it, and whether on the emulator.

    What stands against a GPU that is there is logged, where the emulator takes its place.

    Raises:
        CheckError: the GPU is asked for and cannot run them.
        CompilerNotFoundError: the emulator is asked for and there is no g++.
    """
    if on is None:
        if obstacle not in (None, _NO_GPU):
            log.warning("kernels are not proved on the GPU: %s", obstacle)
        return obstacle is None, obstacle is not None and has_gxx()
    if on != "emulator" and obstacle is not None:
        raise CheckError(f"kernels cannot be proved on a GPU (--on {on}; use --on emulator): {obstacle}")
    if on != "gpu":
        gxx_version(find_gxx())
    return on != "emulator", on != "gpu"


def prove_on_emulator(folder: Path, required: bool = True) -> Proof | None:
    """Checks a package's kernels on the emulator; None where it cannot build them and that is not required.

    Raises:
        EmulationError: a kernel did what CUDA forbids, or left an output unwritten.
        CompileError, CompilerNotFoundError: see :func:`invpool.emulator.build.build_kernel`.
    """
    from invpool.emulator.op import EmulatedOp

    try:
        op = EmulatedOp(folder)
    except CompilerNotFoundError as error:
        if required:
            raise
        log.warning("kernels are not proved on the emulator: %s", error)
        return None
    return prove(op, "cpu", name=op.device_name)


def generate(
    request: Request, cache: KernelCache | None = None, progress: Callable[[str], None] = lambda _: None
) -> Generated:
    """Makes the package, or leaves everything as it was.

    Raises:
        PlanError: no plan is legal. OutputError: the path cannot take it. CompileError: nvcc refused.
        CheckError: a kernel gave wrong numbers here; it is not put in place, and one that lies there stays with a
        record that says so. EmulationError: likewise, for what CUDA forbids.
    """
    gpu, present = planning_gpu(request.gpu)
    archs = _archs(request, gpu, present)
    planned = plan(request, gpu, archs)
    on_gpu, on_emulator = proving_places(request.on, gpu_obstacle(request.spec, planned.kernels()))
    check_output(request.out, request.force)
    kernels = build_kernels(request.spec, planned, archs, cache or KernelCache(), progress)
    files = package_files(request.spec, gpu.name, kernels, planned.table(), planned.tuned_on)

    def proved(folder: Path) -> tuple[Proof | None, Proof, Proof | None]:
        progress("checking against float64")
        kernel_proof, cpu_proof = prove_package(folder, on_gpu)
        emulated = None
        if on_emulator:
            progress("checking against float64, on the emulator")
            emulated = prove_on_emulator(folder, required=request.on is not None)
        return kernel_proof, cpu_proof, emulated

    with output_lock(request.out):
        if holds(request.out, files):
            remove_proof(request.out)
            proofs = proved(request.out)
            write_proof(request.out, proof_record(*proofs))
            _accept(proofs, request.spec, f"{request.out} already holds it and stays; its proof.json says so")
        else:
            with staged_package(request.out, files) as staging:
                proofs = proved(staging)
                _accept(proofs, request.spec, f"nothing was put in {request.out}")
                staged = import_package(staging)
            # The raw ops of this process are bound to the staged op: it has moved.
            staged.op.folder = request.out.resolve()
            sys.modules.pop(staged.__name__, None)
            write_proof(request.out, proof_record(*proofs))
    return Generated(request, gpu, present, archs, planned, kernels, *proofs)


def proof_record(kernel_proof: Proof | None, cpu_proof: Proof, emulated_proof: Proof | None = None) -> dict[str, Any]:
    """What proof.json holds; ``kernels`` (on a GPU) and ``emulated`` are null where they did not run."""
    return {
        "kernels": kernel_proof.as_dict() if kernel_proof else None,
        "emulated": emulated_proof.as_dict() if emulated_proof else None,
        "closed_form": cpu_proof.as_dict(),
    }


def _accept(proofs: tuple[Proof | None, ...], spec: PoolSpec, otherwise: str) -> None:
    for proof in proofs:
        if proof is None or proof.ok:
            continue
        wrong = [finding for finding in proof.findings if not finding.ok]
        lines = [f"{f.name}: error {f.error:.2e}, allowed {f.tolerance:.2e} against {f.against}" for f in wrong]
        raise CheckError(f"{spec.slug} is wrong on {proof.device}; {otherwise}:\n  " + "\n  ".join(lines))
