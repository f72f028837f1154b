"""Values and gradients of every algorithm, dtype and layout on the GPU, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import ORACLES, TENSOR_CORES, choice_with, random_input, runnable
from invpool.abi import DIRECTIONS
from invpool.algorithms import ALGORITHMS, Choice, find_algorithm
from invpool.binding import TableRow, import_package, package_files, staged_package
from invpool.cache import KernelCache
from invpool.check import prove, tolerance
from invpool.generate import Planned, build_kernels
from invpool.gpu import present_gpu
from invpool.reference import norm_error, pool_ref
from invpool.runtime import GeneratedOp
from invpool.spec import DTYPES, LAYOUTS, PoolSpec

GpuOp = Callable[..., GeneratedOp]
# Whole tiles; tails in H, K and both; one row; one step; more shared memory than the default; a full block of rows.
SHAPES = ((128, 32), (7, 96), (33, 4), (1, 5), (5, 1), (137, 97), (321, 96), (1000, 16), (21, 720))
# For one_pass_mma, which holds an item whole: one off its blocks of 16, primes, circles of 1 to 16 strips.
MMA_SHAPES = (
    *((128, 32), (7, 96), (33, 4), (1, 5), (5, 1), (137, 97), (16, 16), (17, 15), (15, 17), (31, 64), (48, 20)),
    *((64, 40), (80, 33), (113, 31), (127, 33), (129, 17), (255, 16), (257, 8), (512, 8), (21, 160)),
)
# For one_pass_streamed: one off its blocks and windows, primes; all steps at once and some; more tiles than blocks.
STREAMED_SHAPES = (
    *((128, 32), (7, 96), (33, 4), (1, 5), (5, 1), (137, 97), (17, 15), (31, 64), (65, 63), (127, 33), (129, 17)),
    *((321, 96), (1000, 16), (21, 720), (37, 257), (257, 129), (130, 300), (1025, 3), (40, 1021)),
)
# For one_pass_wgmma: one off its strips of 64, primes, a pair of strips and three; one off whole units of 16 steps.
WGMMA_SHAPES = (
    *((128, 32), (7, 96), (33, 4), (1, 5), (5, 1), (137, 97), (63, 15), (64, 17), (65, 16), (127, 33), (129, 31)),
    *((100, 40), (70, 48), (191, 64), (193, 7), (321, 96), (257, 113), (65, 127), (61, 128), (1000, 16), (1025, 3)),
)
SHAPES_OF = {"one_pass_mma": MMA_SHAPES, "one_pass_streamed": STREAMED_SHAPES, "one_pass_wgmma": WGMMA_SHAPES}
# One warp more, and the threads of one_pass_mma's backward would want more registers than a block has.
SERIES = {"one_pass_mma": (128, 168), "one_pass_wgmma": (137, 128)}
# What this GPU's architecture has the instructions for.
RUNNABLE = runnable()
ON_TENSOR_CORES = [name for name in RUNNABLE if name in TENSOR_CORES]
ALGORITHM_DTYPES = [
    (name, dtype) for name in RUNNABLE for dtype in DTYPES if name not in TENSOR_CORES or dtype != "float64"
]


def _input(spec: PoolSpec, items: int = 3) -> Tensor:
    return random_input(spec.H, spec.K, spec.layout, items, getattr(torch, spec.dtype)).cuda()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("algorithm", "dtype"), ALGORITHM_DTYPES)
def test_every_kind_of_kernel_is_proved(gpu_op: GpuOp, algorithm: str, dtype: str, layout: str, masked: bool) -> None:
    """Walks through the shapes so that each is met by each dtype."""
    index = DTYPES.index(dtype) + 2 * LAYOUTS.index(layout) + 4 * masked + sorted(ALGORITHMS).index(algorithm)
    shapes = SHAPES_OF.get(algorithm, SHAPES)
    spec = PoolSpec(*shapes[index % len(shapes)], dtype, layout, masked=masked)  # type: ignore[arg-type]
    if dtype == "float64" and spec.H * spec.K * 8 > 200_000:
        spec = PoolSpec(137, 97, dtype, layout, masked=masked)  # type: ignore[arg-type]
    proof = prove(gpu_op(spec, algorithm), "cuda", seed=1)
    assert proof.device == torch.cuda.get_device_name()
    assert proof.ok, proof


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(name, shape) for name in RUNNABLE if name != "recompute" for shape in SHAPES_OF.get(name, SHAPES)],
)
def test_every_shape_in_float32(gpu_op: GpuOp, shape: tuple[int, int], algorithm: str) -> None:
    proof = prove(gpu_op(PoolSpec(*shape), algorithm), "cuda", seed=2)
    assert proof.ok, proof


@pytest.mark.parametrize("name", sorted(ORACLES))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["one_pass", *ON_TENSOR_CORES])
def test_exact_oracles(gpu_op: GpuOp, algorithm: str, name: str, layout: str) -> None:
    dtype, near = (torch.float32, 5e-7) if algorithm in TENSOR_CORES else (torch.float64, 1e-9)
    x, g, out, dx = (torch.tensor([values], dtype=torch.float64, device="cuda") for values in ORACLES[name])
    spec = PoolSpec(x.shape[1], x.shape[2], str(dtype).removeprefix("torch."), layout)  # type: ignore[arg-type]
    op = gpu_op(spec, algorithm)
    leaf = op.variate_major(x.to(dtype)).contiguous().requires_grad_()
    got = op(leaf)
    (got_dx,) = torch.autograd.grad(got, leaf, g.to(dtype))
    # Of dx one element is the small difference of large ones: errors are relative to the whole of it.
    assert norm_error(got.detach(), out) <= near
    assert norm_error(op.variate_major(got_dx), dx) <= near


def test_constants_need_masked_tails(gpu_op: GpuOp) -> None:
    """Tails padded with zeros in place of -inf would turn 0.01 into 0.00516."""
    x = torch.full((2, 33, 4), 0.01, device="cuda", requires_grad=True)
    out = gpu_op(PoolSpec(33, 4))(x)
    torch.testing.assert_close(out, torch.full((2, 33), 0.01, device="cuda"))
    g = torch.randn(2, 33, device="cuda")
    expected = (g.sum(1) / (33 * 4))[:, None, None].expand_as(x)
    torch.testing.assert_close(torch.autograd.grad(out, x, g)[0], expected)


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_unnormalised_series_stay_exact(gpu_op: GpuOp, algorithm: str) -> None:
    """100 +- 0.05 in float32: attention and dx within 1e-5, where the composite has 1e-2."""
    spec = PoolSpec(*SERIES.get(algorithm, (137, 168)))
    x = (100 + 0.05 * random_input(spec.H, spec.K, "bhk", 4)).float().cuda().requires_grad_()
    g = torch.randn(4, spec.H, device="cuda")
    op, truth = gpu_op(spec, algorithm), pool_ref(x, g)
    (dx,) = torch.autograd.grad(op(x), x, g)
    assert norm_error(dx, truth.dx) <= 1e-5
    keys = x.detach().double() - x.detach().double().mean(1, keepdim=True)
    exact = torch.softmax(x.detach().double() @ keys.mT / math.sqrt(spec.K), -1)
    assert norm_error(op.attention_map(x.detach()), exact) <= 1e-5


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        (name, shape)
        for name, shapes in (
            ("one_pass", [(862, 96), (883, 720), (2000, 50), (8192, 8), (5, 4096), (1025, 1)]),
            ("one_pass_streamed", [(862, 96), (883, 720), (2000, 50), (8192, 8), (5, 1024), (1025, 4)]),
        )
        if name in RUNNABLE
        for shape in shapes
    ],
)
def test_where_no_item_fits_a_block(gpu_op: GpuOp, algorithm: str, shape: tuple[int, int]) -> None:
    proof = prove(gpu_op(PoolSpec(*shape), algorithm), "cuda", seed=3)
    assert proof.ok, proof


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        (name, shape)
        for name, shape in (
            *(("one_pass", (862, 96)), ("one_pass_streamed", (862, 96))),
            *(("one_pass_mma", (512, 8)), ("one_pass_wgmma", (1000, 16))),
        )
        if name in RUNNABLE
    ],
)
def test_no_memory_of_the_size_of_a_score_tensor(gpu_op: GpuOp, algorithm: str, shape: tuple[int, int]) -> None:
    """Beside x, out, g and dx a few numbers a variate."""
    op, (H, K), batch = gpu_op(PoolSpec(*shape), algorithm), shape, 64
    x = torch.randn(batch, H, K, device="cuda", requires_grad=True)
    g = torch.ones(batch, H, device="cuda")
    torch.autograd.grad(op(x), x, g)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (dx,) = torch.autograd.grad(op(x), x, g)
    extra = torch.cuda.max_memory_allocated() - before - dx.numel() * 4
    # out, out_acc, lse and lse_low; and what the allocator does not split off a block for dx.
    assert extra <= 6 * batch * H * 4 + 2**20
    assert extra < batch * H * H * 4 / 20


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_one_variate_far_from_the_first_switches_centring_off(gpu_op: GpuOp, algorithm: str) -> None:
    """Centring on x_0 must not cost the small variates their digits: element by element, not by norm."""
    spec = PoolSpec(33, 4)
    x = random_input(33, 4, "bhk", 2).float()
    x[:, 0] = -1e5 * x[:, 0].abs()
    truth = pool_ref(x, torch.ones(2, 33))
    out = gpu_op(spec, algorithm)(x.cuda()).cpu().double()
    torch.testing.assert_close(out, truth.out, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("algorithm", "dtype"), [pair for pair in ALGORITHM_DTYPES if pair[0] != "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_guarded_inputs_at_every_offset(gpu_op: GpuOp, algorithm: str, dtype: str, layout: str) -> None:
    """A view into a buffer of NaN, starting at each element of a 16-byte line: bitwise as from a fresh tensor."""
    spec = PoolSpec(21, 96, dtype, layout)  # type: ignore[arg-type]
    op, x, size = gpu_op(spec, algorithm), _input(spec, 2), 2 * 21 * 96
    g = torch.randn(2, 21, device="cuda").to(x.dtype)
    leaf = x.clone().requires_grad_()
    out = op(leaf)
    (dx,) = torch.autograd.grad(out, leaf, g)
    for offset in range(9):
        buffer = torch.full((size + 64,), math.nan, dtype=x.dtype, device="cuda")
        view = buffer[16 + offset : 16 + offset + size].view(x.shape)
        view.copy_(x)
        guarded = view.detach().requires_grad_()
        assert torch.equal(op(guarded), out)
        assert torch.equal(torch.autograd.grad(op(guarded), guarded, g)[0], dx)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_bad_values_spread_in_their_item_only(gpu_op: GpuOp, algorithm: str, bad: float) -> None:
    op = gpu_op(PoolSpec(4, 8), algorithm)
    x = torch.randn(3, 4, 8, device="cuda", requires_grad=True)
    clean = op(x)
    (clean_dx,) = torch.autograd.grad(clean, x, torch.ones_like(clean))
    spoilt = x.detach().clone()
    spoilt[0, 2, 3] = bad
    spoilt.requires_grad_()
    out = op(spoilt)
    (dx,) = torch.autograd.grad(out, spoilt, torch.ones_like(out))
    assert out[0].isnan().all()
    assert torch.equal(out[1:], clean[1:])
    assert torch.equal(dx[1:], clean_dx[1:])


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_masked_variates_may_hold_anything(gpu_op: GpuOp, algorithm: str) -> None:
    op = gpu_op(PoolSpec(33, 6, masked=True), algorithm)
    x = torch.randn(5, 33, 6, device="cuda")
    mask = torch.rand(5, 33, device="cuda") < 0.6
    mask[0] = False
    mask[1, 0] = False
    g = torch.randn(5, 33, device="cuda")
    spoilt = torch.where(mask[:, :, None], x, math.nan).requires_grad_()
    leaf = x.clone().requires_grad_()
    out, expected = op(spoilt, mask=mask), op(leaf, mask=mask)
    assert torch.equal(out, expected)
    bad_g = torch.where(mask, g, math.nan)
    assert torch.equal(torch.autograd.grad(out, spoilt, bad_g)[0], torch.autograd.grad(expected, leaf, g)[0])
    assert not out[~mask].any()


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_half_precision_scores_beyond_65504(gpu_op: GpuOp, algorithm: str) -> None:
    x = torch.tensor([60.0, -60.0, 59.0], device="cuda")[None, :, None].expand(1, 3, 96).half().requires_grad_()
    out = gpu_op(PoolSpec(3, 96, "float16"), algorithm)(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(out, torch.tensor([[60.0, -60.0, 60.0]], device="cuda").half())
    torch.testing.assert_close(dx[0, 0].float(), torch.full((96,), 1 / 48, device="cuda"), rtol=1e-3, atol=0)
    torch.testing.assert_close(dx[0, 1].float(), torch.full((96,), 1 / 96, device="cuda"), rtol=1e-3, atol=0)
    assert dx[0, 2].abs().max() < 1e-6


def test_attention_map_of_the_kernel(gpu_op: GpuOp) -> None:
    spec = PoolSpec(33, 6)
    x = _input(spec)
    a = gpu_op(spec, "three_pass").attention_map(x)
    exact = torch.softmax(x.double() @ x.double().mT / math.sqrt(6), -1)
    assert norm_error(a, exact) <= tolerance(spec, "out", 0.0)
    torch.testing.assert_close(a.sum(-1), torch.ones(3, 33, device="cuda"))


@pytest.mark.parametrize("algorithm", ["one_pass", *ON_TENSOR_CORES])
def test_scale_given_and_learned(gpu_op: GpuOp, algorithm: str) -> None:
    spec = PoolSpec(21, 9)
    op, x, g = gpu_op(spec, algorithm), _input(spec).requires_grad_(), torch.randn(3, 21, device="cuda")
    for scale in (0.0, -0.4, 2.5):
        truth = pool_ref(x, g, scale=scale)
        assert norm_error(op(x, scale).detach(), truth.out) <= 5e-7
        assert norm_error(torch.autograd.grad(op(x, scale), x, g)[0], truth.dx) <= 1e-6
    scale = torch.tensor(0.3, device="cuda", requires_grad=True)
    (got,) = torch.autograd.grad(op(x, scale), scale, g)
    exact_scale = torch.tensor(0.3, dtype=torch.float64, device="cuda", requires_grad=True)
    from invpool.reference import composite

    (exact,) = torch.autograd.grad(composite(x.double(), exact_scale), exact_scale, g.double())
    assert abs(got.item() - exact.item()) <= 1e-5 * abs(exact.item())


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_the_same_bits_every_time_and_for_every_batch(gpu_op: GpuOp, algorithm: str) -> None:
    op = gpu_op(PoolSpec(137, 97), algorithm)
    x = torch.randn(16, 137, 97, device="cuda", requires_grad=True)
    g = torch.randn(16, 137, device="cuda")
    out = op(x)
    (dx,) = torch.autograd.grad(out, x, g)
    for _ in range(50):
        again = op(x)
        assert torch.equal(again, out)
        assert torch.equal(torch.autograd.grad(again, x, g)[0], dx)
    for item in (0, 7, 15):
        one = x[item : item + 1].detach().requires_grad_()
        assert torch.equal(op(one)[0], out[item])
        assert torch.equal(torch.autograd.grad(op(one), one, g[item : item + 1])[0][0], dx[item])


@pytest.mark.parametrize("algorithm", ON_TENSOR_CORES)
@pytest.mark.parametrize(
    "spec",
    [PoolSpec(7, 20), PoolSpec(33, 6, masked=True), PoolSpec(70, 24, "float16", "bkh"), PoolSpec(128, 32)],
    ids=lambda spec: spec.slug,
)
def test_blocks_that_go_from_item_to_item_take_nothing_along(gpu_op: GpuOp, spec: PoolSpec, algorithm: str) -> None:
    """More items than a launch has places for, plain ones and others, one of NaN: each as if it were alone."""
    op = gpu_op(spec, algorithm)
    launch = op.manifest["kernels"][0]["launch"]
    # Whose blocks have one task each is to take nothing along either.
    places = launch["most_blocks"] * launch["items_per_block"] if launch["most_blocks"] else 264
    batch = 2 * places + 5
    x = random_input(spec.H, spec.K, spec.layout, batch)
    x[1::4], x[2::4] = 4 * x[1::4], (1 if spec.element_bytes == 2 else 100) + 0.05 * x[2::4]
    x = x.to(getattr(torch, spec.dtype)).cuda()
    x[places // 2] = math.nan
    mask = torch.rand(batch, spec.H, device="cuda") < 0.7 if spec.masked else None
    g = torch.randn(batch, spec.H, device="cuda").to(x.dtype)
    leaf = x.requires_grad_()
    out = op(leaf, mask=mask)
    (dx,) = torch.autograd.grad(out, leaf, g)
    first = [0, 1, 2, places // 2 + 1, places - 1]
    for i in (*first, *(places + i for i in first), places + places // 2, batch - 2, batch - 1):
        one = x[i : i + 1].detach().clone().requires_grad_()
        alone = op(one, mask=None if mask is None else mask[i : i + 1])
        assert torch.equal(alone[0], out[i]), i
        assert torch.equal(torch.autograd.grad(alone, one, g[i : i + 1])[0][0], dx[i]), i


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_a_masked_first_variate_does_not_cost_the_others_their_digits(gpu_op: GpuOp, algorithm: str) -> None:
    """The centre of an un-normalised item is its first variate that takes part."""
    spec = PoolSpec(*SERIES.get(algorithm, (137, 168)), masked=True)
    x = (100 + 0.05 * random_input(spec.H, spec.K, "bhk", 4)).float().cuda()
    mask = torch.rand(4, spec.H, device="cuda") < 0.7
    mask[:, 0] = False
    g = torch.randn(4, spec.H, device="cuda")
    leaf, truth = x.clone().requires_grad_(), pool_ref(x, g, mask=mask)
    (dx,) = torch.autograd.grad(gpu_op(spec, algorithm)(leaf, mask=mask), leaf, g)
    assert norm_error(dx, truth.dx) <= 1e-5


ORDERS = (("row", 1, 8), ("row", 8, 32), ("padded", 4, 16), ("padded", 2, 64), ("transposed", 8, 8))
TILES = ((64, 4, 16), (32, 4, 32), (16, 2, 64), (64, 8, 32), (16, 4, 16))
PLANS = [
    ("three_pass", {"shared_order": order, "columns": columns, "k_tile": k_tile}) for order, columns, k_tile in ORDERS
] + [("one_pass", {"rows": rows, "thread_rows": thread_rows, "k_step": k_step}) for rows, thread_rows, k_step in TILES]
TENSOR_CORE_PLANS = [
    ("one_pass_mma", PoolSpec(33, 40), {"row_blocks": 1, "prefetch": False}),
    ("one_pass_mma", PoolSpec(33, 40, layout="bkh"), {"row_blocks": 2, "columns": 32}),
    ("one_pass_mma", PoolSpec(64, 17), {"row_blocks": 1, "prefetch": False}),
    ("one_pass_mma", PoolSpec(100, 40), {"row_blocks": 2, "columns": 32, "prefetch": False}),
    ("one_pass_mma", PoolSpec(100, 40, "float16"), {"row_blocks": 4, "columns": 32}),
    ("one_pass_mma", PoolSpec(130, 24), {"row_blocks": 4, "columns": 16}),
    ("one_pass_mma", PoolSpec(70, 24, layout="bkh"), {"row_blocks": 1, "prefetch": False}),
    ("one_pass_mma", PoolSpec(7, 20), {"row_blocks": 1, "items": 8}),
    ("one_pass_mma", PoolSpec(7, 21, "bfloat16", masked=True), {"row_blocks": 1, "items": 4, "prefetch": False}),
    ("one_pass_mma", PoolSpec(29, 20, layout="bkh"), {"row_blocks": 2, "items": 2}),
    ("one_pass_streamed", PoolSpec(33, 40), {"window": 16, "warps": 2, "mirror": False}),
    ("one_pass_streamed", PoolSpec(100, 40), {"window": 32, "warps": 2, "mirror": True}),
    ("one_pass_streamed", PoolSpec(70, 24, layout="bkh"), {"row_blocks": 2, "window": 64, "prefetch": False}),
    ("one_pass_streamed", PoolSpec(130, 40, masked=True), {"window": 64, "across": 4, "mirror": False}),
    ("one_pass_streamed", PoolSpec(63, 131, "float16"), {"chunk": 64, "hold": True, "across": 1}),
    ("one_pass_streamed", PoolSpec(70, 257), {"chunk": 96, "hold": False, "across": 1}),
    ("one_pass_streamed", PoolSpec(65, 300, layout="bkh"), {"chunk": 64, "across": 2, "spread": True}),
    ("one_pass_wgmma", PoolSpec(33, 21), {"groups": 1, "prefetch": False}),
    ("one_pass_wgmma", PoolSpec(70, 40, layout="bkh"), {"groups": 1, "prefetch": False, "registers": 96}),
    ("one_pass_wgmma", PoolSpec(100, 40, masked=True), {"groups": 2, "prefetch": True}),
    ("one_pass_wgmma", PoolSpec(137, 97), {"groups": 1, "prefetch": True}),
    ("one_pass_wgmma", PoolSpec(137, 33, "bfloat16"), {"groups": 3, "prefetch": False, "registers": 128}),
    ("one_pass_wgmma", PoolSpec(257, 24, layout="bkh"), {"groups": 4, "prefetch": True}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("algorithm", "knobs"), PLANS, ids=str)
def test_plans_off_the_default_path(tmp_path: Path, algorithm: str, knobs: dict[str, object], dtype: str) -> None:
    """Orders, tiles and tails that the default plans never take: a wrong stride there would pass everything else."""
    spec, gpu = PoolSpec(33, 40, dtype), present_gpu()  # type: ignore[arg-type]
    assert gpu is not None
    found = find_algorithm(algorithm)
    plans = [next((p for p in found.legal(spec, gpu, d) if knobs.items() <= p.knobs.items()), None) for d in DIRECTIONS]
    if None in plans:
        # float64 halves what fits; float32 must have them all.
        assert dtype == "float64", found.name
        return
    _prove_plans(tmp_path, spec, Choice(found, *plans))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "spec", "knobs"),
    [plan for plan in TENSOR_CORE_PLANS if plan[0] in RUNNABLE],
    ids=lambda value: getattr(value, "slug", str(value)),
)
def test_plans_on_tensor_cores(tmp_path: Path, algorithm: str, spec: PoolSpec, knobs: dict[str, object]) -> None:
    gpu = present_gpu()
    assert gpu is not None
    _prove_plans(tmp_path, spec, choice_with(spec, algorithm, knobs, gpu))


def _prove_plans(folder: Path, spec: PoolSpec, choice: Choice) -> None:
    gpu = present_gpu()
    assert gpu is not None
    kernels = build_kernels(spec, Planned(((0, choice),)), (gpu.arch,), KernelCache())
    with staged_package(folder / spec.slug, package_files(spec, gpu.name, kernels, (TableRow(0, 0, 1),))):
        pass
    proof = prove(import_package(folder / spec.slug).op, "cuda", seed=4)
    assert proof.ok, proof
