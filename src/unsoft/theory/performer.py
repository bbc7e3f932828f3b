"""Sparsity of positive random features (Performer), exactly, for given directions and Gaussian keys."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.theory.arguments import Numbers, read_at_least, read_numbers


def performer_sparsity(
    query: Numbers, directions: Numbers, mean: Numbers = 0.0, sigma: Numbers = 1.0
) -> Tensor:
    """S of a = sum_r exp(w_r . q) exp(w_r . k - |k|^2/2), a linear attention, for keys k ~ N(mean, sigma^2 I).

    Both moments are Gaussian integrals over the key,

        E exp(w . k - c |k|^2 / 2) = v^(-D/2) exp((sigma^2 |w|^2 / 2 + w . mean - c |mean|^2 / 2) / v),   v =
        1 + c sigma^2,

    with w = w_r, c = 1 for the first and w = w_r + w_t, c = 2 for the second. ``query`` is (D,),
    ``directions`` (m, D). With many random directions S approaches softmax's exp(-sigma^2 |q|^2 / 2), slowly.
    It comes from above if keys are short (D sigma^2 below 1 or so); a single feature of long keys is a
    lognormal of its own, exp(w . k - |k|^2/2), and may be sharper than softmax, at the wrong keys.

    >>> directions = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> performer_sparsity([0.5, 0.0], directions[0])
    tensor(0.9..., dtype=torch.float64)
    """
    q, w = read_numbers("query", query), read_numbers("directions", directions)
    if q.ndim != 1 or w.ndim != 2 or w.shape[1] != len(q):
        raise ValueError(
            f"query, directions: expected shapes (D,) and (m, D), not {tuple(q.shape)} and {tuple(w.shape)}"
        )
    centre = read_numbers("mean", mean).expand(len(q))
    variance = read_at_least("sigma", sigma, 0.0).square()
    strength = w @ q
    first = torch.logsumexp(strength + _log_integral(w.square().sum(-1), w @ centre, centre, variance, 1), 0)
    squares = w.square().sum(-1)
    pair_squares = squares[:, None] + squares + 2 * w @ w.mT
    pair_means = (w @ centre)[:, None] + w @ centre
    pairs = strength[:, None] + strength + _log_integral(pair_squares, pair_means, centre, variance, 2)
    return torch.exp(first - torch.logsumexp(pairs.flatten(), 0) / 2)


def _log_integral(square: Tensor, product: Tensor, centre: Tensor, variance: Tensor, c: int) -> Tensor:
    """log E exp(w . k - c |k|^2 / 2), from |w|^2 and w . mean."""
    wider = 1 + c * variance
    exponent = variance * square / 2 + product - c * centre.square().sum() / 2
    return exponent / wider - len(centre) / 2 * wider.log()
