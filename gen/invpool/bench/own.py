"""Our op made ready for timing: plans chosen or forced, kernels compiled several at a time, the raw launches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import Choice, choose
from invpool.bench.timing import Call
from invpool.binding import BuiltKernel, TableRow, import_package, package_files, staged_package
from invpool.cache import KernelCache
from invpool.compile import Compiled, Target
from invpool.errors import CompileError, PlanError
from invpool.gpu import Gpu
from invpool.render import render_kernel
from invpool.runtime import GeneratedOp
from invpool.spec import PoolSpec

Knobs = Mapping[str, int | str]


def parse_plan(text: str) -> tuple[Direction, dict[str, int | str]]:
    """Reads ``forward:rows=64,columns=32``.

    Raises:
        ValueError: the text is not of that form.
    """
    direction, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if direction not in DIRECTIONS or not colon or not all(name and equals and value for name, equals, value in pairs):
        raise ValueError(f"plan is {text!r}; one looks like forward:rows=64,columns=32 or backward:...")
    return direction, {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


def forced(choice: Choice, spec: PoolSpec, gpu: Gpu, knobs: Mapping[Direction, Knobs]) -> Choice:
    """The choice with some plan parameters replaced.

    Raises:
        PlanError: such a plan is not legal.
        ValueError: the algorithm has no such parameter.
    """
    plans = {}
    for direction in DIRECTIONS:
        plan = choice.plan(direction)
        if knobs.get(direction):
            plan = choice.algorithm.plan_from_knobs(direction, plan.knobs | dict(knobs[direction]))
            reason = choice.algorithm.reject(spec, plan, gpu)
            if reason is not None:
                raise PlanError(f"{choice.algorithm.name} {direction}, {plan}: {reason}")
        plans[direction] = plan
    return Choice(choice.algorithm, plans["forward"], plans["backward"])


def _sources(spec: PoolSpec, choice: Choice) -> list[str]:
    return [render_kernel(choice.algorithm, spec, choice.plan(direction)) for direction in DIRECTIONS]


def compile_ahead(wanted: Iterable[tuple[PoolSpec, Choice]], gpu: Gpu, cache: KernelCache, workers: int) -> None:
    """Fills the cache, several compilers at a time; what fails will fail again, and be told, where it is used."""
    jobs = [
        (source, Target(choice.algorithm.arch_target(gpu.arch)))
        for spec, choice in wanted
        for source in _sources(spec, choice)
    ]

    def compile_one(job: tuple[str, Target]) -> Compiled | None:
        try:
            return cache.get(*job)
        except CompileError:
            return None

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_one, dict.fromkeys(jobs)))


def bind(spec: PoolSpec, choice: Choice, gpu: Gpu, cache: KernelCache, folder: Path) -> GeneratedOp:
    """The op with these very plans, for this GPU alone: no PTX, no proof; errors are measured beside the times.

    Raises:
        CompileError, CompilerNotFoundError, TemplateError: see there.
    """
    target = Target(choice.algorithm.arch_target(gpu.arch))
    kernels: Sequence[BuiltKernel] = [
        BuiltKernel(choice.algorithm, choice.plan(direction), source, ((target, cache.get(source, target)),))
        for direction, source in zip(DIRECTIONS, _sources(spec, choice), strict=True)
    ]
    with staged_package(folder, package_files(spec, gpu.name, kernels, (TableRow(0, 0, 1),))):
        pass
    op: GeneratedOp = import_package(folder).op
    return op


@dataclasses.dataclass(frozen=True)
class OwnOp:
    """Raw launches of an op, without autograd and dispatch, as the tables time them."""

    op: GeneratedOp

    @property
    def resources(self) -> dict[str, str]:
        """What ptxas gave each direction, in words."""
        found = {}
        for kernel in self.op.manifest["kernels"]:
            used = kernel["images"][0]["resources"]
            if used:
                words = f"{used['registers']} registers, {used['spill_stores']} + {used['spill_loads']} bytes spilled"
                found[kernel["direction"]] = f"{words}, {kernel['launch']['shared_bytes']} bytes shared"
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.op.cuda_forward(x, None, None)[0]

    def forward_backward(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        results = self.op.cuda_forward(x, None, None)
        return results[0], self.op.cuda_backward(g, x, None, None, *self.op.backward_state(results))

    def backward_call(self, x: Tensor, g: Tensor) -> Call:
        """Backward alone, after a forward that is run now."""
        state = self.op.backward_state(self.op.cuda_forward(x, None, None))
        return functools.partial(self.op.cuda_backward, g, x, None, None, *state)


class OwnMaker:
    """Makes our ops in a folder of their own, each package once."""

    def __init__(self, gpu: Gpu, folder: Path, knobs: Mapping[Direction, Knobs], cache: KernelCache) -> None:
        self.gpu = gpu
        self._folder = folder
        self._knobs = knobs
        self._cache = cache
        self._numbers = itertools.count()
        self._choices: dict[tuple[PoolSpec, str | None], Choice] = {}

    def choice(self, spec: PoolSpec, algorithm: str | None) -> Choice:
        """The plans for a spec. Raises as :func:`forced` and choose do."""
        if (spec, algorithm) not in self._choices:
            chosen = choose(spec, self.gpu, algorithm)
            self._choices[spec, algorithm] = forced(chosen, spec, self.gpu, self._knobs)
        return self._choices[spec, algorithm]

    def compile_ahead(self, specs: Iterable[PoolSpec], algorithms: Sequence[str | None], workers: int) -> None:
        """Everything that the rows will need; specs without a legal plan are told of where they are used."""
        wanted = []
        for spec, algorithm in itertools.product(specs, algorithms):
            try:
                wanted.append((spec, self.choice(spec, algorithm)))
            except (PlanError, ValueError):
                continue
        compile_ahead(wanted, self.gpu, self._cache, workers)

    def make(self, spec: PoolSpec, choice: Choice) -> OwnOp:
        folder = self._folder / str(next(self._numbers)) / spec.slug
        folder.parent.mkdir(parents=True)
        return OwnOp(bind(spec, choice, self.gpu, self._cache, folder))

    def predictions(self, spec: PoolSpec, choice: Choice, batch: int) -> dict[str, dict[str, Any]]:
        """What Cost foretells of each direction."""
        found: dict[str, dict[str, Any]] = {}
        for direction in DIRECTIONS:
            cost = choice.algorithm.cost(spec, choice.plan(direction), self.gpu, batch)
            found[direction] = {"predicted_us": 1e6 * cost.seconds(self.gpu), "bound": cost.bound(self.gpu)}
        return found
