"""Moments of |f(s)| for a random logit, by adaptive Gauss-Legendre quadrature of many (beta, gamma) at once.

The integrand is |f(beta + gamma e)|^p rho(e), rho being the density of a standard normal, or of the first
coordinate of a random point on the sphere of radius sqrt(d). It is kept as a logarithm and scaled by its
largest value, so that the size of f does not matter. Every panel is compared with its two halves, and halved
until they agree; panels start at the kinks of f.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_FAR = 1000.0  # end of the range of integration, in units of gamma from the mean
_NODES = 16
_TOLERANCE = 1e-11  # of a moment: largest difference of a panel from its halves, which are far more exact
_ROUNDS = 60
_POSSIBLE = 38.0  # beyond, the normal density is 0 in float64
_NEGLIGIBLE = 60.0  # exp(-60) of the largest value


def log_moments(
    log_size: Callable[[Tensor], Tensor],
    beta: Tensor,
    gamma: Tensor,
    powers: tuple[int, ...],
    breaks: Tensor,
    dim: int | None = None,
) -> Tensor:
    """Return log E|f(s)|^p for each power (first dimension) and each point of the vectors beta, gamma.

    ``log_size`` maps logits to log|f|; ``breaks`` are logits at which panels must end.

    >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> log_moments(lambda s: s, zero, one, (1, 2), zero).squeeze()         # f = exp: p^2 / 2
    tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    power = torch.tensor(powers, dtype=torch.float64)[:, None, None]
    edges = _edges(beta, gamma, breaks, dim)
    left, right = edges[:, :-1].flatten(), edges[:, 1:].flatten()
    owner = torch.arange(len(beta)).repeat_interleave(edges.shape[1] - 1)
    keep = right > left
    left, right, owner = left[keep], right[keep], owner[keep]

    def logs(left: Tensor, right: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Return logarithms of the integrands (powers, panels, nodes), and the weights of the nodes."""
        nodes, weights = gauss_legendre()
        half = (right - left)[:, None] / 2
        e = left[:, None] + half * (1 + nodes)
        return integrands(e, beta[owner, None] + gamma[owner, None] * e), half * weights

    def integrands(e: Tensor, logits: Tensor) -> Tensor:
        size = log_size(logits)
        _reject_nan(size, e, logits)
        return power * size.nan_to_num(nan=-math.inf, neginf=-math.inf) + _log_density(e, dim)

    def integrals(left: Tensor, right: Tensor, owner: Tensor) -> Tensor:
        log, weights = logs(left, right, owner)
        return ((log - top[:, owner, None]).exp() * weights).sum(-1)

    log, weights = logs(left, right, owner)
    top = _largest(log.amax(-1), owner, len(beta))
    if dim is None:
        far = beta.new_tensor([-_FAR, _FAR])
        edge = integrands(far, beta[:, None] + gamma[:, None] * far).amax(-1)
        _reject_infinite(edge - top, powers, beta, gamma)
    # Each moment is scaled by its largest integrand, or exp(s)^4 at gamma = 30 would overflow.
    whole = ((log - top[:, owner, None]).exp() * weights).sum(-1)
    settled = torch.zeros(len(powers), len(beta), dtype=torch.float64)
    for _ in range(_ROUNDS):
        middle = (left + right) / 2
        halves = integrals(left, middle, owner), integrals(middle, right, owner)
        total = settled.index_add(1, owner, halves[0] + halves[1])
        wrong = (whole - halves[0] - halves[1]).abs() > _TOLERANCE * total[:, owner]
        open_ = wrong.any(0) & (middle > left) & (middle < right)
        settled = settled.index_add(1, owner[~open_], (halves[0] + halves[1])[:, ~open_])
        if not open_.any():
            return settled.log() + top
        left, right = torch.cat([left[open_], middle[open_]]), torch.cat([middle[open_], right[open_]])
        owner = owner[open_].repeat(2)
        whole = torch.cat([halves[0][:, open_], halves[1][:, open_]], dim=1)
    return settled.index_add(1, owner, whole).log() + top


@lru_cache(maxsize=1)
def gauss_legendre() -> tuple[Tensor, Tensor]:
    """Return nodes in (-1, 1) and weights, from eigenvalues and eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, _NODES, dtype=torch.float64)
    beside = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    return nodes, 2 * vectors[0].square()


def _edges(beta: Tensor, gamma: Tensor, breaks: Tensor, dim: int | None) -> Tensor:
    """Return ends of the first panels of each point, in units of gamma around beta: width 1, then growing."""
    far = _FAR if dim is None else math.sqrt(dim)
    outer = torch.cat(
        [torch.arange(0, 8, dtype=torch.float64), 8 * 1.35 ** torch.arange(0, 17, dtype=torch.float64)]
    )
    outer = torch.cat([outer[outer < far], torch.tensor([far], dtype=torch.float64)])
    # The formula varies on the scale of the logit, independent of gamma.
    scale = torch.tensor([-20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0], dtype=torch.float64)
    inner = (torch.cat([breaks, scale]) - beta[:, None]) / gamma[:, None]
    fixed = torch.cat([-outer.flip(0), outer[1:]]).expand(len(beta), -1)
    return torch.cat([fixed, inner.clamp(-far, far)], dim=1).sort(dim=1).values


def _log_density(e: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return -e.square() / 2 - math.log(2 * math.pi) / 2
    scale = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi * dim) / 2
    # e^2 / dim may round to 1 at the poles, where log1p(-1) is -inf, and 0 * -inf at dim = 3 would be NaN.
    inside = (-e.square() / dim).clamp(min=-1 + torch.finfo(e.dtype).eps / 2)
    return scale + (dim - 3) / 2 * inside.log1p()


def _reject_nan(size: Tensor, e: Tensor, logits: Tensor) -> None:
    bad = size.isnan() & (e.abs() < _POSSIBLE)
    if bad.any():
        raise ValueError(
            f"formula: the weight is not a number at the logit {logits[bad][0]:.4g}, which can occur; guard"
            " it with where(condition, a, b)"
        )


def _reject_infinite(edge: Tensor, powers: tuple[int, ...], beta: Tensor, gamma: Tensor) -> None:
    """Raise ValueError unless ``edge``, the log integrand at both ends minus its maximum, is negligible."""
    bad = (edge > -_NEGLIGIBLE) & (edge > -math.inf)
    if bad.any():
        p, k = bad.nonzero()[0].tolist()
        raise ValueError(
            f"formula: E|weight|^{powers[p]} at beta = {beta[k]:g}, gamma = {gamma[k]:g} is infinite, or"
            f" comes from logits more than {_FAR:g} gamma away; the weight grows too fast for Gaussian logits"
        )


def _largest(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Return the largest value of each owner; 0 where all are -inf, so that nothing becomes NaN."""
    start = torch.full((len(values), count), -math.inf, dtype=torch.float64)
    top = start.scatter_reduce(1, owner.expand(len(values), -1), values, "amax")
    return torch.where(top == -math.inf, 0.0, top)
