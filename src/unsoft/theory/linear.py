"""Sparsity of linear attention with non-negative features, and of plain decay (document 001)."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.theory.arguments import Numbers, read_at_least, read_numbers


def linear_sparsity(query: Numbers, mean: Numbers, covariance: Numbers) -> Tensor:
    """S = 1 / sqrt(1 + q' Sigma q / (q' mu)^2) of weights q . k >= 0, for keys of mean mu, covariance Sigma.

    Query and key are the non-negative features g(q), h(k). Exact for any distribution of the keys. ``query``
    and ``mean`` are (..., F), ``covariance`` is (..., F, F).

    >>> linear_sparsity([1.0, 0.0], [1.0, 1.0], [[3.0, 0.0], [0.0, 3.0]])
    tensor(0.5000, dtype=torch.float64)
    """
    q, mu, sigma = (
        read_numbers(n, x) for n, x in (("query", query), ("mean", mean), ("covariance", covariance))
    )
    width = q.shape[-1] if q.ndim else 0
    if not width or mu.shape[-1:] != (width,) or sigma.shape[-2:] != (width, width):
        raise ValueError(
            "query, mean, covariance: expected (..., F), (..., F) and (..., F, F),"
            f" not {tuple(q.shape)}, {tuple(mu.shape)} and {tuple(sigma.shape)}"
        )
    variance = torch.einsum("...i,...ij,...j->...", q, sigma, q)
    if (variance < 0).any():
        raise ValueError(f"covariance: q' Sigma q must not be negative, but is {variance.min():g}")
    return _from_noise(variance.sqrt(), (q * mu).sum(-1))


def iid_linear_sparsity(query: Numbers, mean: Numbers, deviation: Numbers) -> Tensor:
    """S = 1 / sqrt(1 + (sigma/mu)^2 (|q|_2 / |q|_1)^2) when the key features are independent and alike.

    |q|_2 / |q|_1 lies between 1/sqrt(F) (all features equal) and 1 (one feature), so S is never below 1 /
    sqrt(1 + (sigma/mu)^2), in any dimension: see :func:`iid_linear_floor`.

    >>> iid_linear_sparsity([1.0, 1.0, 1.0, 1.0], 1.0, 2.0)      # sigma/mu = 2, |q|_2/|q|_1 = 1/2
    tensor(0.7071, dtype=torch.float64)
    """
    q = read_at_least("query", query, 0.0)
    if not q.ndim:
        raise ValueError("query: expected features (..., F), not one number")
    mu, sigma = read_at_least("mean", mean, 0.0), read_at_least("deviation", deviation, 0.0)
    return _from_noise(sigma * q.norm(dim=-1), mu * q.sum(-1))


def iid_linear_floor(mean: Numbers, deviation: Numbers) -> Tensor:
    """The smallest S of :func:`iid_linear_sparsity` over all queries of any dimension: one feature only.

    >>> iid_linear_floor(1.0, 1.0)
    tensor(0.7071, dtype=torch.float64)
    """
    return _from_noise(read_at_least("deviation", deviation, 0.0), read_at_least("mean", mean, 0.0))


def decay_sparsity(length: Numbers, decay: Numbers) -> Tensor:
    """S of the weights 1, d, d^2, ... d^(n-1): sqrt[(1 - d^n) (1 + d) / (n (1 - d) (1 + d^n))]; 1 for d = 1.

    >>> decay_sparsity(3, 0.5)      # (1 + 1/2 + 1/4) / sqrt(3 (1 + 1/4 + 1/16))
    tensor(0.8819, dtype=torch.float64)
    """
    n, d = read_at_least("length", length, 1.0), read_numbers("decay", decay)
    if ((d <= 0) | (d > 1)).any():
        raise ValueError(
            f"decay: every value must lie in (0, 1], but one is {d[(d <= 0) | (d > 1)].flatten()[0]:g}"
        )
    if (n != n.round()).any():
        raise ValueError("length: expected whole numbers of keys")
    lost = 1 - d
    log_last = n * torch.log1p(-lost)
    # (1 - d^n) / (n (1 - d)); the powers of d near 1 must not be rounded before 1 is taken away
    mean = torch.where(lost == 0, 1.0, -torch.expm1(log_last) / (n * torch.where(lost == 0, 1.0, lost)))
    return (mean * (1 + d) / (1 + log_last.exp())).sqrt()


def _from_noise(deviation: Tensor, mean: Tensor) -> Tensor:
    """mean / sqrt(mean^2 + deviation^2); all weights 0 counts as 0, the limit of a mean that vanishes."""
    size = torch.hypot(mean, deviation)
    return torch.where(size == 0, 0.0, mean.abs() / torch.where(size == 0, 1.0, size))
