"""Single keys. The strongest key of each row, and the share of attention that each key receives."""

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, check_mask
from unsoft.measure.rows import BLOCK, WeightRows, measure_rows, ratio


def top_key(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Index of the key with the largest size, as int64.

        argmax |a|

    Answers: which key does the row use most?

    Range: 0 to S - 1. Rows without mass, and rows that are NaN: -1.

    >>> top_key(torch.tensor([[0.1, -0.6, 0.3], [0.0, 0.0, 0.0]]))
    tensor([ 1, -1])
    """
    return measure_rows(top_key_of, weights, mask)


def top_weight(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weight of the key with the largest size, with its sign.

        a_j        j = argmax |a|

    Answers: is the strongest key added or subtracted, and how strongly?

    Range: any number. Rows without mass: 0.

    >>> top_weight(torch.tensor([0.1, -0.6, 0.3]))
    tensor(-0.6000)
    """
    return measure_rows(top_weight_of, weights, mask)


def received(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention that each key receives: its share of the mass, summed over the queries.

        sum over i of |a_ij| / sum_l |a_il|

    Answers: which keys does the sequence use, and which could be dropped from a cache?

    Range: 0 to the number of queries. ``weights`` is (..., queries, keys), the result (..., keys). Rows
    without mass give nothing.

    >>> received(torch.tensor([[0.5, -0.5], [3.0, 0.0]]))
    tensor([1.5000, 0.5000])
    """
    check_float("weights", weights, 2, "(..., queries, keys)")
    check_mask("mask", mask, weights.shape, weights.device)
    visible = None if mask is None else mask.expand(weights.shape)
    step = max(1, BLOCK * weights.shape[-2] // max(weights.numel(), 1))
    total = WeightRows(weights[..., :0, :], None).values.sum(-2)
    for start in range(0, weights.shape[-2], step):
        rows = slice(start, start + step)
        seen = None if visible is None else visible[..., rows, :]
        total = total + shares_of(WeightRows(weights[..., rows, :], seen)).sum(-2)
    return total


def top_key_of(rows: WeightRows) -> Tensor:
    if not rows.sizes.shape[-1]:
        return torch.full_like(rows.mass, -1, dtype=torch.int64)
    return torch.where(rows.mass > 0, rows.sizes.argmax(-1), -1)  # False for NaN


def top_weight_of(rows: WeightRows) -> Tensor:
    if not rows.sizes.shape[-1]:
        return rows.mass
    # NaN counts as the largest, so that the row's weight is NaN.
    return rows.values.gather(-1, rows.sizes.argmax(-1, keepdim=True)).squeeze(-1)


def shares_of(rows: WeightRows) -> Tensor:
    """Return |a| over the mass of its row, and 0 in rows without mass."""
    return rows.relative * ratio(torch.ones_like(rows.mass), rows.mass)[..., None]
