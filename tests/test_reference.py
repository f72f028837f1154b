from __future__ import annotations

import math

import pytest
import torch

from helpers import ORACLES, random_input
from invpool.reference import composite, composite_errors, norm_error, pool_ref


@pytest.mark.parametrize("name", sorted(ORACLES))
@pytest.mark.parametrize("layout", ["bhk", "bkh"])
def test_exact_oracles(name: str, layout: str) -> None:
    x, g, out, dx = (torch.tensor([values], dtype=torch.float64) for values in ORACLES[name])
    truth = pool_ref(x if layout == "bhk" else x.mT.contiguous(), g, layout)
    torch.testing.assert_close(truth.out, out, rtol=0, atol=1e-9)
    torch.testing.assert_close(truth.dx if layout == "bhk" else truth.dx.mT, dx, rtol=0, atol=1e-9)


def test_formula_of_the_gradient() -> None:
    """dx[i] = scale sum_j (dS[i,j] + dS[j,i]) x[j] + (1/K) sum_h g[h] a[h,i], written out in loops."""
    H, K = 4, 3
    x, g = random_input(H, K, "bhk", 1), torch.randn(1, H, dtype=torch.float64)
    rows, scale = x[0].tolist(), 1 / math.sqrt(K)
    score = [[scale * sum(a * b for a, b in zip(p, q, strict=True)) for q in rows] for p in rows]
    a = [[math.exp(s) / sum(map(math.exp, row)) for s in row] for row in score]
    m = [sum(row) / K for row in rows]
    out = [sum(a[h][j] * m[j] for j in range(H)) for h in range(H)]
    gh = g[0].tolist()
    dS = [[gh[h] * a[h][j] * (m[j] - out[h]) for j in range(H)] for h in range(H)]
    dx = [
        [
            scale * sum((dS[i][j] + dS[j][i]) * rows[j][k] for j in range(H))
            + sum(gh[h] * a[h][i] for h in range(H)) / K
            for k in range(K)
        ]
        for i in range(H)
    ]
    truth = pool_ref(x, g)
    torch.testing.assert_close(truth.out[0], torch.tensor(out, dtype=torch.float64), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(truth.dx[0], torch.tensor(dx, dtype=torch.float64), rtol=1e-13, atol=1e-14)


def test_the_truth_is_the_composite_where_float64_is_enough() -> None:
    x, g = random_input(21, 9, "bhk"), torch.randn(3, 21, dtype=torch.float64)
    out_error, dx_error = composite_errors(x, g, pool_ref(x, g))
    assert max(out_error, dx_error) < 1e-14
    assert norm_error(pool_ref(x, g).out, composite(x)) < 1e-14
    assert pool_ref(x, g).dx.norm() > 0.1  # the reference itself is not trivial


def test_masked_variates_are_seen_by_none() -> None:
    x, g = random_input(6, 4, "bhk"), torch.randn(3, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [1] * 6, [0] * 6], dtype=torch.bool)
    truth = pool_ref(x, g, mask=mask)
    kept = mask[0]
    alone = pool_ref(x[:1, kept], g[:1, kept])
    torch.testing.assert_close(truth.out[0, kept], alone.out[0])
    torch.testing.assert_close(truth.dx[0, kept], alone.dx[0])
    assert not truth.out[~mask].any()
    assert not truth.dx[~mask].any()
    torch.testing.assert_close(truth.out[1], pool_ref(x[1:2], g[1:2]).out[0])


def test_nan_is_an_error() -> None:
    assert not norm_error(torch.tensor([math.nan]), torch.ones(1, dtype=torch.float64)) <= 1.0
