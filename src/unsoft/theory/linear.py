"""Linear attention: its sparsity for non-negative and for random features, that of plain decay (Su 2023),
and its rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.theory.arguments import Numbers, read_at_least, read_numbers


def linear_sparsity(query: Numbers, mean: Numbers, covariance: Numbers) -> Tensor:
    """Return S = 1 / sqrt(1 + q' Sigma q / (q' mu)^2) of weights q . k >= 0.

    The keys have the mean mu and the covariance Sigma.

    Query and key are the non-negative features g(q), h(k). This is exact for any distribution of the keys.
    ``query`` and ``mean`` are (..., F), ``covariance`` is (..., F, F).

    >>> linear_sparsity([1.0, 0.0], [1.0, 1.0], [[3.0, 0.0], [0.0, 3.0]])
    tensor(0.5000, dtype=torch.float64)
    """
    q, mu = read_numbers("query", query), read_numbers("mean", mean)
    sigma = read_numbers("covariance", covariance)
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
    """Return S = 1 / sqrt(1 + (sigma/mu)^2 (|q|_2 / |q|_1)^2) for iid key features.

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
    """Return the smallest S of :func:`iid_linear_sparsity` over queries of any dimension: one feature only.

    >>> iid_linear_floor(1.0, 1.0)
    tensor(0.7071, dtype=torch.float64)
    """
    return _from_noise(read_at_least("deviation", deviation, 0.0), read_at_least("mean", mean, 0.0))


def decay_sparsity(length: Numbers, decay: Numbers) -> Tensor:
    """Return S of the weights 1, d, ... d^(n-1): sqrt[(1 - d^n) (1 + d) / (n (1 - d) (1 + d^n))]; 1 if d = 1.

    >>> decay_sparsity(3, 0.5)      # (1 + 1/2 + 1/4) / sqrt(3 (1 + 1/4 + 1/16))
    tensor(0.8819, dtype=torch.float64)
    """
    n, d = _read_decay(length, decay)
    lost = 1 - d
    log_last = n * torch.log1p(-lost)
    # (1 - d^n) / (n (1 - d)); expm1, because a power of d near 1 loses its digits when 1 is subtracted
    mean = torch.where(lost == 0, 1.0, -torch.expm1(log_last) / (n * torch.where(lost == 0, 1.0, lost)))
    return (mean * (1 + d) / (1 + log_last.exp())).sqrt()


def decay_bound(length: Numbers, decay: Numbers) -> Tensor:
    """Return the upper bound of :func:`decay_sparsity` in Su 2023: sqrt[(1 + d) / (n (1 - d) (1 + d^n))].

    It leaves out the factor sqrt(1 - d^n) < 1, so S is below it, and the ratio of the two tends to 1 as n
    grows. Without the factor 1 + d^n the bound would be up to sqrt(2) times as large. Infinite if d = 1.

    >>> decay_bound(3, 0.5)      # sqrt(3/2 / (3 * 1/2 * 9/8)); S is 0.8819
    tensor(0.9428, dtype=torch.float64)
    """
    n, d = _read_decay(length, decay)
    return ((1 + d) / (n * (1 - d) * (1 + d**n))).sqrt()


def _read_decay(length: Numbers, decay: Numbers) -> tuple[Tensor, Tensor]:
    n, d = read_at_least("length", length, 1.0), read_numbers("decay", decay)
    outside = d[(d <= 0) | (d > 1)]
    if outside.numel():
        raise ValueError(f"decay: every value must lie in (0, 1], but one is {outside[0]:g}")
    if (n != n.round()).any():
        raise ValueError("length: expected whole numbers of keys")
    return n, d


def _from_noise(deviation: Tensor, mean: Tensor) -> Tensor:
    """Return mean / sqrt(mean^2 + deviation^2); 0 if all weights are 0, the limit of a vanishing mean."""
    size = torch.hypot(mean, deviation)  # the squares themselves could overflow or underflow
    return torch.where(size == 0, 0.0, mean.abs() / torch.where(size == 0, 1.0, size))


def performer_sparsity(
    query: Numbers, directions: Numbers, mean: Numbers = 0.0, sigma: Numbers = 1.0
) -> Tensor:
    """Return S of the linear attention a = sum_r exp(w_r . q) exp(w_r . k - |k|^2/2).

    Keys are k ~ N(mean, sigma^2 I).

    Both moments are Gaussian integrals over the key,

        E exp(w . k - c |k|^2 / 2) = v^(-D/2) exp((sigma^2 |w|^2 / 2 + w . mean - c |mean|^2 / 2) / v)

    with v = 1 + c sigma^2, w = w_r, c = 1 for the first and w = w_r + w_t, c = 2 for the second.
    ``query`` is (D,), ``directions`` (m, D). With many random directions S approaches softmax's
    exp(-sigma^2 |q|^2 / 2), slowly: from above if keys are short (D sigma^2 below 1 or so). A single feature
    of long keys is a lognormal, exp(w . k - |k|^2/2), and may be sharper than softmax, at the wrong keys.

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
    strength, squares, means = w @ q, w.square().sum(-1), w @ centre
    first = torch.logsumexp(strength + _log_integral(squares, means, centre, variance, 1), 0)
    pair_squares = squares[:, None] + squares + 2 * w @ w.mT
    pair_means = means[:, None] + means
    pairs = strength[:, None] + strength + _log_integral(pair_squares, pair_means, centre, variance, 2)
    return torch.exp(first - torch.logsumexp(pairs.flatten(), 0) / 2)


def _log_integral(square: Tensor, product: Tensor, centre: Tensor, variance: Tensor, c: int) -> Tensor:
    """Return log E exp(w . k - c |k|^2 / 2), from |w|^2 and w . mean."""
    wider = 1 + c * variance
    exponent = variance * square / 2 + product - c * centre.square().sum() / 2
    return exponent / wider - len(centre) / 2 * wider.log()


class Ranks(NamedTuple):
    """Ranks of the matrix q_i . k_j."""

    length: int
    full: int
    """Numerical rank of the whole matrix."""
    causal: int
    """Numerical rank of its lower triangle."""
    smallest: float
    """Smallest singular value of the lower triangle, relative to the largest."""
    effective: float
    """exp(entropy) of the lower triangle's normalised singular values: how many directions carry weight."""


def ranks(query_features: Tensor, key_features: Tensor) -> Ranks:
    """Return the ranks of the attention matrix of non-negative features (length, F), full and causal.

    The full matrix is a product of (length, F) and (F, length), so its rank is at most F. The causal one is
    triangular with the diagonal q_i . k_i: if no entry of that is 0, its determinant is not 0 and its rank is
    the length. So a low rank cannot be what limits causal linear attention.

    >>> q, k = torch.rand(2, 64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> ranks(q, k)[:3]
    (64, 4, 64)
    """
    q, k = read_numbers("query_features", query_features), read_numbers("key_features", key_features)
    if q.ndim != 2 or q.shape != k.shape or not q.numel():
        raise ValueError(
            "query_features, key_features: expected one shape (length, F),"
            f" not {tuple(q.shape)} and {tuple(k.shape)}"
        )
    weights = q @ k.mT
    values = torch.linalg.svdvals(weights.tril())
    share = values / values.sum().clamp(min=1e-300)  # a matrix of zeros has rank 0, not NaN
    return Ranks(
        len(q),
        int(torch.linalg.matrix_rank(weights)),
        int(torch.linalg.matrix_rank(weights.tril())),
        float(values[-1] / values[0].clamp(min=1e-300)),
        float(torch.special.entr(share).sum().exp()),
    )
