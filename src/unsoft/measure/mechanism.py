"""Properties of a mechanism. It is given as a formula or as a function from logits to weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.formula import Formula
from unsoft.measure.arguments import check_float
from unsoft.measure.rows import ratio


class Discrimination(NamedTuple):
    """Plain numbers, over all sampled geometries."""

    auc: float
    """Chance that an opposed key of one geometry gets less weight than an irrelevant key of another."""
    gap: float
    """Mean difference of their weights, in fair shares of a row's mass."""


class Gradient(NamedTuple):
    """Each field has one number for each value of the moving logit."""

    weight: Tensor
    """|da_0/ds_0|: reaction of the key's own weight."""
    key: Tensor
    """|da/ds_0|: gradient that reaches the moving key."""
    query: Tensor
    """|da/ds|: gradient that reaches the query, through all keys."""


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
    """Difference between the weights of irrelevant and of opposed keys.

        auc = P(a_opposed < a_irrelevant) + P(equal) / 2
        gap = E[ n (a_irrelevant - a_opposed) / sum |a| ]

    Each geometry has a query, ``keys`` - 1 other keys (standard normal, ``dim`` wide) and one more key, once
    irrelevant and once opposed, with the scale 1/sqrt(dim). The opposed key has the cosine -``opposition`` to
    the query. The irrelevant key has a random direction, whose cosine is 0 up to ``spread``/sqrt(dim);
    ``spread=0`` makes it exactly orthogonal. ``mechanism`` is a :class:`unsoft.Formula` or a function from
    logits to weights.

    Answers: is "not about this" different from "the opposite of this"? The auc is about the order, which
    softmax gets right; the gap is about the size: softmax can remove at most its share of a neutral key,
    signed mechanisms go below 0, and mechanisms that cut at 0 (relu) make no difference for ``spread=0``.

    Range: auc 0 to 1, where 1/2 cannot tell; gap any number, 0 cannot tell.

    >>> discrimination(Formula("max(s, 0)/n"), spread=0)
    Discrimination(auc=0.5, gap=0.0)
    >>> discrimination(Formula("s/n")).auc > 0.99
    True
    """
    weigh = row_weights(mechanism)
    for name, count in (("geometries", geometries), ("keys", keys), ("dim", dim)):
        whole_number("measure", name, count)
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


def unique_share(
    mechanism: Any, clones: Sequence[int], *, unique: float = 1 + math.log(20), clone: float = 1.0
) -> Tensor:
    """Share of the mass that a unique key keeps as the number of clones of another key grows.

        |a_unique| / sum |a|        of the row  unique, clone, clone, ..., clone

    ``unique`` and ``clone`` are logits; with the defaults the unique key is, by exp, 20 times as relevant as
    each clone, the example of the literature. (Clones with the logit 0 would hold nothing under
    many signed mechanisms.) The result has one number for each number of ``clones``. ``mechanism`` is a
    :class:`unsoft.Formula` or a function from logits to weights.

    Answers: how many mediocre copies does it take to drown a relevant key?

    Range: 0 to 1; a row without mass: 0.

    >>> unique_share(Formula("exp(s - m)", "exp(s - m)", "s"), [0, 1, 50])        # 20/20, 20/21, 20/70
    tensor([1.0000, 0.9524, 0.2857], dtype=torch.float64)
    """
    weigh = row_weights(mechanism)
    shares = []
    for count in clones:
        whole_number("measure", "clones", count, 0)
        row = weigh(torch.tensor([unique] + [clone] * count, dtype=torch.float64)).abs()
        shares.append(ratio(row[0], row.sum()))
    return torch.stack(shares) if shares else torch.zeros(0, dtype=torch.float64)


