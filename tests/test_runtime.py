"""The op on CPU tensors: values, gradients of every order, transforms, registration, refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import ORACLES, random_input
from invpool.reference import composite, norm_error, pool_ref
from invpool.runtime import GeneratedOp, InvertedAttentionPoolBase, closed_form_attention
from invpool.spec import DTYPES, LAYOUTS, PoolSpec

MakeOp = Callable[[PoolSpec], GeneratedOp]
F64 = PoolSpec(5, 3, "float64")


def _module(op: GeneratedOp, **options: object) -> InvertedAttentionPoolBase:
    kind = type("InvertedAttentionPool", (InvertedAttentionPoolBase,), {"op": op})
    return kind(**options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_against_float64(make_op: MakeOp, dtype: str, layout: str, masked: bool) -> None:
    spec = PoolSpec(7, 5, dtype, layout, masked=masked)  # type: ignore[arg-type]
    torch_dtype = getattr(torch, dtype)
    x = random_input(7, 5, layout, 4, torch_dtype).requires_grad_()
    g = torch.randn(4, 7).to(torch_dtype)
    mask = torch.rand(4, 7) < 0.6 if masked else None
    truth = pool_ref(x, g, layout, mask=mask)
    out = make_op(spec)(x, mask=mask)
    (dx,) = torch.autograd.grad(out, x, g)
    assert (out.dtype, dx.dtype) == (torch_dtype, torch_dtype)
    assert out.is_contiguous()
    assert dx.is_contiguous()
    tol = {"float64": 1e-14, "float32": 5e-7, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert norm_error(out.detach(), truth.out) <= tol
    assert norm_error(dx, truth.dx) <= tol


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_exact_oracles(make_op: MakeOp, name: str) -> None:
    x, g, out, dx = (torch.tensor([values], dtype=torch.float64) for values in ORACLES[name])
    x.requires_grad_()
    got = make_op(PoolSpec(x.shape[1], x.shape[2], "float64"))(x)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(got, x, g)[0], dx, rtol=0, atol=1e-9)


def test_oracles_that_need_no_table(make_op: MakeOp) -> None:
    x = random_input(1, 6, "bhk").requires_grad_()
    out = make_op(PoolSpec(1, 6, "float64"))(x)
    torch.testing.assert_close(out, x.mean(-1))
    g = torch.randn(3, 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(out, x, g)[0], (g / 6)[:, :, None].expand_as(x))

    constant = torch.full((2, 33, 4), 0.01, dtype=torch.float64, requires_grad=True)
    out = make_op(PoolSpec(33, 4, "float64"))(constant)
    torch.testing.assert_close(out, torch.full((2, 33), 0.01, dtype=torch.float64))
    g = torch.randn(2, 33, dtype=torch.float64)
    expected = (g.sum(1) / (33 * 4))[:, None, None].expand_as(constant)
    torch.testing.assert_close(torch.autograd.grad(out, constant, g)[0], expected)

    zero_row = random_input(5, 3, "bhk")
    zero_row[:, 2] = 0
    torch.testing.assert_close(make_op(F64)(zero_row)[:, 2], zero_row.mean((1, 2)))

    order = torch.tensor([3, 0, 4, 1, 2])
    x = random_input(5, 3, "bhk")
    torch.testing.assert_close(make_op(F64)(x[:, order]), make_op(F64)(x)[:, order])


def test_unnormalised_series_stay_exact(make_op: MakeOp) -> None:
    """100 +- 0.05 in float32: the composite has 1e-2 in dx here, and out hides it."""
    spec = PoolSpec(137, 168)
    x = (100 + 0.05 * random_input(137, 168, "bhk", 2)).float().requires_grad_()
    g = torch.randn(2, 137)
    truth = pool_ref(x, g)
    (dx,) = torch.autograd.grad(make_op(spec)(x), x, g)
    assert norm_error(dx, truth.dx) <= 1e-5
    exact = torch.softmax(x.double() @ (x.double() - x.double().mean(1, keepdim=True)).mT / math.sqrt(168), -1)
    assert norm_error(make_op(spec).attention_map(x.detach()), exact.detach()) <= 1e-5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_and_gradgradcheck(make_op: MakeOp, layout: str, masked: bool) -> None:
    op = make_op(PoolSpec(5, 3, "float64", layout, masked=masked))  # type: ignore[arg-type]
    x = random_input(5, 3, layout, 2).requires_grad_()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 0, 1]], dtype=torch.bool) if masked else None
    assert torch.autograd.gradcheck(lambda x, s: op(x, s, mask), (x, scale))
    assert torch.autograd.gradgradcheck(lambda x, s: op(x, s, mask), (x, scale))


def test_a_gradient_penalty_is_not_silently_dropped(make_op: MakeOp) -> None:
    x = random_input(5, 3, "bhk", 1).requires_grad_()

    def penalty(pool: Callable[[Tensor], Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(pool(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), x)[0]

    ours, theirs = penalty(make_op(F64)), penalty(composite)
    assert theirs.norm() > 0.1
    torch.testing.assert_close(ours, theirs)


def test_func_transforms(make_op: MakeOp) -> None:
    op = make_op(F64)
    x = random_input(5, 3, "bhk", 2)

    def loss(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: pool(x).pow(2).sum()

    torch.testing.assert_close(torch.func.grad(loss(op))(x), torch.func.grad(loss(composite))(x))
    torch.testing.assert_close(torch.func.jacrev(op)(x), torch.func.jacrev(composite)(x))
    stacked = random_input(5, 3, "bhk", 8).view(4, 2, 5, 3)
    torch.testing.assert_close(torch.vmap(op)(stacked), torch.stack([op(x) for x in stacked]))
    torch.testing.assert_close(
        torch.vmap(op, in_dims=2)(stacked.permute(1, 2, 0, 3)), torch.stack([op(x) for x in stacked])
    )
    per_sample = torch.vmap(torch.func.grad(loss(op)))(stacked)
    torch.testing.assert_close(per_sample, torch.stack([torch.func.grad(loss(composite))(x) for x in stacked]))
    scales = torch.tensor([0.1, 0.2, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        torch.vmap(op)(stacked, scales), torch.stack([op(x, s) for x, s in zip(stacked, scales, strict=True)])
    )
    by_scale = [torch.vmap(torch.func.grad(lambda s, x, p=p: p(x, s).pow(2).sum())) for p in (op, composite)]
    torch.testing.assert_close(by_scale[0](scales, stacked), by_scale[1](scales, stacked))


def test_forward_mode_is_refused_not_wrong(make_op: MakeOp) -> None:
    """Both under no_grad, where a raw call would return a silent zero."""
    op, x = make_op(F64), random_input(5, 3, "bhk")
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(op, (x,), (torch.ones_like(x),))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
            op(dual)


def test_no_grad_under_vmap_is_right(make_op: MakeOp) -> None:
    op, stacked = make_op(F64), random_input(5, 3, "bhk", 8).view(4, 2, 5, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(op)(stacked), torch.stack([op(x) for x in stacked]))


def _variants(layout: str, requires_grad: bool) -> dict[str, Tensor]:
    x = random_input(5, 3, layout, 4, torch.float32)
    variants = {
        "contiguous": x,
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "inner transposed": x.mT.contiguous().mT,
        "expanded": x[:1].expand_as(x),
        "sliced": torch.stack([x, x], -1)[..., 0],
    }
    return {name: value.detach().requires_grad_(requires_grad) for name, value in variants.items()}


@pytest.mark.parametrize("variant", sorted(_variants("bhk", False)))
@pytest.mark.parametrize("spec", [PoolSpec(5, 3), PoolSpec(5, 3, "float32", "bkh", masked=True)], ids=lambda s: s.slug)
def test_opcheck(make_op: MakeOp, spec: PoolSpec, variant: str) -> None:
    op = make_op(spec)
    raw = getattr(torch.ops, op.namespace)
    x = _variants(spec.layout, True)[variant]
    mask = op.full_mask(x, None)
    torch.library.opcheck(raw.forward.default, (x, None, mask))
    torch.library.opcheck(raw.forward.default, (x, torch.tensor(0.3), mask))
    with torch.no_grad():
        state = op.backward_state(raw.forward(x, None, mask))
    g = torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(raw.backward.default, (g, x, None, mask, *state))


@pytest.mark.parametrize("variant", sorted(_variants("bhk", False)))
def test_strides_do_not_matter(make_op: MakeOp, variant: str) -> None:
    op = make_op(PoolSpec(5, 3))
    x = _variants("bhk", True)[variant]
    dense = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    for g in (torch.ones(1, 1).expand(4, 5), torch.randn(5, 4).mT):
        assert torch.equal(op(x), op(dense))
        (dx,) = torch.autograd.grad(op(x), x, g)
        assert torch.equal(dx, torch.autograd.grad(op(dense), dense, g.contiguous())[0])


def test_compile_fullgraph_forward_and_backward(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(5, 3, "float32", "bkh"))
    inner, outer = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)

    def model(x: Tensor) -> Tensor:
        return outer(op(inner(x)))

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (4, 5, 1):
        x = torch.randn(batch, 3, 5)
        results = []
        for function in (model, compiled):
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), (leaf, inner.weight))))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(eager, traced)


def test_empty_batch(make_op: MakeOp) -> None:
    x = torch.empty(0, 5, 3, dtype=torch.float64, requires_grad=True)
    out = make_op(F64)(x)
    assert out.shape == (0, 5)
    assert torch.autograd.grad(out.sum(), x)[0].shape == (0, 5, 3)


def test_items_are_independent_and_nan_stays_within_its_item(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(4, 8))
    x = torch.randn(2, 4, 8)
    clean = op(x)
    for bad in (math.nan, math.inf):
        x[0, 2, 3] = bad
        out = op(x)
        assert out[0].isnan().all()
        torch.testing.assert_close(out[1], clean[1], rtol=0, atol=0)


def test_masked_variates_may_hold_anything(make_op: MakeOp) -> None:
    op = make_op(PoolSpec(5, 3, masked=True))
    x = torch.randn(3, 5, 3)
    mask = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.uint8)
    g = torch.randn(3, 5)
    spoilt = torch.where(mask.bool()[:, :, None], x, math.nan).requires_grad_()
    leaf = x.clone().requires_grad_()
    out = op(spoilt, mask=mask)
    assert torch.equal(out, op(leaf, mask=mask))
    assert torch.equal(torch.autograd.grad(out, spoilt, g)[0], torch.autograd.grad(op(leaf, mask=mask), leaf, g)[0])
    assert not out[~mask.bool()].any()
    assert torch.equal(op(x), op(x, mask=torch.ones(3, 5, dtype=torch.bool)))


def test_scale(make_op: MakeOp) -> None:
    op, x = make_op(F64), random_input(5, 3, "bhk")
    torch.testing.assert_close(op(x, 1 / math.sqrt(3)), op(x))
    for scale in (0.0, -0.4, 2.5):
        torch.testing.assert_close(op(x, scale), composite(x, scale))
        torch.testing.assert_close(op(x, torch.tensor([scale])), composite(x, float(torch.tensor(scale))))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite"):
            op(x, bad)
    with pytest.raises(ValueError, match="expected one number"):
        op(x, torch.ones(2))


def test_attention_map(make_op: MakeOp) -> None:
    op, x = make_op(F64), random_input(5, 3, "bhk")
    a = op.attention_map(x)
    torch.testing.assert_close(a, torch.softmax(x @ x.mT / math.sqrt(3), -1))
    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(op.attention_map, (leaf[:1],))
    torch.testing.assert_close(op.attention_map(leaf).detach(), a)
    half = make_op(PoolSpec(5, 3, "float16")).attention_map(x.half())
    assert half.dtype == torch.float32


def test_log_sum_exp_is_that_of_the_plain_scores(make_op: MakeOp) -> None:
    x = 3 + random_input(5, 3, "bhk")
    _, lse = closed_form_attention(x, None, None)
    torch.testing.assert_close(lse, torch.logsumexp(x @ x.mT / math.sqrt(3), -1))


def test_module(make_op: MakeOp) -> None:
    op, x = make_op(F64), random_input(5, 3, "bhk")
    plain = _module(op)
    assert not plain.state_dict()
    torch.testing.assert_close(plain(x), op(x))
    torch.testing.assert_close(_module(op, scale=0.3)(x), op(x, 0.3))
    learned = _module(op, learn_scale=True)
    optimiser = torch.optim.SGD(learned.parameters(), lr=0.1)
    before = learned.scale.item()  # type: ignore[union-attr]
    learned(x).pow(2).sum().backward()
    optimiser.step()
    assert learned.scale.item() != before  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="must be finite"):
        _module(op, scale=math.nan)


def test_in_place_change_after_forward_raises(make_op: MakeOp) -> None:
    leaf = random_input(5, 3, "bhk").requires_grad_()
    x = leaf * 1
    out = make_op(F64)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice(make_op: MakeOp) -> None:
    x = random_input(5, 3, "bhk").requires_grad_()
    out = make_op(F64)(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), x)[0])


@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        ([[1.0]], None, TypeError, r"x is list; expected a torch.Tensor"),
        (torch.zeros(2, 3, 5), None, ValueError, r"shape \(2, 3, 5\); this op was made for \[B,H,K\] = \(B, 5, 3\)"),
        (torch.zeros(5, 4), None, ValueError, r"shape \(5, 4\)"),
        (torch.zeros(3), None, ValueError, r"shape \(3,\).*any leading axes or none in place of B"),
        (torch.zeros(2, 5, 3).double(), None, TypeError, r"torch.float64; this op was made for torch.float32"),
        (torch.zeros(2, 5, 3), torch.ones(2, 5, dtype=torch.bool), ValueError, r"takes no mask; .* --masked"),
    ],
)
def test_refusals(make_op: MakeOp, x: Tensor, mask: Tensor | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_op(PoolSpec(5, 3))(x, mask=mask)


def test_refusals_of_a_mask(make_op: MakeOp) -> None:
    op, x = make_op(PoolSpec(5, 3, masked=True)), torch.zeros(2, 5, 3)
    with pytest.raises(TypeError, match="mask is torch.float32; expected bool or uint8"):
        op(x, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"shape \(2, 4\) .*expected \(2, 5\)"):
        op(x, mask=torch.ones(2, 4, dtype=torch.bool))


def test_one_plan_for_every_batch(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    op = make_op(PoolSpec(5, 3))
    rows = [{"min_batch": 0, "forward": 0}, {"min_batch": 64, "forward": 1}, {"min_batch": 4096, "forward": 2}]
    monkeypatch.setattr(op, "_rows", rows)
    monkeypatch.setattr(op, "_starts", [row["min_batch"] for row in rows])
    assert [op._row(batch)["forward"] for batch in (1, 63, 64, 4095, 4096, 10**6)] == [0, 0, 1, 1, 2, 2]
    monkeypatch.setattr(op, "batch_invariant", True)
    assert {op._row(batch)["forward"] for batch in (1, 64, 10**6)} == {2}


def test_one_variate_far_from_the_others_switches_centring_off(make_op: MakeOp) -> None:
    """Centred on a mean that one large variate sets, the small ones would lose their digits: 3e-2 in dx."""
    x = torch.randn(2, 33, 8)
    x[:, 0] += 1e4
    x.requires_grad_()
    g, op = torch.randn(2, 33), make_op(PoolSpec(33, 8))
    truth = pool_ref(x, g)
    assert norm_error(torch.autograd.grad(op(x), x, g)[0], truth.dx) <= 5e-7
    small = torch.softmax(x.detach().double() @ x.detach().double().mT / math.sqrt(8), -1)[:, 1:, 1:]
    assert norm_error(op.attention_map(x.detach())[:, 1:, 1:], small) <= 1e-6


def test_a_copied_module_uses_the_same_op(make_op: MakeOp) -> None:
    op = make_op(F64)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).double(), _module(op))
    model.pool = op  # type: ignore[assignment]
    copied = copy.deepcopy(model)
    assert copied.pool is op
    x = random_input(5, 3, "bhk")
    torch.testing.assert_close(copied[1](x), op(x))


def test_backward_gets_no_zeros_for_the_state(make_op: MakeOp) -> None:
    """Materialised, they would be as large as the attention map, at every step."""
    seen: list[tuple[object, ...]] = []
    op, x = make_op(F64), random_input(5, 3, "bhk").requires_grad_()
    out = op(x)
    node = out.grad_fn
    assert node is not None
    node.register_prehook(lambda gradients: seen.append(gradients))
    out.sum().backward()
    assert [gradient is None for gradient in seen[0]] == [False, True, True]


@pytest.mark.parametrize(
    ("direction", "spoil", "error", "message"),
    [
        ("forward", {"x": torch.zeros(2, 5, 4)}, ValueError, "this op was made for"),
        ("forward", {"x": torch.zeros(2, 5, 3).double()}, TypeError, "torch.float64"),
        ("forward", {"scale": torch.tensor(0.5).double()}, TypeError, "scale is torch.float64; expected torch.float32"),
        ("forward", {"mask": None}, TypeError, "uint8 mask"),
        ("forward", {"mask": torch.ones(2, 4, dtype=torch.uint8)}, ValueError, "mask has shape"),
        ("backward", {"g": torch.zeros(2, 4)}, ValueError, r"g has shape \(2, 4\) .*expected \(2, 5\)"),
        ("backward", {"lse": torch.zeros(2, 5).double()}, TypeError, "lse is torch.float64"),
        ("backward", {"extra": None}, TypeError, "attn is missing"),
        ("backward", {"extra": torch.zeros(2, 5)}, ValueError, "attn has shape"),
    ],
)
def test_raw_ops_refuse_what_a_kernel_would_misread(
    make_op: MakeOp, direction: str, spoil: dict[str, Tensor | None], error: type[Exception], message: str
) -> None:
    op = make_op(PoolSpec(5, 3, masked=True))
    raw = getattr(torch.ops, op.namespace)
    forward = {"x": torch.randn(2, 5, 3), "scale": None, "mask": torch.ones(2, 5, dtype=torch.uint8)}
    state = dict(zip(("out", "lse", "extra"), op.backward_state(raw.forward(**forward)), strict=True))
    arguments = forward if direction == "forward" else {"g": torch.randn(2, 5), **forward, **state}
    getattr(raw, direction)(**arguments)
    with pytest.raises(error, match=message):
        getattr(raw, direction)(**arguments | spoil)
