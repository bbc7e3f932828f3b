"""Affine pairs: a A(q1, k) - b A(q2, k), where both maps come from one fused call.

The two queries of a head are put side by side as heads that share keys and values, as grouped-query attention does, so keys
are read once and no dense matrix is formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.run import run_formula
from unsoft.formula import Formula
from unsoft.mechanisms.module import Inputs

Result = Tensor | tuple[Tensor, Tensor]


def paired_attention(inputs: Inputs, second: Tensor, formula: Formula) -> tuple[Result, Result]:
    """Attention of ``inputs.query`` and of ``second``, a query of the same shape, to the same keys and values."""
    query, key = inputs.query, inputs.key
    heads, shared = query.shape[-3], key.shape[-3]
    # Heads of one key head must lie together: (groups of the first query, groups of the second) for each key head.
    both = torch.cat([x.unflatten(-3, (shared, heads // shared)) for x in (query, second)], dim=-3).flatten(
        -4, -3
    )
    options = inputs.options | {
        "enable_gqa": True,
        "attn_mask": _twice(inputs.options["attn_mask"], heads, shared),
    }
    if heads != shared and not inputs.options["enable_gqa"]:
        options["enable_gqa"] = False  # the front door explains what is missing
        both = query
    result = run_formula(both, key, inputs.value, formula, return_weights=inputs.return_weights, **options)
    if not inputs.return_weights:
        return _halves(result, shared)
    (out1, out2), (weights1, weights2) = (_halves(x, shared) for x in result)
    return (out1, weights1), (out2, weights2)


def combine(first: Result, second: Result, a: Tensor, b: Tensor) -> Result:
    """a first - b second, for an output, or for each of a tuple of output and weights."""
    if isinstance(first, tuple):
        return tuple(a * x - b * y for x, y in zip(first, second, strict=True))
    return a * first - b * second


def _halves(x: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """The results of the first and of the second query."""
    by_group = x.unflatten(-3, (shared, 2, x.shape[-3] // (2 * shared)))
    return by_group.select(-4, 0).flatten(-4, -3), by_group.select(-4, 1).flatten(-4, -3)


def _twice(mask: Tensor | None, heads: int, shared: int) -> Tensor | None:
    """A mask that differs between heads, for the doubled heads."""
    if not isinstance(mask, Tensor) or mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    grouped = mask.unflatten(-3, (shared, heads // shared))
    return torch.cat([grouped, grouped], dim=-3).flatten(-4, -3)
