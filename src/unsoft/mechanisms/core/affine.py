"""Affine pairs: a A(q1, k) - b A(q2, k), where both maps come from one fused call.

The two queries of a head are put side by side as heads that share keys and values, as grouped-query attention
does, so keys are read once and no dense matrix is formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.run import run_formula
from unsoft.formula import Formula
from unsoft.mechanisms.core.module import Inputs

Result = Tensor | tuple[Tensor, Tensor]


def paired_attention(inputs: Inputs, second: Tensor, formula: Formula, a: Tensor, b: Tensor) -> Result:
    """a A(query, k) v - b A(second, k) v, and the weights if asked for;
    a and b have one number for each head."""
    query, key, options = inputs.query, inputs.key, inputs.options
    heads, shared = query.shape[-3], key.shape[-3]
    if heads != shared and (not options["enable_gqa"] or shared == 0 or heads % shared):
        # The front door explains what does not fit.
        return run_formula(query, key, inputs.value, formula, return_weights=inputs.return_weights, **options)
    group = heads // max(shared, 1)
    # Heads of one key head must lie together: (group of the first query, group of the second) for each key
    # head.
    grouped = (*query.shape[:-3], shared, group, *query.shape[-2:])
    both = torch.stack((query.reshape(grouped), second.reshape(grouped)), dim=-4).flatten(-5, -3)
    mask = options["attn_mask"]
    if isinstance(mask, Tensor) and mask.dim() >= 3 and mask.shape[-3] > 1:
        mask = torch.stack([mask.unflatten(-3, (shared, group))] * 2, dim=-4).flatten(-5, -3)
    options = options | {"enable_gqa": True, "attn_mask": mask}
    result = run_formula(both, key, inputs.value, formula, return_weights=inputs.return_weights, **options)
    plus, minus = a.view(shared, group, 1, 1), b.view(shared, group, 1, 1)

    def combined(x: Tensor) -> Tensor:
        first, other = x.reshape(*x.shape[:-3], shared, 2, group, *x.shape[-2:]).unbind(-4)
        return torch.addcmul(plus * first, minus, other, value=-1).flatten(-4, -3)

    return (combined(result[0]), combined(result[1])) if isinstance(result, tuple) else combined(result)
