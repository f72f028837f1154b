"""Checks and times kernels: what a worker does with a task, and the two ways to do it, on a GPU and by counting.

A task holds everything that it needs, code included, as plain data: a worker on another host has no cache and needs no
compiler. What is wrong with a candidate is part of the answer, not an exception.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from invpool.abi import DIRECTIONS, Direction, argument_names, written
from invpool.algorithms import Choice, find_algorithm
from invpool.errors import CompileError, InvpoolError
from invpool.gpu import Gpu, present_gpu
from invpool.spec import PoolSpec
from invpool.sweep.records import Outcome

MeasurerName = Literal["gpu", "counters"]
# Rounds in which the candidates of a task take turns: while searching, and when the best are compared.
SEARCH_ROUNDS: Final = 15
FINAL_ROUNDS: Final = 60
# Why there is nothing of a subject: another one of its task spoilt the context.
NOT_MEASURED: Final = "not measured: another candidate of the task spoilt the context"
# Seconds that the finalists may take together, and those of a search.
_FINAL_SECONDS: Final = 10.0
_SEARCH_SECONDS: Final = 1.5
# Blocks of a persistent kernel while it is checked: fewer than there are items, so that each goes from one to the next.
_CHECKED_BLOCKS: Final = 2
# The name under which the PyTorch composite is timed among finalists.
COMPOSITE: Final = "composite"
_QUARTILES: Final = ("median_us", "lower_quartile_us", "upper_quartile_us")
# Items that the emulator counts; a launch does the same for each.
_COUNTED_ITEMS: Final = 2


@dataclasses.dataclass(frozen=True)
class Subject:
    """Kernels of both directions: one is timed, the other makes or takes its state. ``code`` is of a GPU: cubins."""

    choice: Choice
    code: Mapping[Direction, bytes] | None = None

    def as_dict(self) -> dict[str, Any]:
        code = None if self.code is None else {d: base64.b64encode(self.code[d]).decode() for d in DIRECTIONS}
        plans = {d: self.choice.plan(d).knobs for d in DIRECTIONS}
        return {"algorithm": self.choice.algorithm.name, "plans": plans, "code": code}

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Subject:
        algorithm = find_algorithm(data["algorithm"])
        plans = {d: algorithm.plan_from_knobs(d, data["plans"][d]) for d in DIRECTIONS}
        code = data["code"] and {d: base64.b64decode(text) for d, text in data["code"].items()}
        return cls(Choice(algorithm, **plans), code)


@dataclasses.dataclass(frozen=True)
class Task:
    """Subjects of one direction, to be checked, and timed in turns.

    Attributes:
        gpu: what plans are made for; the counting measurer predicts its times.
        subjects: the first is the reference.
        composite: whether the PyTorch composite is timed with them.
    """

    spec: PoolSpec
    gpu: Gpu
    direction: Direction
    subjects: tuple[Subject, ...]
    batches: tuple[int, ...]
    rounds: int = SEARCH_ROUNDS
    composite: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("direction", "batches", "rounds", "composite")},
            "spec": dataclasses.asdict(self.spec),
            "gpu": dataclasses.asdict(self.gpu),
            "subjects": [subject.as_dict() for subject in self.subjects],
        }

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Task:
        return cls(
            PoolSpec(**data["spec"]),
            Gpu(**data["gpu"]),
            data["direction"],
            tuple(Subject.parse(subject) for subject in data["subjects"]),
            tuple(data["batches"]),
            data["rounds"],
            data["composite"],
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of one subject: as :class:`invpool.sweep.records.Record` has it; ``times`` by batch."""

    outcome: Outcome
    reason: str = ""
    times: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Measured:
        times = {int(batch): dict(time) for batch, time in data["times"].items()}
        return cls(data["outcome"], data["reason"], times, dict(data["errors"]))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of each subject of a task; ``composite_us`` by batch, where it was asked for and could be timed."""

    subjects: tuple[Measured, ...]
    composite_us: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"subjects": [one.as_dict() for one in self.subjects], "composite_us": dict(self.composite_us)}

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Answer:
        composite = {int(batch): float(value) for batch, value in data["composite_us"].items()}
        return cls(tuple(Measured.parse(one) for one in data["subjects"]), composite)


class Measurer(Protocol):
    """Where kernels run and how their time is told. Lives in a worker process. ``gpu`` is the one it has, if any."""

    device: str
    gpu: Gpu | None
    provenance: dict[str, Any]

    def findings(self, task: Task, subject: Subject) -> list[Any]:
        """Every comparison with float64 of the subject's two kernels, as check has them."""

    def times(self, task: Task, subjects: Mapping[str, Subject], batch: int) -> dict[str, Mapping[str, float] | str]:
        """By name: median and quartiles in microseconds, or why there are none. May add the composite."""

    def is_sound(self) -> bool:
        """Whether it can go on: a kernel that reads what is not there spoils a CUDA context for all that follow."""

    def close(self) -> None: ...


