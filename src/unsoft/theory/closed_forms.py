r"""Sparsity in closed form, where one exists: S = E|f(s)| / sqrt(E f(s)^2) for logits s ~ N(beta, gamma^2).

r = beta / gamma throughout; phi and Phi are the density and the distribution function of the standard normal.

    exp        exp(-gamma^2 / 2)
    identity   [sqrt(2/pi) gamma exp(-r^2/2) + beta erf(r/sqrt 2)] / sqrt(beta^2 + gamma^2)
    relu       [r Phi + phi] / sqrt((r^2 + 1) Phi + r phi)
    relu2      [(r^2 + 1) Phi + r phi] / sqrt((r^4 + 6 r^2 + 3) Phi + (r^3 + 5 r) phi)
    cog        exp(-gamma^2/2) G(1) / sqrt(G(2))
               G(a) = Phi(a gamma + |r|) + exp(-2 a |beta|) Phi(a gamma - |r|)
    sinh       E|f| = exp(gamma^2/2) / 2
                      [exp(beta) erf((gamma + r)/sqrt 2) + exp(-beta) erf((gamma - r)/sqrt 2)]
               E f^2 = [exp(2 gamma^2) cosh(2 beta) - 1] / 2

exp, relu2 and identity are those of Su 2023 ("Can attention really focus?"), the others are derived here.
Anything that only rescales the row (a normaliser, an offset, 1/n) cancels, so softmax, softmax1 and l2 all
equal exp. The sigmoid has no closed form: E sigmoid(s) is the logistic-normal integral. The functions are
arranged so that nothing cancels or overflows; gamma must be above 0, but may be as small as 1e-100.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ROOT2 = math.sqrt(2)
_SMALL = 1e-3  # below this spread the difference of two error functions is taken from its Taylor series
_TERMS = 400  # of the continued fraction, whose error at x = 1 is about exp(-2 sqrt(2 * terms)) = 3e-25
_POLYNOMIALS = {  # E max(r + e, 0)^k = P(r) Phi(r) + Q(r) phi(r): (power of r, coefficient) of P and of Q
    1: (((1, 1.0),), ((0, 1.0),)),
    2: (((2, 1.0), (0, 1.0)), ((1, 1.0),)),
    4: (((4, 1.0), (2, 6.0), (0, 3.0)), ((3, 1.0), (1, 5.0))),
}


def exponential(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of softmax: exp(-gamma^2 / 2), independent of beta."""
    return torch.exp(-gamma.square() / 2)


def identity(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of the plain logit; even in beta, at least sqrt(2/pi)."""
    size, ratio = torch.hypot(beta, gamma), beta / gamma
    near = math.sqrt(2 / math.pi) * gamma / size * torch.exp(-ratio.square() / 2)
    return near + beta / size * torch.erf(ratio / _ROOT2)


def relu(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of max(s, 0)."""
    return torch.exp(log_rectified_moment(1, beta, gamma) - log_rectified_moment(2, beta, gamma) / 2)


def relu2(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of max(s, 0)^2."""
    return torch.exp(log_rectified_moment(2, beta, gamma) - log_rectified_moment(4, beta, gamma) / 2)


def cog(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of sign(s) exp(|s|); even in beta."""
    # By symmetry |beta| is enough. exp(|beta|) is divided out of G, so that no exponent is positive.
    beta, ratio = beta.abs(), beta.abs() / gamma

    def g(a: int) -> Tensor:
        near: Tensor = torch.special.ndtr(a * gamma + ratio)
        far: Tensor = torch.special.ndtr(a * gamma - ratio)
        return near + torch.exp(-2 * a * beta) * far

    return torch.exp(-gamma.square() / 2) * g(1) / g(2).sqrt()


def sinh(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return S of sinh(s); even in beta. Both moments are divided by their leading exponential."""
    # erf is exactly 1 from 6 on; the clamp keeps the ratio finite, since inf - inf below would be NaN.
    beta, ratio = beta.abs(), (beta.abs() / gamma).clamp(max=1e4)
    fading = torch.exp(-2 * beta)
    # E|f| is erf(gamma + r) + fading erf(gamma - r), up to sqrt 2 and the exponential. For small gamma and
    # beta the two terms cancel, so they are taken as (1 + fading) times the difference of erf around r, which
    # has a series, plus (1 - fading) times the sum, where 1 - fading is an expm1.
    difference = _erf_around(ratio / _ROOT2, gamma / _ROOT2)
    both = torch.erf((ratio + gamma) / _ROOT2) + torch.erf((ratio - gamma) / _ROOT2)
    first = ((1 + fading) * difference - torch.expm1(-2 * beta) * both) / 4
    # exp(2 gamma^2) cosh(2 beta) - 1 cancels as well: one part vanishes with gamma, the other with beta.
    spread = -torch.expm1(-2 * gamma.square()) * (1 + fading.square()) / 4
    second = spread + torch.exp(-2 * gamma.square()) * (torch.expm1(-2 * beta) / 2).square()
    return torch.exp(-gamma.square() / 2) * first / second.sqrt()


def _erf_around(x: Tensor, h: Tensor) -> Tensor:
    """Return erf(x + h) - erf(x - h)."""
    slope = 2 * _ROOT2 * density(_ROOT2 * x)  # of erf
    # For h < 1e-3 the next term of the series is below 1e-13 of the first.
    series = 2 * h * slope * (1 + h.square() * (2 * x.square() - 1) / 3)
    return torch.where(h < _SMALL, series, torch.erf(x + h) - torch.erf(x - h))


def density(x: Tensor) -> Tensor:
    """Return phi, the density of the standard normal distribution."""
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def log_rectified_moment(k: int, beta: Tensor, gamma: Tensor) -> Tensor:
    """Return log of E max(s, 0)^k / (beta^2 + gamma^2)^(k/2) for s ~ N(beta, gamma^2) and k = 1, 2, 4.

    gamma is above 0. For beta > -gamma the moment is a polynomial in beta / gamma, by integration by parts.
    For smaller beta its terms cancel, so the moment is computed as phi(x) B_k with x = -beta / gamma and
    B_k = integral of u^k exp(-u^2/2 - u x) over u > 0. The ratios B_k / B_(k-1) = k / (x + B_(k+1) / B_k) are
    a continued fraction of positive terms.

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
    # For beta far below 0 this underflows to 0, and the branch is not taken; the clamp keeps its log finite.
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


CLOSED_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("exp", "softmax", "softmax1", "l2"), exponential),
    **dict.fromkeys(("identity", "linear-identity"), identity),
    "relu": relu,
    "relu2": relu2,
    "cog": cog,
    "sinh": sinh,
}
