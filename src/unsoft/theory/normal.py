"""Moments of a rectified normal variable, to full relative accuracy however rare the positive values are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TERMS = 400  # of the continued fraction, whose error at x = 1 is about exp(-2 sqrt(2 * terms)) = 3e-25
_POLYNOMIALS = {  # E max(r + e, 0)^k = P(r) Phi(r) + Q(r) phi(r): (power of r, coefficient) of P and of Q
    1: (((1, 1.0),), ((0, 1.0),)),
    2: (((2, 1.0), (0, 1.0)), ((1, 1.0),)),
    4: (((4, 1.0), (2, 6.0), (0, 3.0)), ((3, 1.0), (1, 5.0))),
}


def density(x: Tensor) -> Tensor:
    """phi, the density of the standard normal distribution."""
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def log_rectified_moment(k: int, beta: Tensor, gamma: Tensor) -> Tensor:
    """log of E max(s, 0)^k / (beta^2 + gamma^2)^(k/2) for s ~ N(beta, gamma^2), gamma > 0 and k = 1, 2, 4.

    For beta > -gamma it is the polynomial in beta / gamma that integration by parts gives. Below, that
    polynomial cancels, so the moment is phi(x) B_k with x = -beta / gamma and B_k = integral of u^k
    exp(-u^2/2 - u x) over u > 0, whose ratios B_k / B_(k-1) = k / (x + B_(k+1) / B_k) are a continued
    fraction of positive terms.

    >>> one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    >>> log_rectified_moment(2, zero, one).exp()
    tensor(0.5000, dtype=torch.float64)
    """
    size = torch.hypot(beta, gamma)
    cosine, sine = beta / size, gamma / size
    ratio = (beta / gamma).clamp(-1e4, 1e4)  # beyond 40, Phi and phi are 0 or 1 in float64
    whole, edge = _POLYNOMIALS[k]
    common = sum(c * cosine**p * sine ** (k - p) for p, c in whole)
    corner = sum(c * cosine**p * sine ** (k - p) for p, c in edge)
    direct = (common * torch.special.ndtr(ratio) + corner * density(ratio)).clamp(min=1e-300).log()
    x = (-beta / gamma).clamp(min=1.0)
    tail = torch.zeros_like(x)
    log_b = torch.special.erfcx(x / math.sqrt(2)).log() + math.log(math.pi / 2) / 2
    for term in range(_TERMS, 0, -1):
        tail = term / (x + tail)
        if term <= k:
            log_b = log_b + tail.log()
    rare = log_b - x.square() / 2 - math.log(2 * math.pi) / 2 - k / 2 * x.square().log1p()
    return torch.where(beta > -gamma, direct, rare)
