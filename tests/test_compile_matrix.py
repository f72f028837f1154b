"""nvcc takes every algorithm x dtype x layout x direction on four archs; no spills where the plan promises none."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

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
        return None
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
    product = itertools.product(sorted(ALGORITHMS), DTYPES, LAYOUTS, DIRECTIONS, GPUS)
    return [
        (name, PoolSpec(*shapes[i % len(shapes)], dtype, layout, masked=i % 5 == 4), direction, gpu, i)  # type: ignore[arg-type]
        for i, (name, dtype, layout, direction, gpu) in enumerate(product)
    ]


def _run(jobs: list[Job]) -> list[str]:
    workers = max(1, min(len(os.sched_getaffinity(0)), int(os.environ.get("MAX_JOBS", "2"))))
    with ProcessPoolExecutor(workers) as pool:
        return [fault for fault in pool.map(_compile, jobs) if fault]


def test_every_combination_compiles_once() -> None:
    assert not _run(_jobs(SHAPES))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_combination_compiles_for_every_shape(shape: tuple[int, int]) -> None:
    assert not _run(_jobs((shape,)))
