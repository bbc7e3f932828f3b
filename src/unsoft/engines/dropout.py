"""Dropout decided by a counter, not by a stream: a pure function of the seed decides whether weight
(b, h, i, j) is kept.

So every engine drops the same weights whatever its tile order, and a backward pass that recomputes its tiles
finds the mask of the forward pass again without having stored it. The generator is the 32-bit mixer
``lowbias32``.
"""

import torch
from torch import Tensor

from unsoft.engines.call import Call

_WORD = 0xFFFFFFFF
_HEAD_STEP, _ROW_STEP, _KEY_STEP = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def draw_seed(device: torch.device) -> Tensor:
    """Return two 32-bit words from torch's generator of ``device``, as an int64 tensor of shape (2,).

    >>> _ = torch.manual_seed(0)
    >>> first = draw_seed(torch.device("cpu"))
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(first, draw_seed(torch.device("cpu")))
    True
    """
    return torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device=device)


def keep_factor(p: float) -> float:
    """Return the factor of a kept weight: 1 / (1 - p), and 0 for p = 1, where nothing is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def row_keys(seed: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """Return one 32-bit word per (head, row), shape (len(heads), len(rows)); ``heads``: b * H + h."""
    low, high = seed[0] & _WORD, seed[1] & _WORD
    per_head = _mix(_mix((low + heads * _HEAD_STEP) & _WORD) ^ high)
    return _mix((per_head[:, None] + rows * _ROW_STEP) & _WORD)


def keep(row_key: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return a bool mask of the weights that survive, with one more dimension than ``row_key``: the keys.

    >>> words = row_keys(torch.tensor([1, 2]), torch.arange(4), torch.arange(100))
    >>> kept = keep(words, torch.arange(200), p=0.25)
    >>> kept.shape, round(kept.double().mean().item(), 2)
    (torch.Size([4, 100, 200]), 0.75)
    """
    return _mix((row_key[..., None] + keys * _KEY_STEP) & _WORD) >= round(p * (1 << 32))


def kept_tile(call: Call, batch: slice, heads: slice, rows: slice, keys: slice) -> Tensor | None:
    """Return the bool tile (batch, heads, rows, keys) of the weights that survive; None without dropout."""
    if call.seed is None:
        return None
    b, h, i, j = (torch.arange(x.start, x.stop, device=call.seed.device) for x in (batch, heads, rows, keys))
    words = row_keys(call.seed, (b[:, None] * call.q.shape[1] + h).flatten(), i)
    return keep(words, j, call.dropout_p).view(len(b), len(h), len(i), len(j))


def _mix(x: Tensor) -> Tensor:
    # int64 holds the 32-bit words: a product may wrap modulo 2**64, which leaves its low 32 bits right.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
