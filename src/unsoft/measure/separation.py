"""Does a mechanism tell a key that is irrelevant from one that is opposed?

An open question of signed attention.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import check_count, row_weights
from unsoft.measure.rows import ratio

__all__ = ["Discrimination", "discrimination"]


class Discrimination(NamedTuple):
    """Plain numbers, over all sampled geometries."""

    auc: float
    """Chance that an opposed key of one geometry gets less weight than an irrelevant key of another."""
    gap: float
    """Mean difference of their weights, in fair shares of a row's mass."""


def discrimination(
    mechanism: Any,
    *,
    opposition: float = 0.5,
    spread: float = 1.0,
    geometries: int = 4096,
    keys: int = 64,
    dim: int = 64,
    seed: int = 0,
) -> Discrimination:
    """Whether irrelevant and opposed keys get different weights, and by how much.

        auc = P(a_opposed < a_irrelevant) + P(equal) / 2
        gap = E[ n (a_irrelevant - a_opposed) / sum |a| ]

    Each geometry has a query, ``keys`` - 1 other keys (standard normal, ``dim`` wide) and one more key, once
    irrelevant and once opposed, with the scale 1/sqrt(dim). The opposed key has the cosine -``opposition`` to
    the query. The irrelevant key has a random direction, whose cosine is 0 up to ``spread``/sqrt(dim);
    ``spread=0`` makes it exactly orthogonal. ``mechanism`` is a :class:`unsoft.Formula` or a function from
    logits to weights.

    Answers: is "not about this" different from "the opposite of this"? The auc asks whether the order is
    right, which softmax manages; the gap asks whether it matters: softmax has at most its share of a neutral
    key to take away, signed mechanisms go on below 0, and mechanisms that cut at 0 (relu) see no difference
    at all for ``spread=0``.

    Range: auc 0 to 1, where 1/2 cannot tell; gap any number, 0 cannot tell.

    >>> from unsoft.formula import Formula
    >>> discrimination(Formula("max(s, 0)/n"), spread=0)
    Discrimination(auc=0.5, gap=0.0)
    >>> discrimination(Formula("s/n")).auc > 0.99
    True
    """
    weigh = row_weights(mechanism)
    for name, count in (("geometries", geometries), ("keys", keys), ("dim", dim)):
        check_count(name, count, 1)
    for name, value, high in (("opposition", opposition, 1.0), ("spread", spread, math.sqrt(dim))):
        if not 0 <= value <= high:
            raise ValueError(f"measure: argument '{name}' is {value}; it must lie between 0 and {high:g}")
    irrelevant, opposed = _logits(opposition, spread, geometries, keys, dim, seed)
    with torch.no_grad():
        rows = weigh(irrelevant), weigh(opposed)
    shares = [ratio(keys * row[..., 0], row.abs().sum(-1)) for row in rows]
    return Discrimination(
        auc=_chance_of_less(rows[1][..., 0], rows[0][..., 0]), gap=(shares[0] - shares[1]).mean().item()
    )


def _logits(
    opposition: float, spread: float, geometries: int, keys: int, dim: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows (geometries, keys) of logits, the key in question first.

    Lengths and cosines are all that logits depend on, so vectors are drawn only where they decide these.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query = normal(geometries, dim).norm(dim=-1, keepdim=True) / math.sqrt(dim)
    others = query * normal(geometries, keys - 1)  # q.k of a normal key is normal with deviation |q|
    vector = normal(geometries, dim)
    length = vector.norm(dim=-1, keepdim=True)
    random_cosine = vector[:, :1] / length  # to any fixed direction
    irrelevant = query * length * random_cosine * spread
    opposed = -query * length * opposition
    return torch.cat([irrelevant, others], -1), torch.cat([opposed, others], -1)


def _chance_of_less(low: Tensor, high: Tensor) -> float:
    """P(x < y) + P(x = y)/2 for x of ``low`` and y of ``high``, over all pairs."""
    ordered = high.sort().values
    low = low.contiguous()
    above = len(ordered) - torch.searchsorted(ordered, low, right=True)
    not_below = len(ordered) - torch.searchsorted(ordered, low)
    return (above + not_below).double().mean().item() / 2 / len(ordered)