def gradient(mechanism: Any, logits: Tensor, others: Tensor) -> Gradient:
    """Slopes of the weights of a row (s, others) for every s of ``logits``, with J_jl = da_j/ds_l.

        weight = |J_00|        key = sqrt(sum_j J_j0^2)        query = sqrt(sum_jl J_jl^2)

    For a loss whose slope along the values, dloss/do . v_j, is independent with variance 1 for each key,
    ``key`` is the root mean square of dloss/ds_0, and with standard normal keys and the scale 1/sqrt(dim),
    ``query`` is that of |dloss/dq|. ``logits`` is (points,), ``others`` (keys - 1,); ``mechanism`` is a
    :class:`unsoft.Formula` or a differentiable function from logits to weights.

    Answers: does a key with a negative logit still learn? Under softmax its gradient dies off like exp(s),
    under relu it is exactly 0.

    Range: at least 0.

    >>> softmax = Formula("exp(s - m)", "exp(s - m)", "s")
    >>> gradient(softmax, torch.tensor([0.0, -9.0]), torch.tensor([0.0])).weight        # a (1 - a)
    tensor([2.5000e-01, 1.2338e-04])
    """
    weigh = row_weights(mechanism)
    check_float("logits", logits, 1, "(points,)")
    check_float("others", others, 1, "(keys - 1,)")
    if logits.dim() != 1 or others.dim() != 1:
        raise ValueError(
            "measure: arguments 'logits' and 'others' must have one dimension, not shapes"
            f" {tuple(logits.shape)} and {tuple(others.shape)}"
        )
    with torch.enable_grad():
        moving = logits.detach()[:, None]
        rest = others.detach().to(moving).expand(len(logits), -1)
        rows = torch.cat([moving, rest], -1).requires_grad_()
        weights = weigh(rows)
        # Rows do not mix, so the slopes of a whole column of weights come from one backward pass.
        columns = [_slopes(weights[:, j], rows) for j in range(rows.shape[-1])]
    jacobian = torch.stack(columns, -2)
    return Gradient(
        weight=jacobian[:, 0, 0].abs(),
        key=jacobian[:, :, 0].norm(dim=-1),
        query=jacobian.flatten(-2).norm(dim=-1),
    )


def _slopes(column: Tensor, rows: Tensor) -> Tensor:
    if not column.requires_grad:  # constant weights
        return torch.zeros_like(rows)
    return torch.autograd.grad(column.sum(), rows, retain_graph=True, materialize_grads=True)[0]


def row_weights(mechanism: Any) -> Callable[[Tensor], Tensor]:
    """Return the mechanism as a function from logits (..., keys), all visible, to weights of the same shape.

    >>> row_weights(Formula("max(s, 0)/n"))(torch.tensor([2.0, -1.0]))
    tensor([1., 0.])
    """
    if isinstance(mechanism, Formula):
        return mechanism.row
    if not callable(mechanism):
        raise TypeError(
            "measure: argument 'mechanism' must be a Formula or a function from logits (..., keys) to"
            f" weights, not {mechanism!r}; for a name such as 'cog' pass unsoft.mechanisms()['cog']"
        )

    def checked(logits: Tensor) -> Tensor:
        weights = mechanism(logits)
        if not isinstance(weights, Tensor) or weights.shape != logits.shape:
            returned = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"measure: argument 'mechanism' turned logits of shape {tuple(logits.shape)} into {returned};"
                " it must return one weight for each logit"
            )
        return weights

    return checked


def _logits(
    opposition: float, spread: float, geometries: int, keys: int, dim: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return rows (geometries, keys) of logits, the irrelevant or opposed key first.

    Logits depend only on lengths and cosines, so vectors are drawn only where these depend on them.
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
    """Return P(x < y) + P(x = y)/2 for x of ``low`` and y of ``high``, over all pairs."""
    ordered = high.sort().values
    low = low.contiguous()
    above = len(ordered) - torch.searchsorted(ordered, low, right=True)
    not_below = len(ordered) - torch.searchsorted(ordered, low)
    return (above + not_below).double().mean().item() / 2 / len(ordered)