def measure(measurer: Measurer, task: Task) -> Answer:
    """Checks every subject, then times those that are right, in turns: a wrong one is never timed."""
    from invpool.bench.timing import Failure
    from invpool.check import Finding

    results: list[Measured] = []
    for subject in task.subjects:
        try:
            findings: list[Finding] = measurer.findings(task, subject)
        except CompileError as error:
            results.append(Measured("compile", _first_lines(error)))
            continue
        except Exception as error:  # whatever a candidate raises, in PyCUDA, torch or here, is what came of it
            results.append(Measured("runtime", Failure.of(error).text))
            if not measurer.is_sound():
                # Nothing runs in this context any more: the others are not to blame, and are asked for again.
                rest = len(task.subjects) - len(results)
                return Answer((*results, *(Measured("runtime", NOT_MEASURED) for _ in range(rest))))
            continue
        shares = {f.name: _finite(f.error / f.tolerance if f.tolerance else f.error) for f in findings}
        wrong = [finding for finding in findings if not finding.ok]
        if wrong or not findings:
            reason = "; ".join(f"{f.name}: error {f.error:.2e}, allowed {f.tolerance:.2e}" for f in wrong)
            results.append(Measured("correctness", reason or "nothing was compared", errors=shares))
        else:
            results.append(Measured("ok", errors=shares))
    numbers = {str(number): number for number, result in enumerate(results) if result.outcome == "ok"}
    right = {name: task.subjects[number] for name, number in numbers.items()}
    composite: dict[int, float] = {}
    for batch in task.batches if right else ():
        try:
            timed = measurer.times(task, right, batch)
        except Exception as error:
            timed = dict.fromkeys(right, Failure.of(error).text)
        of_composite, of_reference = timed.get(COMPOSITE), timed.get("0")
        if isinstance(of_composite, Mapping):
            composite[batch] = of_composite["median_us"]
        reference = {"reference_us": of_reference["median_us"]} if isinstance(of_reference, Mapping) else {}
        for name, number in numbers.items():
            result, time = results[number], timed[name]
            if result.outcome != "ok":
                continue
            if isinstance(time, str):
                results[number] = dataclasses.replace(result, outcome="runtime", reason=f"B={batch}: {time}")
            else:
                results[number] = dataclasses.replace(result, times={**result.times, batch: {**time, **reference}})
    return Answer(tuple(results), composite)


def _looping(choice: Choice) -> Choice:
    """The choice with so few blocks of persistent kernels that each does several items, as it does at large batches."""
    plans = {}
    for d in DIRECTIONS:
        plan = choice.plan(d)
        if plan.knobs.get("most_blocks") is not None:
            plan = choice.algorithm.plan_from_knobs(d, plan.knobs | {"most_blocks": _CHECKED_BLOCKS})
        plans[d] = plan
    return Choice(choice.algorithm, **plans)


