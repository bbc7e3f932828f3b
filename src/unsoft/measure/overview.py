"""All measures of a row in one walk over the weights."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from unsoft.measure.rows import ROW_MEASURES, Rows, measure_rows

__all__ = ["Summary", "summary"]


Summary: Any = namedtuple("Summary", list(ROW_MEASURES))  # type: ignore[misc]
"""Each field is the measure of the same name, with its default arguments, one number for each row."""


def summary(weights: Tensor, mask: Tensor | None = None) -> Any:
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
    """The fields of :class:`Summary`, side by side (..., fields)."""
    return torch.stack([measure(rows) for measure in ROW_MEASURES.values()], -1)
