"""PyTorch's own fused kernel, for softmax where nothing can make its result differ from the specification.

It has no exact rules for NaN and Inf (a masked NaN poisons rows that cannot see it, a NaN query gives zeros),
so it is used for finite inputs only, and without masks, whose entries it may not honour for such values
either.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unsoft.engines.call import Call
from unsoft.formula import Formula

_SOFTMAX = Formula(weight="exp(s - m)", mass="exp(s - m)", peak="s")


def unsupported(call: Call) -> str | None:
    """Why PyTorch's kernel cannot stand in for a call; None if it can."""
    if call.formula != _SOFTMAX:
        return "it computes softmax only"
    if call.visible is not None or call.bias is not None or call.causal_offset not in (None, 0):
        return "it is used without masks, and with the causal alignment 'upper_left' only"
    if call.dropout_p > 0:
        return "it does not draw dropout from the counter that all other engines share"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "it is used for non-empty inputs only"
    if torch.compiler.is_compiling():
        return "whether its inputs are finite cannot be asked while a graph is being traced"
    if not all(bool(x.isfinite().all()) for x in (call.q, call.k, call.v)):
        return "its rules for NaN and Inf differ"
    return None


def run(call: Call) -> Tensor:
    return scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        is_causal=call.causal_offset is not None,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
