"""What several test files share: specs, inputs, and a way to run Python elsewhere."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import ALGORITHMS, Choice, Launch, find_algorithm
from invpool.algorithms.three_pass import ThreePass, ThreePassPlan
from invpool.compile import Compiled, Resources, Target
from invpool.cost import Cost
from invpool.gpu import Gpu, present_gpu
from invpool.spec import PoolSpec

REPO = Path(__file__).parent.parent

# Their scores are made of fp16 numbers, of which no few make a float64.
TENSOR_CORES = ("one_pass_mma", "one_pass_streamed", "one_pass_wgmma")

# Exact oracles of the operation: x (one item, H x K), g, out, dx.
ORACLES: dict[str, tuple[list[list[float]], list[float], list[float], list[list[float]]]] = {
    "two variates, one step": (
        [[1.0], [2.0]],
        [1.0, 1.0],
        [1.7310585786, 1.8807970780],
        [[0.1781571726], [2.1234483461]],
    ),
    "two variates, one-sided gradient": (
        [[1.0], [2.0]],
        [1.0, 0.0],
        [1.7310585786, 1.8807970780],
        [[0.2689414214], [0.9276705119]],
    ),
    "three variates, two steps": (
        [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
        [1.0, 1.0, 1.0],
        [0.7005560463, 0.7005560463, 0.7517449217],
        [[0.4082155127, 0.3505434311], [0.3505434311, 0.4082155127], [0.8703640903, 0.8703640903]],
    ),
}


# Knobs that one direction alone has a choice of.
ONE_WAY: dict[tuple[str, str], Direction] = {
    ("one_pass_mma", "columns"): "forward",
    ("one_pass_streamed", "mirror"): "forward",
    ("one_pass_streamed", "spread"): "backward",
}


def choice_with(spec: PoolSpec, algorithm: str, knobs: dict[str, object], gpu: Gpu, one_block: bool = False) -> Choice:
    """The first legal plans that have the knobs; ``one_block``: if persistent, of one block for all items."""
    found, plans = find_algorithm(algorithm), []
    for direction in DIRECTIONS:
        wanted = {
            name: value for name, value in knobs.items() if ONE_WAY.get((algorithm, name), direction) == direction
        }
        legal = found.legal(spec, gpu, direction)
        # Not every legal plan is a candidate.
        plan = next((p for p in legal if wanted.items() <= p.knobs.items()), None)
        plan = plan or dataclasses.replace(legal[0], **wanted)
        assert found.reject(spec, plan, gpu) is None, f"no legal {direction} plan of {algorithm} has {wanted}"
        capped = {"most_blocks": 1} if one_block and plan.knobs.get("most_blocks") else {}
        plans.append(dataclasses.replace(plan, **capped))
    return Choice(found, *plans)


def runnable() -> list[str]:
    """The algorithms that the GPU in this machine can run; all where there is none."""
    gpu = present_gpu()
    return [name for name, found in sorted(ALGORITHMS.items()) if gpu is None or not found.reject_arch(gpu.arch)]


def random_input(
    H: int, K: int, layout: str, items: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (items, H, K) if layout == "bhk" else (items, K, H)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def run_python(code: str, *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300) -> str:
    """Runs a script in a fresh interpreter and returns what it printed; fails with its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_processes(
    target: Callable[..., object], arguments: Sequence[tuple[object, ...]], seconds: float = 120
) -> list[int | None]:
    """Runs a function in a fresh process for each of the arguments, at once; their exit codes, None: still running."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=own) for own in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    return [process.exitcode for process in processes]


def fake_compiler(source: str, target: Target) -> Compiled:
    """Code that no GPU would run, at once: for tests of everything around it."""
    code = f"{target.name}:{len(source)}".encode()
    return Compiled(code, Resources(64, 0, 0, 0, 0) if target.kind == "cubin" else None)


@dataclasses.dataclass(frozen=True)
class PersistentPlan(ThreePassPlan):
    most_blocks: int | None = None


class Persistent(ThreePass):
    """``three_pass`` with a cap on the grid; its template does not loop, see :func:`looping`."""

    plan_type = PersistentPlan

    def candidates(self, spec: PoolSpec, direction: Direction) -> Iterator[PersistentPlan]:
        for plan in super().candidates(spec, direction):
            yield PersistentPlan(direction, **plan.knobs)

    def fitted(self, spec: PoolSpec, plan: PersistentPlan, gpu: Gpu) -> PersistentPlan:
        launch = self.launch(spec, plan)
        wave = gpu.wave(launch.threads, launch.shared_bytes, self._register_cap(spec, plan))
        return dataclasses.replace(plan, most_blocks=wave)

    def launch(self, spec: PoolSpec, plan: PersistentPlan) -> Launch:
        return dataclasses.replace(super().launch(spec, plan), most_blocks=plan.most_blocks)

    def cost(self, spec: PoolSpec, plan: PersistentPlan, gpu: Gpu, batch: int) -> Cost:
        launch = self.launch(spec, plan)
        return dataclasses.replace(
            super().cost(spec, plan, gpu, batch), blocks=launch.blocks(batch), tasks=launch.tasks(batch)
        )


def looping(source: str) -> str:
    """A kernel of ``three_pass`` whose blocks loop over the items: the kernel as a function, called from a loop."""
    head, kernel = source.split('extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)\n')
    entry, parameters, body = re.match(r"(\w+)\(\n(.*?)\) \{\n(.*)", kernel, re.DOTALL).groups()
    body = body.replace("  const long long b = blockIdx.x;\n  if (b >= B) return;\n", "")
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    return (
        f"{head}__device__ void one_item(long long b,\n{parameters}) {{\n{body}\n"
        f'extern "C" __global__ void {entry}(\n{parameters}) {{\n'
        "  for (long long b = blockIdx.x; b < B; b += gridDim.x) {\n"
        f"    one_item(b, {names});\n    __syncthreads();\n  }}\n}}\n"
    )
