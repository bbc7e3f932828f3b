"""Deletion. A head deletes if what it takes from a token points against that token."""

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import (
    check_float,
    check_leading,
    check_mask,
    check_per_key,
    computed,
    wrong_shape,
)
from unsoft.measure.rows import WeightRows, over_rows, ratio


class Deletion(NamedTuple):
    """One number for each head (the shape of the weights without queries and keys)."""

    share: Tensor
    """Fraction of what is moved along the sources' own directions that is removed."""
    strength: Tensor
    """Mean multiple of a source that a deleting contribution removes; 1 would be the whole source."""


def deletion(
    weights: Tensor,
    values: Tensor,
    residual: Tensor | None = None,
    out_proj: Tensor | None = None,
    mask: Tensor | None = None,
) -> Deletion:
    """Fraction of the source tokens' own directions that a head removes.

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
    check_mask("mask", mask, weights.shape, weights.device)
    _check_sources(weights, values, residual, out_proj)
    gain = gain_of(values, residual, out_proj)

    def moved(block: Tensor, visible: Tensor | None, gain: Tensor) -> Tensor:
        return moved_by(WeightRows(block, visible), gain)

    return deletion_of(over_rows(moved, weights, mask, gain[..., None, :]).sum(-2))


def dynamic_deletion(moved: Tensor, again: Tensor) -> Tensor:
    """Fraction of what is moved whose sign the query decides: written for some queries, removed for others.

        mean_j (2 min(P_j, N_j) - D_j) / (P_j + N_j + D_j)        size_ij = min(|x_ij|, |y_ij|)

    ``moved`` x and ``again`` y (..., queries, sources) are multiples of each source that each query receives,
    as in ``deletion``, in two contexts: the same queries and sources among other keys. P, N and D sum the
    sizes of a source over queries that write it both times, that remove it both times, and that do each once.
    Random weights have P = N = D/2. The mean is over sources that are moved at all.

    Answers: can the query decide what the head deletes? Softmax through W_O deletes too, but a source is then
    either always written or always removed.

    Range: 0 (fixed by the maps, or random, or nothing is moved) to 1 (decided by the query, evenly).

    >>> writes, removes = torch.tensor([0.5, 0.25]), torch.tensor([-0.5, -0.25])
    >>> by_query, fixed = torch.stack([writes, removes]), torch.stack([writes, writes])
    >>> dynamic_deletion(by_query, by_query), dynamic_deletion(fixed, fixed)
    (tensor(1.), tensor(0.))
    """
    for name, x in (("moved", moved), ("again", again)):
        check_float(name, x, 2, "(..., queries, sources)")
    if moved.shape != again.shape:
        raise wrong_shape("they must match", again=again, moved=moved)
    first, second = computed(moved), computed(again)
    size = torch.minimum(first.abs(), second.abs())
    same = first.sign() == second.sign()
    kinds = same & (first > 0), same & (first < 0), ~same
    wrote, removed, mixed = (torch.where(kind, size, 0.0).sum(-2) for kind in kinds)
    total = wrote + removed + mixed
    score = ratio(2 * torch.minimum(wrote, removed) - mixed, total)
    is_moved = (total > 0).to(total.dtype)
    return ratio((score * is_moved).sum(-1), is_moved.sum(-1)).clamp_min(0)


def moved_by(rows: WeightRows, gain: Tensor) -> Tensor:
    """Return sums of |x| over x < 0 and over all x of each row, and the count of x < 0; x = a * gain.

    The result is (..., 3).
    """
    along = rows.values * gain
    if rows.visible is not None:
        along = torch.where(rows.visible, along, 0.0)  # the value of a hidden key may be NaN
    removed = along.clamp(max=0)
    return torch.stack([-removed.sum(-1), along.abs().sum(-1), (along < 0).sum(-1).to(along.dtype)], -1)


def deletion_of(moved: Tensor) -> Deletion:
    """Return the deletion of sums of :func:`moved_by` over rows."""
    removed, total, count = moved.unbind(-1)
    return Deletion(ratio(removed, total), ratio(removed, count))


def gain_of(values: Tensor, residual: Tensor | None, out_proj: Tensor | None) -> Tensor:
    """Return (v W_O . r) / |r|^2 for each key, (..., keys)."""
    values = computed(values)
    if residual is None:
        size = values.abs().sum(-1)
        return ratio(size, size)  # 1, or 0 without a direction
    sources = WeightRows(residual, None)
    direction = sources.signed
    if out_proj is not None:
        # v W . r = v . r W^T, which is as wide as a head and not as the model.
        direction = direction @ computed(out_proj).mT
    return ratio((values * direction).sum(-1), sources.energy) / sources.peak[..., 0]


def _check_sources(weights: Tensor, values: Tensor, residual: Tensor | None, out_proj: Tensor | None) -> None:
    check_float("values", values, 2, "(..., keys, D)")
    check_per_key("values", values, weights)
    if residual is not None:
        check_float("residual", residual, 2, "(..., keys, E)")
        check_per_key("residual", residual, weights)
    if out_proj is not None:
        if residual is None:
            raise ValueError(
                "measure: argument 'out_proj' is given without 'residual', the directions to compare with"
            )
        check_float("out_proj", out_proj, 2, "(..., D, E)")
        check_leading("out_proj", out_proj, weights)
        ends = (values.shape[-1], residual.shape[-1])
        if out_proj.shape[-2:] != ends:
            shapes = f"'values' {tuple(values.shape)} to 'residual' {tuple(residual.shape)}"
            raise wrong_shape(f"to map {shapes} it must end in {ends}", out_proj=out_proj)
    elif residual is not None and residual.shape[-1] != values.shape[-1]:
        problem = "without 'out_proj' their last dimensions must match"
        raise wrong_shape(problem, residual=residual, values=values)
