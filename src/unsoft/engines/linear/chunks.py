"""Tokens of linear attention cut into chunks, and back; query heads that share a key head are stacked as
rows."""

import torch
from torch import Tensor


def chunk_size(width: int) -> int:
    """Return the tokens per chunk. Work inside chunks grows with it, the number of states shrinks; both are
    balanced near the feature width."""
    return min(max(1 << (width - 1).bit_length(), 64), 512)


def cut(x: Tensor, size: int, shared: int | None = None, filler: float = 0.0) -> Tensor:
    """Return (B, heads, L, F) as (B, shared, chunks, group * size, F), the last chunk padded; without
    ``shared`` there is no group.

    >>> cut(torch.arange(6.0).view(1, 2, 3, 1), size=2, shared=1).flatten(3)  # two heads, two chunks
    tensor([[[[0., 1., 3., 4.],
              [2., 0., 5., 0.]]]])
    """
    batch, heads, length, width = x.shape
    shared = heads if shared is None else shared
    chunks = -(-length // size)
    x = padded(x, chunks * size, filler).reshape(batch, shared, heads // shared, chunks, size, width)
    return x.transpose(2, 3).flatten(3, 4)


def in_order(x: Tensor, group: int, length: int) -> Tensor:
    """Undo :func:`cut`: return (B, shared, chunks, group * size, X) as (B, heads, length, X)."""
    return (
        x.reshape(*x.shape[:3], group, -1, x.shape[4])
        .transpose(2, 3)
        .flatten(3, 4)
        .flatten(1, 2)[:, :, :length]
    )


def padded(x: Tensor, length: int, filler: float = 0.0) -> Tensor:
    missing = length - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing), value=filler) if missing > 0 else x


def by_group(q: Tensor, shared: int) -> Tensor:
    """Return (B, H, L, F) as (B, Hk, G L, F): query heads that share a key head are stacked as rows."""
    batch, heads, length, width = q.shape
    return q if heads == shared else q.reshape(batch, shared, heads // shared * length, width)
