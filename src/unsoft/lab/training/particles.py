"""Particles that sample a distribution together: each follows the gradients of all,
and is pushed away from the others.

Particles are the rows of ``places`` (particles, size), ``gradients`` those of the potential U = -log p at
each, and K a Gaussian kernel:

    svgd    g_i = 1/M sum_j (K_ij G_j - alpha K_ij (x_i - x_j) / h^2)               (Liu and Wang 2016)
    spos    the same + T G_i - sqrt(2 T / step) noise                 (Zhang et al. 2020, their 1 / beta is T)
    repel   G_i - alpha/M sum_j K_ij (x_i - x_j) / h^2: everyone's own gradient, and the push

A step of gradient descent along g_i with the given step size is the published update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

KINDS = ("svgd", "spos", "repel")
_APART = 1e-3  # of their size: how far particles are moved apart that lie in one place


def descent(
    places: Tensor,
    gradients: Tensor,
    kind: str = "svgd",
    *,
    alpha: float = 1.0,
    temperature: float = 1.0,
    step_size: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The direction that takes the place of the gradients, (particles, size).

    >>> pair = torch.tensor([[0.0], [0.1]])
    >>> descent(pair, torch.zeros(2, 1), "repel")          # gradient descent moves them apart
    tensor([[ 3.6620], [-3.6620]])
    """
    check_kind(kind)
    many = len(places)
    if many > 1:
        weights, bandwidth, places = _kernel(places, generator)
        push = (weights.sum(1, keepdim=True) * places - weights @ places) * (alpha / bandwidth / many)
        found = (gradients if kind == "repel" else weights @ gradients / many) - push
    else:
        found = gradients
    if kind == "spos":
        noise = _noise(places, generator)
        found = found + temperature * gradients - math.sqrt(2 * temperature / step_size) * noise
    return found


def check_kind(kind: str) -> None:
    """ValueError for a kind that there is not."""
    if kind not in KINDS:
        raise ValueError(f"repulse: 'kind' must be one of {', '.join(KINDS)}, not {kind!r}")


def _noise(places: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(places.shape, dtype=places.dtype, device=places.device, generator=generator)


def _kernel(places: Tensor, generator: torch.Generator | None) -> tuple[Tensor, float, Tensor]:
    """Kernel matrix, squared bandwidth by the median of squared distances between different particles,
    and the places.

    Published code takes the median of the whole matrix, whose diagonal is 0: with two particles that is no
    bandwidth at all. Particles in one and the same place have no direction to be pushed in, so they get a
    random one.
    """
    squares = _squares(places)
    different = ~torch.eye(len(places), dtype=torch.bool, device=places.device)
    if not bool(squares[different].all()):
        size = places.square().mean().sqrt()
        places = places + _APART * torch.where(size > 0, size, 1.0) * _noise(places, generator)
        squares = _squares(places)
    bandwidth = 0.5 * squares[different].median().item() / math.log(len(places) + 1)
    return torch.exp(-squares / (2 * bandwidth)), bandwidth, places


def _squares(places: Tensor) -> Tensor:
    # The usual shortcut over inner products cancels where particles are close,
    # which is where repulsion matters.
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist").square()