def _in_words(timing: Any) -> Mapping[str, float] | str:
    """Median and quartiles of a Timing, or why there are none."""
    from invpool.bench.timing import Timing

    if not isinstance(timing, Timing):
        return str(timing.text)
    if timing.host_bound:
        return "the host was too slow to keep the GPU busy"
    return {key: getattr(timing, key) for key in _QUARTILES}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _first_lines(error: BaseException) -> str:
    return str(error).strip()[:500]


# ---------------------------------------------------------------- by counting, on the emulator


class CountingMeasurer:
    """Runs kernels on the emulator, and tells their time by what they were counted to do, as Cost would.

    For machines without a GPU, and for tests: the order of plans is as good as Cost's own, no better.
    """

    def __init__(self, device: int = 0) -> None:
        from invpool.emulator.build import find_gxx, gxx_version

        del device  # every worker counts alike
        self.device = f"emulator, {platform.machine()}"
        self.gpu: Gpu | None = None
        self.provenance: dict[str, Any] = {"gxx": gxx_version(find_gxx())}
        self._pools: dict[tuple[PoolSpec, Choice], Any] = {}

    def _pool(self, spec: PoolSpec, choice: Choice) -> Any:
        from invpool.emulator.pool import EmulatedPool

        if (spec, choice) not in self._pools:
            self._pools[spec, choice] = EmulatedPool(spec, choice, "count")
        return self._pools[spec, choice]

    def findings(self, task: Task, subject: Subject) -> list[Any]:
        from invpool.check import check_against_float64

        pool = self._pool(task.spec, _looping(subject.choice))

        def run(x: Any, g: Any, mask: Any) -> Any:
            mask = None if mask is None else mask.byte()
            state = pool.forward(x, mask)
            return state["out"], pool.backward(x, g, state, mask)

        return list(check_against_float64(run, task.spec, "cpu"))

    def times(self, task: Task, subjects: Mapping[str, Subject], batch: int) -> dict[str, Mapping[str, float] | str]:
        found: dict[str, Mapping[str, float] | str] = {}
        for name, subject in subjects.items():
            microseconds = 1e6 * self._seconds(task, subject, batch)
            found[name] = dict.fromkeys(_QUARTILES, microseconds)
        return found

    def _seconds(self, task: Task, subject: Subject, batch: int) -> float:
        import torch

        from invpool.check import make_inputs

        spec, choice = task.spec, subject.choice
        pool = self._pool(spec, choice)
        x = make_inputs(spec, _COUNTED_ITEMS, "cpu")["normal"]
        mask = torch.ones(_COUNTED_ITEMS, spec.H, dtype=torch.uint8) if spec.masked else None
        state, launched = pool.run("forward", {"x": x, "mask": mask})
        if task.direction == "backward":
            g = torch.ones(_COUNTED_ITEMS, spec.H, dtype=x.dtype)
            _, launched = pool.run("backward", {**state, "x": x, "g": g, "mask": mask})
        counters, plan = launched.counters, choice.plan(task.direction)
        cost = choice.algorithm.cost(spec, plan, task.gpu, batch)
        items = batch / _COUNTED_ITEMS
        counted = dataclasses.replace(
            cost,
            fma=round(counters.issued.fma_class * items),
            mufu=round(counters.issued.transcendental * items),
            shared_wavefronts=round(counters.shared_wavefronts * items),
            global_wavefronts=round(counters.global_wavefronts * items),
        )
        return counted.seconds(task.gpu)

    def is_sound(self) -> bool:
        return True

    def close(self) -> None:
        self._pools.clear()


# ---------------------------------------------------------------- on a GPU, through PyCUDA


