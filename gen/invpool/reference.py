"""The truth that every check is held against: float64 by autograd, and the composite a user would write.

Nothing here is shared with the run time's closed form: the two would otherwise agree on a mistake.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


def composite(x: Tensor, scale: Tensor | float | None = None, mask: Tensor | None = None) -> Tensor:
    """``out[B,H]`` of variate-major ``x[B,H,K]`` as a user would write it in PyTorch, in x's dtype.

    s[h,j] = scale <x_h, x_j>, a = softmax_j(s), out[h] = mean_k (a x)[h,k]; scale is 1/sqrt(K) unless given.
    mask[B,H] is true where a variate takes part; where it is not, out is 0.
    """
    return _pool(x, x, scale, mask)


def _pool(x: Tensor, keys: Tensor, scale: Tensor | float | None, mask: Tensor | None) -> Tensor:
    """The composite with ``keys`` in place of x_j, both where it is scored and where it is pooled."""
    factor = 1.0 / math.sqrt(x.shape[-1]) if scale is None else scale
    scores = x @ keys.mT * factor
    if mask is not None:
        # An item of which nothing takes part keeps its scores: softmax over nothing is NaN.
        hidden = ~mask.bool()[:, None, :] & mask.bool().any(-1)[:, None, None]
        scores = scores.masked_fill(hidden, -math.inf)
    out = (torch.softmax(scores, -1) @ keys).mean(-1)
    return out if mask is None else out.masked_fill(~mask.bool(), 0.0)


@dataclasses.dataclass(frozen=True)
class Truth:
    """out[B,H] and dx, shaped like x, both float64."""

    out: Tensor
    dx: Tensor


def pool_ref(
    x: Tensor, g: Tensor, layout: str = "bhk", scale: float | None = None, mask: Tensor | None = None
) -> Truth:
    """Forward and gradient in float64, by autograd through :func:`composite`.

    The keys are centred: softmax over j is blind to what all keys have in common, and pooling gives it back
    whole; in float64 the scores and means of 100 +- 0.05 would otherwise leave the truth wrong by 1e-11.

    Args:
        x: ``[B,H,K]`` or ``[B,K,H]`` by ``layout``, any float dtype, rounded already.
        g: upstream gradient ``[B,H]``.
    """
    leaf = x.detach().double().requires_grad_()
    seen = leaf if layout == "bhk" else leaf.mT
    centre = seen.detach().mean(1, keepdim=True)
    out = _pool(seen, seen - centre, scale, mask)
    shift = centre.mean(-1).expand_as(out)
    out = out + (shift if mask is None else shift.masked_fill(~mask.bool(), 0.0))
    (dx,) = torch.autograd.grad(out, leaf, g.double())
    return Truth(out.detach(), dx)


def composite_errors(
    x: Tensor, g: Tensor, truth: Truth, layout: str = "bhk", mask: Tensor | None = None
) -> tuple[float, float]:
    """Norm errors of out and dx of the same-dtype composite on x's device: what a user has today."""
    leaf = x.detach().requires_grad_()
    out = composite(leaf if layout == "bhk" else leaf.mT, None, mask)
    (dx,) = torch.autograd.grad(out, leaf, g)
    return norm_error(out.detach(), truth.out), norm_error(dx, truth.dx)


def norm_error(got: Tensor, truth: Tensor) -> float:
    """``||got - truth|| / ||truth||`` over the whole tensor, in float64; NaN if anything is."""
    difference = float(torch.linalg.vector_norm(got.double() - truth))
    size = float(torch.linalg.vector_norm(truth))
    return difference / size if size else difference
