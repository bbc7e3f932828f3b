"""All measures of a row in one walk over the weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.measure import focus, sign
from unsoft.measure.rows import Rows, measure_rows


class Summary(NamedTuple):
    """Each field is the measure of the same name, with its default arguments, one number for each row."""

    sparsity: Tensor
    entropy: Tensor
    effective_keys: Tensor
    participation: Tensor
    top_mass: Tensor
    sink_mass: Tensor
    distance_to_uniform: Tensor
    negative_share: Tensor
    row_sum: Tensor
    cancellation: Tensor


def summary(weights: Tensor, mask: Tensor | None = None) -> Summary:
    """Every measure of focus and sign at once, faster than one after the other.

        (S, H, exp(H), ..., 1 - |sum a| / sum |a|)

    Answers: what do the rows of this head look like?

    Range: that of each measure.

    >>> looked = summary(torch.tensor([[0.5, -0.5, 0.0, 0.0]]))
    >>> looked.effective_keys, looked.cancellation
    (tensor([2.]), tensor([1.]))
    """
    return Summary(*measure_rows(summary_of, weights, mask).unbind(-1))


def summary_of(rows: Rows) -> Tensor:
    """The fields of :class:`Summary`, side by side (..., 10)."""
    entropy = focus.entropy_of(rows)
    return torch.stack(
        [
            focus.sparsity_of(rows),
            entropy,
            focus.keys_of_entropy(rows, entropy),
            focus.participation_of(rows),
            focus.top_mass_of(rows),
            focus.sink_mass_of(rows),
            focus.distance_to_uniform_of(rows),
            sign.negative_share_of(rows),
            sign.row_sum_of(rows),
            sign.cancellation_of(rows),
        ],
        -1,
    )