class GpuMeasurer:
    """Launches cubins through PyCUDA on the primary context of a GPU, beside torch, which makes inputs and the truth.

    Both use the legacy default stream, so that torch's events and spin kernels are in order with the launches.
    """

    def __init__(self, device: int = 0) -> None:
        import torch

        try:
            from pycuda import driver
        except ImportError as error:
            raise InvpoolError(f"sweeping on a GPU needs PyCUDA ({error}); pip install 'invpool[cuda]'") from error
        from invpool.bench.timing import GpuStopwatch

        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")  # torch makes the primary context; PyCUDA joins it
        driver.init()
        # Never autoinit: a context of PyCUDA's own would not be torch's.
        self._context = driver.Device(device).retain_primary_context()
        self._context.push()
        self._driver = driver
        self._functions: dict[tuple[bytes, int], Any] = {}
        self._watch = GpuStopwatch()
        self.device, self.gpu = torch.cuda.get_device_name(device), present_gpu(device)
        major, minor = driver.get_version()[:2]
        self.provenance = {
            "cuda_driver": f"{driver.get_driver_version()}",
            "pycuda_cuda": f"{major}.{minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }

    def _function(self, spec: PoolSpec, subject: Subject, direction: Direction) -> Any:
        from invpool.render import entry_name

        algorithm, plan = subject.choice.algorithm, subject.choice.plan(direction)
        assert subject.code is not None
        launch = algorithm.launch(spec, plan)
        key = (subject.code[direction], launch.shared_bytes)
        if key not in self._functions:
            module = self._driver.module_from_buffer(subject.code[direction])
            function = module.get_function(entry_name(algorithm, spec, direction))
            if launch.shared_bytes >= 48 * 1024:
                attribute = self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(attribute, launch.shared_bytes)
            # Every argument is 64 bits wide.
            function.prepare("P" * len(argument_names(direction, algorithm.state(spec))))
            self._functions[key] = (module, function)
        return self._functions[key][1]

    def _launcher(self, spec: PoolSpec, subject: Subject, direction: Direction, tensors: Mapping[str, Any]) -> Any:
        """A call that launches one kernel over tensors by ABI name, and returns nothing."""
        algorithm = subject.choice.algorithm
        function = self._function(spec, subject, direction)
        batch = int(tensors["x"].shape[0])
        launch = algorithm.launch(spec, subject.choice.plan(direction))
        values = [
            batch if name == "B" else 0 if tensors.get(name) is None else int(tensors[name].data_ptr())
            for name in argument_names(direction, algorithm.state(spec))
        ]
        grid, block = (launch.blocks(batch), 1, 1), (launch.threads, 1, 1)

        def call() -> None:
            function.prepared_async_call(grid, block, None, *values, shared_size=launch.shared_bytes)

        return call

    def _outputs(self, spec: PoolSpec, subject: Subject, direction: Direction, batch: int) -> dict[str, Any]:
        """What the kernel is to write, full of NaN, so that what it leaves out shows."""
        import torch

        state = subject.choice.algorithm.state(spec)
        types = {False: getattr(torch, spec.dtype), True: getattr(torch, spec.scalar)}
        return {
            name: torch.full(shape, math.nan, dtype=types[is_scalar], device="cuda")
            for name, (shape, is_scalar) in written(direction, state, batch, spec.H, spec.K, spec.layout).items()
        }

    def _scale(self, spec: PoolSpec) -> Any:
        import torch

        return torch.tensor(1 / math.sqrt(spec.K), dtype=getattr(torch, spec.scalar), device="cuda")

    def _forward(self, spec: PoolSpec, subject: Subject, x: Any, mask: Any) -> dict[str, Any]:
        """Runs forward: x, mask, scale and what it wrote, by ABI name."""
        tensors = {"x": x, "mask": mask, "scale": self._scale(spec)}
        tensors |= self._outputs(spec, subject, "forward", x.shape[0])
        self._launcher(spec, subject, "forward", tensors)()
        return tensors

    @staticmethod
    def _backward_inputs(spec: PoolSpec, forward: Mapping[str, Any], g: Any) -> dict[str, Any]:
        # Backward reads out as it was before it was rounded.
        return {**forward, "out": forward.get("out_acc", forward["out"]), "g": g}

    def findings(self, task: Task, subject: Subject) -> list[Any]:
        import torch

        from invpool.check import check_against_float64

        spec, subject = task.spec, dataclasses.replace(subject, choice=_looping(subject.choice))

        def run(x: Any, g: Any, mask: Any) -> Any:
            mask = None if mask is None else mask.byte().contiguous()
            forward = self._forward(spec, subject, x.contiguous(), mask)
            tensors = self._backward_inputs(spec, forward, g.contiguous())
            tensors |= self._outputs(spec, subject, "backward", x.shape[0])
            self._launcher(spec, subject, "backward", tensors)()
            torch.cuda.synchronize()
            return forward["out"], tensors["dx"]

        return list(check_against_float64(run, spec, "cuda"))

    def times(self, task: Task, subjects: Mapping[str, Subject], batch: int) -> dict[str, Mapping[str, float] | str]:
        import torch

        spec = task.spec
        shape = (batch, spec.H, spec.K) if spec.layout == "bhk" else (batch, spec.K, spec.H)
        x = torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, spec.dtype))
        mask = torch.ones(batch, spec.H, dtype=torch.uint8, device="cuda") if spec.masked else None
        g = torch.randn(batch, spec.H, device="cuda").to(x.dtype)
        calls: dict[str, Any] = {}
        found: dict[str, Mapping[str, float] | str] = {}
        for name, subject in subjects.items():
            try:
                tensors = self._forward(spec, subject, x, mask)
                if task.direction == "backward":
                    tensors = self._backward_inputs(spec, tensors, g)
                    tensors |= self._outputs(spec, subject, "backward", batch)
                calls[name] = self._launcher(spec, subject, task.direction, tensors)
            except torch.OutOfMemoryError as error:
                found[name] = f"its tensors do not fit the GPU: {_first_lines(error)}"
                torch.cuda.empty_cache()
                continue
            # The closure holds addresses alone: the tensors must live as long as it does.
            calls[name].tensors = tensors
        final = task.rounds > SEARCH_ROUNDS
        timed = self._watch.interleaved(calls, task.rounds, _FINAL_SECONDS if final else _SEARCH_SECONDS)
        found |= {name: _in_words(timing) for name, timing in timed.items()}
        calls.clear()
        if task.composite:
            found[COMPOSITE] = self._composite(spec, task.direction, x, g, mask)
        return found

    def _composite(self, spec: PoolSpec, direction: Direction, x: Any, g: Any, mask: Any) -> Mapping[str, float] | str:
        """The time of what a user would write in PyTorch; of all that is timed, it alone forms [B,H,H]."""
        import torch

        from invpool.reference import composite

        leaf = x.detach().requires_grad_(direction == "backward")
        seen = leaf if spec.layout == "bhk" else leaf.mT
        try:
            if direction == "forward":
                with torch.no_grad():
                    return _in_words(
                        self._watch.interleaved({COMPOSITE: lambda: composite(seen, None, mask)})[COMPOSITE]
                    )
            out = composite(seen, None, mask)
            call = functools.partial(torch.autograd.grad, out, leaf, g, retain_graph=True)
            return _in_words(self._watch.interleaved({COMPOSITE: call})[COMPOSITE])
        except torch.OutOfMemoryError as error:
            return _first_lines(error)
        finally:
            torch.cuda.empty_cache()  # modules are loaded from memory that torch does not keep

    def is_sound(self) -> bool:
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        self._functions.clear()
        self._context.pop()


MEASURERS: Final[Mapping[MeasurerName, type[Measurer]]] = {"gpu": GpuMeasurer, "counters": CountingMeasurer}


def sort_batches(batches: Sequence[int], spec: PoolSpec, most_bytes: int = 4 * 10**9) -> tuple[int, ...]:
    """The batch sizes in rising order, none of more than 4 GB of x: a larger one becomes the largest that is not."""
    most = max(1, most_bytes // (spec.H * spec.K * spec.element_bytes))
    return tuple(sorted({min(batch, most) for batch in batches}))
