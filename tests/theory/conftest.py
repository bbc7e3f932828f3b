"""Thirty-digit moments by Gauss-Legendre panels in mpmath: nothing in common with unsoft.theory."""

from dataclasses import dataclass
from functools import lru_cache

import mpmath
import pytest
from mpmath import mp, mpf

LOGITS = (-20, -5, -2, -1, 1, 2, 5, 20)  # the scale of f itself, when gamma is large
DIGITS, REACH, WIDEST = (
    34,
    13,
    4,
)  # exp(-13^2 / 2) is 2e-37; 24 nodes on a width of 4 give a Gaussian to 1e-30


@lru_cache(maxsize=1)
def nodes():
    with mp.workdps(DIGITS):
        return mpmath.calculus.quadrature.GaussLegendre(mp).calc_nodes(4, mp.prec)  # 24 of them


def panels(edge, mode):
    """From a corner at ``edge`` outwards past ``mode``: fine at the corner, where a far mode is steep."""
    stop = max(edge, mode) + REACH
    start = max(edge, mode - REACH)
    width = mpf(1) / (1 + abs(mode - start)) if start == edge else mpf(WIDEST)
    while start < stop:
        yield start, start + width
        start, width = start + width, min(2 * width, mpf(WIDEST))


def half_line(beta, gamma, mode, integrands):
    """Integrals over s > 0 of each integrand(s) times the density of s ~ N(beta, gamma^2)."""
    ratio = beta / gamma
    sums = [mpf(0)] * len(integrands)
    for left, right in panels(mpf(0), mode + ratio):  # in u = s / gamma
        half = (right - left) / 2
        for x, w in nodes():
            u = left + half * (1 + x)
            weight = half * w * mp.exp(-((u - ratio) ** 2) / 2)
            for k, f in enumerate(integrands):
                sums[k] += weight * f(gamma * u)
    return [total / mp.sqrt(2 * mp.pi) for total in sums]


@dataclass
class Reference:
    """S by integration, on both sides of the corner at s = 0."""

    def powers(self, beta, gamma):
        """S of relu, relu2 and identity."""
        with mp.workdps(DIGITS):
            beta, gamma = mpf(beta), mpf(gamma)
            one, two, four = half_line(beta, gamma, mpf(0), [lambda s: s, lambda s: s * s, lambda s: s**4])
            (left,) = half_line(-beta, gamma, mpf(0), [lambda s: s])
            return {
                "relu": one / mp.sqrt(two),
                "relu2": two / mp.sqrt(four),
                "identity": (one + left) / mp.sqrt(beta**2 + gamma**2),
            }

    def exponentials(self, beta, gamma):
        """S of cog, sinh and exp."""
        with mp.workdps(DIGITS):
            beta, gamma = mpf(beta), mpf(gamma)
            moments = []
            for p in (1, 2):
                functions = [
                    lambda s, p=p: mp.exp(p * s),
                    lambda s, p=p: mp.sinh(s) ** p,
                    lambda s, p=p: mp.exp(-p * s),
                ]
                right = half_line(beta, gamma, p * gamma, functions[:2])
                left = half_line(-beta, gamma, p * gamma, functions[:2])
                # exp(s) below 0 peaks elsewhere: exp(-p s) on the mirrored half line
                (below,) = half_line(-beta, gamma, -p * gamma, functions[2:])
                moments.append((right[0] + left[0], right[1] + left[1], right[0] + below))
            return {
                name: first / mp.sqrt(second)
                for name, first, second in zip(("cog", "sinh", "exp"), *moments, strict=True)
            }

    def any(self, f, beta, gamma, corners=(), modes=((0,), (0,))):
        """S of any f by mpmath's own quad, split at corners (logits) and around the peaks of both moments."""
        with mp.workdps(30):
            beta, gamma = mpf(beta), mpf(gamma)
            cuts = [(mpf(c) - beta) / gamma for c in (*corners, *LOGITS)]
            sums = []
            for p, peaks in zip((1, 2), modes, strict=True):
                low, high = min(peaks) - REACH, max(peaks) + REACH
                inner = sorted(
                    c for c in [*cuts, *map(mpf, range(int(low) + 1, int(high), 2))] if low < c < high
                )

                def integrand(e, p=p):
                    return abs(f(beta + gamma * e)) ** p * mp.exp(-e * e / 2)

                sums.append(mp.quad(integrand, [low, *inner, high]) / mp.sqrt(2 * mp.pi))
            return sums[0] / mp.sqrt(sums[1])


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
