"""nvcc takes every algorithm x dtype x layout x direction on four archs; no spills where the plan promises none."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from helpers import TENSOR_CORES
from invpool.abi import DIRECTIONS
from invpool.algorithms import ALGORITHMS, find_algorithm
from invpool.compile import Target, compile_source
from invpool.gpu import known_gpu
from invpool.render import render_kernel
from invpool.spec import DTYPES, LAYOUTS, PoolSpec

GPUS = ("t4", "a100", "h200", "rtx5090")
# One shape with whole tiles everywhere, the others with tails in H, K or both; 1000 rows leave 64 registers.
SHAPES = ((128, 32), (33, 5), (137, 97), (1000, 16))

Job = tuple[str, PoolSpec, str, str, int]


def _compile(job: Job) -> str | None:
    """What is wrong with a job, or None."""
    name, spec, direction, gpu_name, pick = job
    algorithm, gpu = find_algorithm(name), known_gpu(gpu_name)
    plans = algorithm.legal(spec, gpu, direction)  # type: ignore[arg-type]
    if not plans:
        return f"{name} {spec.slug} {direction} {gpu_name}: no plan is legal"
    # A different plan for each job, walking through the whole space with a step prime to its size.
    plan = plans[pick * 37 % len(plans)]
    resources = compile_source(render_kernel(algorithm, spec, plan), Target(algorithm.arch_target(gpu.arch))).resources
    assert resources is not None
    if algorithm.promises_no_spills(spec, plan) and resources.spill_stores + resources.spill_loads:
        return f"{name} {spec.slug} {plan} {gpu.arch}: promised no spills, got {resources}"
    if resources.registers * algorithm.launch(spec, plan).threads > gpu.registers_per_sm:
        return f"{name} {spec.slug} {plan} {gpu.arch}: {resources} cannot be launched"
    if resources.static_shared:
        return f"{name} {spec.slug} {plan} {gpu.arch}: static shared memory is not counted by the layout"
    return None


def _jobs(shapes: tuple[tuple[int, int], ...]) -> list[Job]:
    """A job for each combination, with a shape that has a legal plan there; none where no shape has one."""
    jobs = []
    product = itertools.product(sorted(ALGORITHMS), DTYPES, LAYOUTS, DIRECTIONS, GPUS)
    for i, (name, dtype, layout, direction, gpu) in enumerate(product):
        # As many shapes as GPUs: without the second term each GPU would always meet the same shape.
        start = i + i // len(GPUS)
        for step in range(len(shapes)):
            shape = shapes[(start + step) % len(shapes)]
            spec = PoolSpec(*shape, dtype, layout, masked=i % 5 == 4)  # type: ignore[arg-type]
            if find_algorithm(name).legal(spec, known_gpu(gpu), direction):
                jobs.append((name, spec, direction, gpu, i))
                break
    return jobs


def _run(jobs: list[Job]) -> list[str]:
    workers = max(1, min(len(os.sched_getaffinity(0)), int(os.environ.get("MAX_JOBS", "2"))))
    with ProcessPoolExecutor(workers) as pool:
        return [fault for fault in pool.map(_compile, jobs) if fault]


def test_every_combination_has_a_job_and_every_gpu_meets_every_shape() -> None:
    jobs = _jobs(SHAPES)
    combinations = set(itertools.product(sorted(ALGORITHMS), DTYPES, LAYOUTS, DIRECTIONS, GPUS))
    # Tensor cores take no float64, those of sm_75 nothing of what is asked of them, and warpgroups are sm_90's alone.
    never = {c for c in combinations if c[0] in TENSOR_CORES and (c[1] == "float64" or c[4] == "t4")}
    never |= {c for c in combinations if c[0] == "one_pass_wgmma" and c[4] != "h200"}
    made = [(name, spec.dtype, spec.layout, direction, gpu) for name, spec, direction, gpu, _ in jobs]
    assert len(made) == len(set(made))
    assert set(made) == combinations - never
    assert {(gpu, (spec.H, spec.K)) for _, spec, _, gpu, _ in jobs} == set(itertools.product(GPUS, SHAPES))


def test_a_job_without_a_plan_is_a_fault() -> None:
    fault = _compile(("three_pass", PoolSpec(2000, 16), "forward", "t4", 0))
    assert fault == "three_pass h2000_k16_f32_bhk forward t4: no plan is legal"


def _half(number: int) -> list[Job]:
    """Every second GPU of each combination; the first half has them all with one GPU at least."""
    half = []
    for combination, group in itertools.groupby(_jobs(SHAPES), key=lambda job: job[-1] // len(GPUS)):
        jobs = list(group)
        half += jobs[(number + (combination if len(jobs) > 1 else 0)) % 2 :: 2]
    return half


def test_the_halves_are_the_whole() -> None:
    jobs, first = _jobs(SHAPES), _half(0)
    assert sorted(first + _half(1), key=str) == sorted(jobs, key=str)
    made, whole = ({(j[0], j[1].dtype, j[1].layout, j[2]) for j in some} for some in (first, jobs))
    assert made == whole


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_combination_compiles_once(half: int) -> None:
    assert not _run(_half(half))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_every_combination_compiles_for_every_shape(shape: tuple[int, int]) -> None:
    assert not _run(_jobs((shape,)))
