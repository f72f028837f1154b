"""The op among the rest of torch: shapes, autocast, checkpoints, compile, export, copies, processes."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import random_input
from invpool.reference import composite
from invpool.runtime import GeneratedOp, InvertedAttentionPoolBase
from invpool.spec import PoolSpec

MakeOp = Callable[[PoolSpec], GeneratedOp]


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("layout", ["bhk", "bkh"])
@pytest.mark.parametrize("leading", [(), (1,), (4,), (2, 3), (2, 1, 2), (0, 3)])
def test_any_leading_axes(make_op: MakeOp, leading: tuple[int, ...], layout: str) -> None:
    op = make_op(PoolSpec(5, 3, layout=layout, masked=True))  # type: ignore[arg-type]
    x = torch.randn(*leading, *op.shape)
    mask = torch.rand(*leading, 5) < 0.6
    flat, flat_mask = x.reshape(-1, *op.shape), mask.reshape(-1, 5)
    leaf, flat_leaf = x.clone().requires_grad_(), flat.clone().requires_grad_()
    out, flat_out = op(leaf, mask=mask), op(flat_leaf, mask=flat_mask)
    assert out.shape == (*leading, 5)
    assert torch.equal(out.reshape(-1, 5), flat_out)
    g = torch.randn(*leading, 5)
    (dx,) = torch.autograd.grad(out, leaf, g)
    (flat_dx,) = torch.autograd.grad(flat_out, flat_leaf, g.reshape(-1, 5))
    assert torch.equal(dx.reshape(flat.shape), flat_dx)
    with torch.no_grad():
        assert torch.equal(op(x, mask=mask), out)
    assert torch.equal(op.attention_map(x, mask=mask).reshape(-1, 5, 5), op.attention_map(flat, mask=flat_mask))
    assert op.attention_map(x, mask=mask).shape == (*leading, 5, 5)


def test_lengths_are_masks(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(5, 3, masked=True))
    lengths = torch.tensor([[0, 1, 5], [3, 9, -2]])
    x = torch.randn(2, 3, 5, 3)
    mask = torch.arange(5) < lengths[..., None]
    assert torch.equal(op(x, lengths=lengths), op(x, mask=mask))
    assert torch.equal(op(x[0], lengths=lengths[0].int()), op(x[0], mask=mask[0]))
    assert torch.equal(op(x[0, 1], lengths=lengths[0, 1]), op(x[0, 1], mask=mask[0, 1]))
    assert torch.equal(op.attention_map(x, lengths=lengths), op.attention_map(x, mask=mask))
    module = type("Pool", (InvertedAttentionPoolBase,), {"op": op})()
    assert torch.equal(module(x, lengths=lengths), op(x, mask=mask))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, "lengths is torch.float32; expected a tensor of integers"),
        ({"lengths": [1, 2]}, TypeError, "lengths is list"),
        ({"lengths": torch.tensor([1, 2, 3])}, ValueError, r"lengths has shape \(3,\) .*expected \(2,\)"),
        ({"lengths": torch.tensor([1, 2]), "mask": torch.ones(2, 5).bool()}, ValueError, "mask or lengths, not both"),
    ],
)
def test_what_are_no_lengths(make_op: MakeOp, arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make_op(PoolSpec(5, 3, masked=True))(torch.randn(2, 5, 3), **arguments)


def test_an_op_without_masks_refuses_lengths_and_masks_must_fit_the_leading_axes(make_op: MakeOp) -> None:
    with pytest.raises(ValueError, match="takes no mask"):
        make_op(PoolSpec(5, 3))(torch.randn(2, 5, 3), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"mask has shape \(6, 5\) on cpu; expected \(2, 3, 5\)"):
        make_op(PoolSpec(5, 3, masked=True))(torch.randn(2, 3, 5, 3), mask=torch.ones(6, 5).bool())


# ---------------------------------------------------------------- D18: autocast


@pytest.mark.parametrize("under", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made_for", ["float32", "bfloat16", "float16"])
def test_d18_under_autocast_the_op_s_dtype_decides(make_op: MakeOp, made_for: str, under: torch.dtype) -> None:
    op = make_op(PoolSpec(5, 8, made_for))  # type: ignore[arg-type]
    inner, leaf = nn.Linear(8, 8), torch.randn(4, 5, 8, requires_grad=True)
    for source in (lambda: inner(leaf), lambda: leaf):
        with torch.autocast("cpu", dtype=under):
            x = source()
            out = op(x)
        assert out.dtype == op.dtype
        torch.testing.assert_close(
            out.float(), composite(x.detach().to(op.dtype).float()).to(op.dtype).float(), rtol=2e-2, atol=2e-2
        )
        (dx,) = torch.autograd.grad(out.float().sum(), leaf)  # outside autocast
        assert dx.dtype == torch.float32
        assert dx.isfinite().all()
    with pytest.raises(TypeError, match="this op was made for"):
        op(torch.randn(4, 5, 8, dtype=torch.float64))


def test_d18_grad_scaler_trains(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(5, 8, "float16"))
    inner = nn.Linear(8, 8)
    optimiser, scaler = torch.optim.SGD(inner.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    before = inner.weight.detach().clone()
    x, losses = torch.randn(6, 5, 8), []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = op(inner(x)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(before, inner.weight)


# ---------------------------------------------------------------- checkpoints, copies, files


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_gives_the_same_gradient(make_op: MakeOp, reentrant: bool) -> None:
    op = make_op(PoolSpec(5, 3))
    inner, x = nn.Linear(3, 3), torch.randn(4, 5, 3, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return op(inner(x))

    plain = torch.autograd.grad(block(x).sum(), (x, inner.weight))
    block_out = checkpoint(block, x, use_reentrant=reentrant)
    assert isinstance(block_out, Tensor)
    inner.zero_grad()
    block_out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(inner.weight.grad, plain[1])  # type: ignore[arg-type]


def test_a_module_can_be_copied_pickled_and_saved(make_package: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_package(PoolSpec(5, 3), tmp_path / "importable_pool")
    code = (
        "import copy, io, pickle, sys, torch\n"
        f"sys.path.insert(0, {str(folder.parent)!r})\n"
        "from importable_pool import InvertedAttentionPool\n"
        "module, x = InvertedAttentionPool(scale=0.3, learn_scale=True), torch.randn(2, 5, 3)\n"
        "saved = io.BytesIO(); torch.save(module, saved); saved.seek(0)\n"
        "read = torch.load(saved, weights_only=False)\n"
        "for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), read):\n"
        "    assert torch.equal(other(x), module(x))\n"
        "    assert other.scale is not module.scale and torch.equal(other.scale, module.scale)\n"
        "assert list(module.state_dict()) == ['scale']\n"
        "assert not InvertedAttentionPool().state_dict()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_results_are_the_same_bits_every_time_and_in_deterministic_mode(make_op: MakeOp) -> None:
    op, x = make_op(PoolSpec(33, 20)), random_input(33, 20, "bhk", 8, torch.float32).requires_grad_()
    g = torch.randn(8, 33)

    def run() -> tuple[Tensor, Tensor]:
        out = op(x)
        return out.detach(), torch.autograd.grad(out, x, g)[0]

    first = run()
    try:
        for number in range(10):
            torch.use_deterministic_algorithms(number % 2 == 1)
            for one, other in zip(first, run(), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- D19: compile and export


class _Model(nn.Module):
    """Linear, op, Linear on time-major data."""

    def __init__(self, op: GeneratedOp) -> None:
        super().__init__()
        self.inner, self.outer, self.op = nn.Linear(5, 5), nn.Linear(5, 2), op

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.op(self.inner(x)))


def test_d19_a_batch_that_changes_makes_two_graphs_and_one_more_for_one_item(make_op: MakeOp) -> None:
    model = _Model(make_op(PoolSpec(5, 3, "float32", "bkh")))
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for batch in (4, 5, 7, 64):
        x = torch.randn(batch, 3, 5, requires_grad=True)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) <= 2
    x = torch.randn(1, 3, 5, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) <= 3


def test_export_with_a_dynamic_batch(make_op: MakeOp) -> None:
    model = _Model(make_op(PoolSpec(5, 3, "float32", "bkh"))).eval()
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(4, 3, 5),), dynamic_shapes={"x": {0: batch}})
        for items in (1, 2, 9):
            x = torch.randn(items, 3, 5)
            torch.testing.assert_close(program.module()(x), model(x))


def test_leading_axes_lengths_and_scale_compile_too(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(5, 3, masked=True))

    def model(x: Tensor, lengths: Tensor, scale: Tensor) -> Tensor:
        return op(x, scale, lengths=lengths)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, lengths, scale = torch.randn(2, 3, 5, 3), torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor(0.4)
    results = []
    for function in (model, compiled):
        leaf, factor = x.clone().requires_grad_(), scale.clone().requires_grad_()
        out = function(leaf, lengths, factor)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), (leaf, factor))))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)


# ---------------------------------------------------------------- several processes

_DDP = """
import os, sys, torch, torch.distributed as dist, invpool
from torch import nn
rank, op = int(os.environ["RANK"]), invpool.load(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3))
x = torch.randn(8, 5, 3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
    def forward(self, x):
        return op(self.inner(x))
torch.manual_seed(1)
net = Net()
alone = Net(); alone.load_state_dict(net.state_dict())
alone(x).pow(2).sum().div(2).backward()
parallel = nn.parallel.DistributedDataParallel(net)
parallel(x[4 * rank : 4 * rank + 4]).pow(2).sum().backward()
for mine, single in zip(net.parameters(), alone.parameters()):
    torch.testing.assert_close(mine.grad, single.grad, rtol=1e-6, atol=1e-6)
ranks = [torch.empty_like(net.inner.weight.grad) for _ in range(2)]
dist.all_gather(ranks, net.inner.weight.grad)
assert torch.equal(*ranks)
dist.destroy_process_group()
"""


_DTENSOR = """
import sys, torch, torch.distributed as dist, invpool
op = invpool.load(sys.argv[1])
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, g, mask = torch.randn(8, 5, 3), torch.randn(8, 5), torch.rand(8, 5) > 0.3
for by, kept in ((Shard(0), Shard(0)), (Replicate(), Replicate()), (Shard(1), Replicate()), (Shard(2), Replicate())):
    for scale in (None, 0.5, torch.tensor(0.7, requires_grad=True)):
        leaf, factor = x.clone().requires_grad_(), scale
        want = op(leaf, factor, mask)
        want.backward(g)
        d_scale = scale.grad if isinstance(scale, torch.Tensor) else None
        if d_scale is not None:
            scale.grad = None
        spread = distribute_tensor(x, mesh, [by]).requires_grad_()
        got = op(spread, scale, distribute_tensor(mask, mesh, [kept]))
        assert got.placements == (kept,), got.placements  # items stay where they are
        got.backward(distribute_tensor(g, mesh, [kept]))
        assert torch.equal(got.full_tensor(), want)
        assert torch.equal(spread.grad.full_tensor(), leaf.grad)
        if d_scale is not None:
            torch.testing.assert_close(scale.grad.full_tensor(), d_scale)
            scale.grad = None
dist.destroy_process_group()
"""

_FSDP = """
import os, sys, torch, torch.distributed as dist, invpool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
rank, op = int(os.environ["RANK"]), invpool.load(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(8, 5, 3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(5, 2)
    def forward(self, x):
        return self.outer(op(self.inner(x)))
torch.manual_seed(1)
net = Net()
alone = Net(); alone.load_state_dict(net.state_dict())
alone(x).pow(2).sum().div(2).backward()
mesh = init_device_mesh("cpu", (2,))
for part in (net.inner, net.outer, net):
    fully_shard(part, mesh=mesh)
net(x[4 * rank : 4 * rank + 4]).pow(2).sum().backward()
for mine, single in zip(net.parameters(), alone.parameters()):
    torch.testing.assert_close(mine.grad.full_tensor(), single.grad, rtol=1e-6, atol=1e-6)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("script", [_DDP, _FSDP, _DTENSOR], ids=["ddp", "fsdp2", "dtensor"])
def test_two_processes_give_the_gradients_of_one(script: str, make_package: Callable[..., Path]) -> None:
    folder = make_package(PoolSpec(5, 3, masked=script is _DTENSOR))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder)], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def test_an_op_is_its_own_copy_and_survives_pickling(make_op: MakeOp) -> None:
    op, x = make_op(PoolSpec(5, 3)), torch.randn(2, 5, 3)
    assert copy.deepcopy(op) is op
    stream = io.BytesIO(pickle.dumps(op))
    assert torch.equal(pickle.load(stream)(x), op(x))
    assert math.isfinite(op(x).sum())
