"""Rank of linear attention: low for a full matrix, full for a causal one (document 001)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.theory.arguments import read_numbers


class Ranks(NamedTuple):
    """Of the matrix q_i . k_j: its length, the numeric ranks of all of it and of its lower triangle, and more."""

    length: int
    full: int
    causal: int
    smallest: float
    """Smallest singular value of the lower triangle, of the largest."""
    effective: float
    """exp(entropy) of the lower triangle's normalised singular values: how many directions carry weight."""


def ranks(query_features: Tensor, key_features: Tensor) -> Ranks:
    """Ranks of the attention matrix of non-negative features (length, F), bidirectional and causal.

    The full matrix is a product of (length, F) and (F, length), so its rank is at most F. The causal one is
    triangular with the diagonal q_i . k_i: if no entry of that is 0, its determinant is not 0 and its rank is
    the length. So a low rank cannot be what holds causal linear attention back.

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
    share = values / values.sum().clamp(min=1e-300)
    return Ranks(
        len(q),
        int(torch.linalg.matrix_rank(weights)),
        int(torch.linalg.matrix_rank(weights.tril())),
        float(values[-1] / values[0].clamp(min=1e-300)),
        float(torch.special.entr(share).sum().exp()),
    )
