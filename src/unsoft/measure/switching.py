"""Does the query decide what is added and what is taken away? Or do the maps, whatever the query is?"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, computed
from unsoft.measure.rows import ratio

__all__ = ["dynamic_deletion"]


def dynamic_deletion(moved: Tensor, again: Tensor) -> Tensor:
    """How much of what sources are moved by the query decides: written for some queries, removed for others.

        mean_j (2 min(P_j, N_j) - D_j) / (P_j + N_j + D_j)        size_ij = min(|x_ij|, |y_ij|)

    ``moved`` x and ``again`` y (..., queries, sources) are multiples of each source that each query receives,
    as in ``deletion``, in two contexts: the same queries and sources among other keys. P, N and D sum the
    sizes of a source over queries that write it both times, remove it both times, and that do now one, now
    the other. What chance decides, random weights for one, has P = N = D/2. The mean is over sources that
    are moved at all.

    Answers: can the head delete what the query tells it to? Softmax through W_O deletes too, but a source is
    then either always written or always removed.

    Range: 0 (the maps decide, or chance, or nothing is moved) to 1 (the query decides, evenly). Never below
    0.

    >>> writes, removes = torch.tensor([0.5, 0.25]), torch.tensor([-0.5, -0.25])
    >>> by_query, fixed = torch.stack([writes, removes]), torch.stack([writes, writes])
    >>> dynamic_deletion(by_query, by_query), dynamic_deletion(fixed, fixed)
    (tensor(1.), tensor(0.))
    """
    for name, x in (("moved", moved), ("again", again)):
        check_float(name, x, 2, "(..., queries, sources)")
    if moved.shape != again.shape:
        raise ValueError(
            f"measure: argument 'again' has shape {tuple(again.shape)}, 'moved' {tuple(moved.shape)}; they"
            f" must match"
        )
    first, second = computed(moved), computed(again)
    size = torch.minimum(first.abs(), second.abs())
    same = first.sign() == second.sign()
    kinds = same & (first > 0), same & (first < 0), ~same
    wrote, removed, mixed = (torch.where(kind, size, 0.0).sum(-2) for kind in kinds)
    total = wrote + removed + mixed
    score = ratio(2 * torch.minimum(wrote, removed) - mixed, total)
    there = (total > 0).to(total.dtype)
    return ratio((score * there).sum(-1), there.sum(-1)).clamp_min(0)
