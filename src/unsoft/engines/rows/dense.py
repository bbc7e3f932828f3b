"""The specification of row-coupled attention: the rule on whole matrices of logits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.call import Call, finite_part
from unsoft.engines.dense import visible_entries, weighted_values
from unsoft.engines.rows.rule import RowRule


def dense_rows(call: Call, rule: RowRule) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, Dv) and weights (B, H, L, S), before dropout, in the dtype of the inputs."""
    q, k = (finite_part(x.to(call.compute_dtype)) for x in (call.q, call.k))
    logits = call.scale * (q @ k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1).mT)
    if call.bias is not None:
        logits = logits + finite_part(call.bias)
    visible = visible_entries(call).expand(logits.shape)
    symbols = {name: row[:, None, None] for name, row in zip(sorted(rule.params), call.params, strict=True)}
    places = torch.arange(logits.shape[2], dtype=logits.dtype, device=logits.device)
    symbols["i"] = (places + (call.causal_offset or 0))[:, None]
    if call.counts is not None:
        symbols["n"] = call.counts[..., None]
    weights = torch.where(visible, rule.weights(logits, visible, symbols), 0.0)
    return weighted_values(call, weights, visible)
