"""Does it subtract? Measures of the signs in a row."""

from __future__ import annotations

from torch import Tensor

from unsoft.measure.rows import Rows, measure_rows, row_measure

__all__ = ["cancellation", "negative_share", "row_sum"]


def negative_share(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the mass that is negative.

        sum of |a| over a < 0 / sum |a|

    Answers: how much of the row subtracts?

    Range: 0 (softmax, always) to 1. Rows without mass: 0.

    >>> import torch
    >>> negative_share(torch.tensor([0.5, -0.25, -0.25]))
    tensor(0.5000)
    """
    return measure_rows(negative_share_of, weights, mask)


def row_sum(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of the weights.

        sum a

    Answers: does the row average (1), attend to nothing (0) or point away (below 0)?

    Range: any number; rows that see nothing: 0. Unlike the others it depends on the scale of the row.

    >>> import torch
    >>> row_sum(torch.tensor([0.5, -0.25, 0.0]))
    tensor(0.2500)
    """
    return measure_rows(row_sum_of, weights, mask)


def cancellation(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """How much of the mass positive and negative weights take from each other.

        1 - |sum a| / sum |a|

    Answers: does the row compare keys with each other rather than collect them?

    Range: 0 (one sign) to 1 (both signs balance). Rows without mass: 0, nothing is cancelled.

    >>> import torch
    >>> cancellation(torch.tensor([[0.5, -0.5], [0.5, 0.5]]))
    tensor([1., 0.])
    """
    return measure_rows(cancellation_of, weights, mask)


@row_measure
def negative_share_of(rows: Rows) -> Tensor:
    return rows.per_mass(-rows.signed.clamp(max=0).sum(-1))


@row_measure
def row_sum_of(rows: Rows) -> Tensor:
    return rows.values.sum(-1)


@row_measure
def cancellation_of(rows: Rows) -> Tensor:
    return 1 - rows.per_mass(rows.signed.sum(-1).abs(), otherwise=1.0)
