"""The whole of ``invpool sweep``: a crew, compilers and records are opened, a session runs, its table is stored."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from invpool.cache import KernelCache
from invpool.compile import find_nvcc, has_pycuda
from invpool.compile_pool import CompilePool
from invpool.errors import InvpoolError
from invpool.gpu import DEFAULT_GPU, KNOWN_GPUS, Gpu, gpu_named
from invpool.spec import PoolSpec
from invpool.sweep.crew import TASK_SECONDS, Crew, LocalCrew, gpu_numbers
from invpool.sweep.measure import MeasurerName
from invpool.sweep.model import Progress, SweepRequest, SweepResult
from invpool.sweep.records import RecordFile, read_records
from invpool.sweep.replay import ReplayCrew
from invpool.sweep.session import Session
from invpool.tuned import device_folder, own_root, write_table


@dataclasses.dataclass(frozen=True)
class CrewOptions:
    """Who measures.

    Attributes:
        measurer: on GPUs, or by counting on the emulator, which tunes nothing: it is for trying things out.
        ray: the address of a Ray cluster whose GPUs are taken; None: those of this host.
        replay: a file of records that answers instead of anybody.
        seconds: a task that takes longer is stopped and charged.
        processes: of the counting measurer.
    """

    measurer: MeasurerName = "gpu"
    ray: str | None = None
    replay: Path | None = None
    seconds: float = TASK_SECONDS
    processes: int = 1


def open_crew(options: CrewOptions, spec: PoolSpec) -> Crew:
    """Whoever is asked for.

    Raises:
        InvpoolError: there is no GPU or no PyCUDA here, no cluster, or nothing to replay; says what to type.
    """
    if options.replay is not None:
        return ReplayCrew(read_records(options.replay), spec)
    if options.ray is not None:
        from invpool.sweep.ray_crew import RayCrew

        return RayCrew(options.ray, options.measurer, options.seconds)
    if options.measurer == "counters":
        return LocalCrew("counters", tuple(range(options.processes)), options.seconds)
    if not has_pycuda():
        raise InvpoolError("sweeping on a GPU needs PyCUDA; pip install 'invpool[cuda]'")
    devices = gpu_numbers()
    if not devices:
        raise InvpoolError("there is no GPU here; sweep where there is one, or try it out with: --measure counters")
    return LocalCrew("gpu", devices, options.seconds)


def records_path(device: str, spec: PoolSpec) -> Path:
    """Where the records of a spec on a device are kept, beside its table."""
    return own_root() / device_folder(device) / f"{spec.slug}.jsonl"


def run_sweep(
    options: CrewOptions,
    spec: PoolSpec,
    gpu: Gpu | None,
    make_request: Callable[[Gpu], SweepRequest],
    records: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[SweepResult, Path | None]:
    """Tunes a spec. The table is written where a GPU was measured to the end; a package then gets it from generate.

    Args:
        gpu: what plans are made for where no GPU measures; the default one if None.
        make_request: what is asked for, given the GPU that plans are made for.
        records: where records are kept; None: beside the table, or nowhere for a replay.

    Returns:
        What was found, and the file of the table, if one was written.

    Raises:
        InvpoolError: see :func:`open_crew`, :class:`invpool.sweep.session.Session` and
            :func:`invpool.tuned.write_table`.
    """
    with contextlib.ExitStack() as stack:
        crew = open_crew(options, spec)
        stack.callback(crew.close)
        named = gpu_named(crew.device, KNOWN_GPUS.values())
        planned_for = crew.gpu or gpu or named or KNOWN_GPUS[DEFAULT_GPU]
        on_gpus = crew.gpu is not None
        kept = records if records is not None or options.replay is not None else records_path(crew.device, spec)
        pool = None
        if on_gpus:
            find_nvcc()
            pool = CompilePool(KernelCache().root)
            stack.callback(pool.close)
        result = Session(make_request(planned_for), crew, RecordFile(kept), pool, on_progress).run()
    table = write_table(result.table) if on_gpus and result.table is not None else None
    return result, table
