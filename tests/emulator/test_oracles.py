"""What is known without a reference: closed results, symmetries, and that both engines give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator.pools import GPU, default_choice, inputs, random_choice
from helpers import ORACLES, TENSOR_CORES
from invpool.algorithms import ALGORITHMS, find_algorithm
from invpool.emulator.pool import EmulatedPool
from invpool.spec import DTYPES, PoolSpec

pytestmark = pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))


def both(pool: EmulatedPool, x: Tensor, g: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    state = pool.forward(x, mask)
    return state["out"], pool.backward(x, g, state, mask)


def pool_of(algorithm: str, *spec) -> EmulatedPool:
    made = PoolSpec(*spec)
    return EmulatedPool(made, default_choice(made, algorithm))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_variate_gives_its_mean(algorithm: str, dtype: str) -> None:
    if not find_algorithm(algorithm).legal(PoolSpec(1, 4, dtype), GPU, "forward"):  # type: ignore[arg-type]
        assert algorithm in TENSOR_CORES
        assert dtype == "float64"
        return
    pool = pool_of(algorithm, 1, 4, dtype)
    x = torch.tensor([[[1.0, 2.0, 4.0, 9.0]], [[9.33, 9.33, 9.33, 9.33]]]).to(getattr(torch, dtype))
    g = torch.tensor([[8.0], [2.0]]).to(x.dtype)
    out, dx = both(pool, x, g)
    torch.testing.assert_close(out, x.mean(-1), rtol=torch.finfo(x.dtype).eps, atol=0)
    torch.testing.assert_close(dx, (g / 4)[:, :, None].expand_as(x), rtol=torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.01, -3.0, 100.0])
@pytest.mark.parametrize("layout", ["bhk", "bkh"])
def test_constant_input(algorithm: str, layout: str, value: float) -> None:
    H, K = 33, 4
    pool = pool_of(algorithm, H, K, "float32", layout)
    x = torch.full((2, H, K) if layout == "bhk" else (2, K, H), value)
    g = torch.randn(2, H, generator=torch.Generator().manual_seed(0))
    out, dx = both(pool, x, g)
    torch.testing.assert_close(out, torch.full((2, H), value), rtol=3e-7, atol=0)
    torch.testing.assert_close(dx, (g.sum(-1) / (H * K))[:, None, None].expand_as(x), rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_gets_the_mean_of_all(algorithm: str) -> None:
    pool = pool_of(algorithm, 17, 5)
    x = torch.randn(3, 17, 5, generator=torch.Generator().manual_seed(0))
    x[:, 6] = 0
    out = pool.forward(x)["out"]
    torch.testing.assert_close(out[:, 6], x.mean((1, 2)), rtol=1e-6, atol=1e-7)


def finest(algorithm: str) -> tuple[torch.dtype, float]:
    """The dtype of most digits that an algorithm takes, and how near it comes to what is written down here."""
    return (torch.float32, 3e-7) if algorithm in TENSOR_CORES else (torch.float64, 1e-10)


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_exact_oracles(algorithm: str, name: str) -> None:
    dtype, near = finest(algorithm)
    x, g, out, dx = (torch.tensor([values], dtype=torch.float64) for values in ORACLES[name])
    pool = pool_of(algorithm, x.shape[1], x.shape[2], str(dtype).removeprefix("torch."))
    got_out, got_dx = both(pool, x.to(dtype), g.to(dtype))
    torch.testing.assert_close(got_out.double(), out, rtol=near, atol=near)
    torch.testing.assert_close(got_dx.double(), dx, rtol=near, atol=near)


def test_permuting_variates_permutes_the_output(algorithm: str) -> None:
    pool = pool_of(algorithm, 33, 8)
    x, g, _ = inputs(pool.spec, "normal")
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    out, dx = both(pool, x, g)
    out_permuted, dx_permuted = both(pool, x[:, order].contiguous(), g[:, order].contiguous())
    torch.testing.assert_close(out_permuted, out[:, order], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx_permuted, dx[:, order], rtol=1e-5, atol=1e-6)


def test_an_item_does_not_see_its_batch(algorithm: str) -> None:
    pool = pool_of(algorithm, 31, 9)
    x, g, _ = inputs(pool.spec, "normal", items=4)
    out, dx = both(pool, x, g)
    for i in range(4):
        out_alone, dx_alone = both(pool, x[i : i + 1].contiguous(), g[i : i + 1].contiguous())
        assert torch.equal(out_alone[0], out[i])
        assert torch.equal(dx_alone[0], dx[i])


def test_what_forward_leaves_for_backward(algorithm: str) -> None:
    pool = pool_of(algorithm, 65, 6)
    x, _, _ = inputs(pool.spec, "large")
    state = pool.forward(x)
    if "attn" in state:
        torch.testing.assert_close(state["attn"].sum(-1), torch.ones(3, 65), rtol=1e-6, atol=0)
    scores = x.double() @ x.double().mT / 6**0.5
    torch.testing.assert_close(state["lse"].double(), torch.logsumexp(scores, -1), rtol=1e-6, atol=1e-5)


def test_a_masked_variate_is_as_good_as_absent(algorithm: str) -> None:
    H, K = 33, 7
    masked, few = pool_of(algorithm, H, K, "float32", "bhk", "exact", True), pool_of(algorithm, 20, K)
    x = torch.randn(2, 20, K, generator=torch.Generator().manual_seed(0))
    g = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    places = torch.randperm(H, generator=torch.Generator().manual_seed(2))[:20].sort().values
    wide, wide_g = torch.full((2, H, K), float("nan")), torch.full((2, H), float("nan"))
    mask = torch.zeros(2, H, dtype=torch.uint8)
    wide[:, places], wide_g[:, places], mask[:, places] = x, g, 1
    out, dx = both(few, x, g)
    wide_out, wide_dx = both(masked, wide, wide_g, mask)
    torch.testing.assert_close(wide_out[:, places], out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(wide_dx[:, places], dx, rtol=1e-5, atol=1e-6)
    absent = mask == 0
    assert (wide_out[absent] == 0).all()
    assert (wide_dx[absent] == 0).all()


@pytest.mark.parametrize(
    "spec", [PoolSpec(33, 17), PoolSpec(65, 40, "float16", "bkh", masked=True)], ids=lambda s: s.slug
)
@pytest.mark.parametrize("kind", ["normal", "shifted"])
def test_fibers_and_threads_give_the_same_bits(algorithm: str, spec: PoolSpec, kind: str) -> None:
    pool = EmulatedPool(spec, random_choice(spec, algorithm))
    x, g, mask = inputs(spec, kind)
    by_fibers = pool.forward(x, mask)
    by_threads = pool.forward(x, mask, engine="threads")
    for name, value in by_fibers.items():
        assert torch.equal(by_threads[name], value), name
    dx = pool.backward(x, g, by_fibers, mask)
    assert torch.equal(pool.backward(x, g, by_fibers, mask, engine="threads"), dx)


def test_both_ways_to_switch_fibers_give_the_same_bits(algorithm: str) -> None:
    pool = pool_of(algorithm, 33, 17)
    x, g, _ = inputs(pool.spec, "normal")
    out, dx = both(pool, x, g)
    out_portable, dx_portable = both(EmulatedPool(pool.spec, pool.choice, portable_switch=True), x, g)
    assert torch.equal(out_portable, out)
    assert torch.equal(dx_portable, dx)
