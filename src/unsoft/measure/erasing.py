"""Can it delete? A head deletes if what it takes from a token points against that token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, check_leading, check_mask, computed
from unsoft.measure.rows import Rows, over_rows, ratio

__all__ = ["Deletion", "deletion"]


class Deletion(NamedTuple):
    """One number for each head (the shape of the weights without queries and keys)."""

    share: Tensor
    """Of all that is moved along the sources' own directions, the part that is removed."""
    strength: Tensor
    """The mean multiple of a source that a deleting contribution removes; 1 would be the whole source."""


def deletion(
    weights: Tensor,
    values: Tensor,
    residual: Tensor | None = None,
    out_proj: Tensor | None = None,
    mask: Tensor | None = None,
) -> Deletion:
    """How much of the source tokens' own directions a head removes.

        x_ij = a_ij (v_j W_O . r_j) / |r_j|^2
        share = sum of |x| over x < 0 / sum |x|        strength = mean of |x| over x < 0

    x_ij is the multiple of the source's residual r_j (..., keys, E) that row i receives from key j: +1 would
    copy the source, -1 would delete it from a row that holds it. W_O is ``out_proj`` (..., D, E), a head's
    part of the output projection; without it values and residual must live in the same space. Without
    ``residual`` the direction is the value's own, x_ij = a_ij, and only negative weights can delete.
    ``values`` (..., keys, D); everything before the last two dimensions broadcasts to that of ``weights``
    (..., queries, keys).

    Answers: does the head delete, or only add? Even softmax can, through W_O.

    Range: share 0 to 1, strength at least 0; both 0 for a head that deletes nothing. A source without a
    direction (all 0) is neither copied nor deleted.

    >>> weights = torch.tensor([[0.75, -0.25]])
    >>> values = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> deletion(weights, values)
    Deletion(share=tensor(0.2500), strength=tensor(0.2500))
    >>> deletion(weights, values, residual=torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))  # both are removed
    Deletion(share=tensor(1.), strength=tensor(0.6250))
    """
    check_float("weights", weights, 2, "(..., queries, keys)")
    check_float("values", values, 2, "(..., keys, D)")
    check_mask("mask", mask, weights.shape, weights.device)
    _check_sources(weights, values, residual, out_proj)
    gain = gain_of(values, residual, out_proj)

    def moved(block: Tensor, visible: Tensor | None, gain: Tensor) -> Tensor:
        return moved_by(Rows(block, visible), gain)

    return deletion_of(over_rows(moved, weights, mask, gain[..., None, :]).sum(-2))


def moved_by(rows: Rows, gain: Tensor) -> Tensor:
    """Of each row, with x = a * gain: what is removed, what is moved at all, how many entries remove;
    (..., 3)."""
    along = rows.values * gain
    if rows.visible is not None:
        along = torch.where(rows.visible, along, 0.0)  # the value of a hidden key may be NaN
    removed = along.clamp(max=0)
    return torch.stack([-removed.sum(-1), along.abs().sum(-1), (along < 0).sum(-1).to(along.dtype)], -1)


def deletion_of(moved: Tensor) -> Deletion:
    """From sums of :func:`moved_by` over rows."""
    removed, total, count = moved.unbind(-1)
    return Deletion(ratio(removed, total), ratio(removed, count))


def gain_of(values: Tensor, residual: Tensor | None, out_proj: Tensor | None) -> Tensor:
    """(v W_O . r) / |r|^2 for each key, (..., keys)."""
    values = computed(values)
    if residual is None:
        size = values.abs().sum(-1)
        return ratio(size, size)  # 1, or 0 without a direction
    sources = Rows(residual, None)
    direction = sources.signed
    if out_proj is not None:
        # v W . r = v . r W^T, which is as wide as a head and not as the model.
        direction = direction @ computed(out_proj).mT
    return ratio((values * direction).sum(-1), sources.energy) / sources.peak[..., 0]


def _check_sources(weights: Tensor, values: Tensor, residual: Tensor | None, out_proj: Tensor | None) -> None:
    given = {"values": values}
    if residual is not None:
        check_float("residual", residual, 2, "(..., keys, E)")
        given["residual"] = residual
    for name, x in given.items():
        if x.shape[-2] != weights.shape[-1]:
            raise ValueError(
                f"measure: argument '{name}' has shape {tuple(x.shape)}, 'weights' {tuple(weights.shape)}; it"
                f" needs one row for each of the {weights.shape[-1]} keys"
            )
        check_leading(name, x, weights)
    if out_proj is not None:
        if residual is None:
            raise ValueError(
                "measure: argument 'out_proj' is given without 'residual', the directions to compare with"
            )
        check_float("out_proj", out_proj, 2, "(..., D, E)")
        check_leading("out_proj", out_proj, weights)
        if out_proj.shape[-2:] != (values.shape[-1], residual.shape[-1]):
            raise ValueError(
                f"measure: argument 'out_proj' has shape {tuple(out_proj.shape)}; to map 'values'"
                f" {tuple(values.shape)} to 'residual' {tuple(residual.shape)} it must end in"
                f" {(values.shape[-1], residual.shape[-1])}"
            )
    elif residual is not None and residual.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"measure: argument 'residual' has shape {tuple(residual.shape)}, 'values' {tuple(values.shape)};"
            " without 'out_proj' their last dimensions must match"
        )
