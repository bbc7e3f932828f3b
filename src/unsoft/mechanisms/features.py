"""Feature maps of linear attention: functions of one query or key, whose dot products are the weights.

A map gets x (..., length, D), already scaled so that the dot product of a query and a key is the logit, and returns features
(..., length, F), or their logarithms where features are exponentials: the engine takes maxima out where they cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relu(x: Tensor) -> Tensor:
    return x.relu()


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive everywhere (Katharopoulos et al., arXiv 2006.16236)."""
    return torch.nn.functional.elu(x) + 1


def elu1_of_query(x: Tensor) -> Tensor:
    """:func:`elu1`, where a row of negative numbers only, whose features are exp(x), has the largest brought to 1.

    Normalising undoes that, and a row below -87 does not vanish in float32.

    >>> elu1_of_query(torch.tensor([[1.0, -200.0], [-200.0, -200.0]]))
    tensor([[2., 0.],
            [1., 1.]])
    """
    below = x.detach().amax(-1, keepdim=True).clamp(max=0)
    return torch.where(x > 0, x + 1, (x.clamp(max=0) - below).clamp(max=0).exp())


def identity(x: Tensor) -> Tensor:
    return x


def taylor2(x: Tensor) -> Tensor:
    """1 + s + s^2 / 2, the second-order Taylor polynomial of exp(s), as a dot product: F = 1 + D + D^2."""
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)


def log_positive_random(x: Tensor, directions: Tensor) -> Tensor:
    """w . x - |x|^2 / 2 for random directions w: logarithms of unbiased features of exp(s) (Performer, arXiv 2009.14794)."""
    return x @ directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def orthogonal_directions(count: int, width: int, seed: int) -> Tensor:
    """``count`` random directions, orthogonal in groups of ``width``, with the lengths of Gaussian vectors."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-count // width)):
        orthogonal, triangle = torch.linalg.qr(
            torch.randn(width, width, generator=generator, dtype=torch.float64)
        )
        orthogonal = (
            orthogonal * triangle.diagonal().sign()
        )  # without this, QR prefers some signs: a biased estimate
        lengths = torch.randn(width, width, generator=generator, dtype=torch.float64).norm(dim=1)
        blocks.append(orthogonal * lengths[:, None])
    return torch.cat(blocks)[:count].float()
