"""A gate on the mass of every key, for any mechanism that has a normaliser: weights proportional to gate_j
f(s_ij).

Formulas get the logarithm of the gate as a float mask that multiplies weight and mass; linear attention
carries the gate as one more column of the values and divides by it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from unsoft.engines.call import compute_dtype
from unsoft.formula import Formula, parse
from unsoft.modules.cache import Cache
from unsoft.modules.module import Inputs, Mechanism, Wrapper

_EXPONENTIAL = parse("exp(s - m)")


class MassGate(Wrapper):
    """A mechanism whose calls bring a gate for every key."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__(inner)
        if inner.mass_gate is None:
            raise ValueError(
                "magnitude: where='mass' needs a mechanism with a normaliser; this one has none, and"
                " 'values' is the same"
            )
        self.by_column = inner.mass_gate == "column"
        inner.replace_formulas(_with_strength)

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        return self.inner.attend(inputs)

    def attend_gated(
        self, inputs: Inputs, gate: Tensor, cache: Cache | None = None, gates: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``gate`` (..., key heads, keys), or (..., key heads, rows, keys) if it differs from row to row.

        With a cache, ``gate`` belongs to the new keys and ``gates`` to all of them.
        """
        if self.by_column:
            return self._divided(inputs, gate, cache)
        log = (gate if gates is None else gates).clamp(min=torch.finfo(gate.dtype).tiny).log()
        if log.dim() == inputs.key.dim() - 1:
            log = log[..., None, :]
        log = log.repeat_interleave(inputs.query.shape[-3] // log.shape[-3], dim=-3)
        options = inputs.options | {"attn_mask": _added(inputs.options["attn_mask"], log)}
        gated = inputs.change(options=options)
        return self.inner.attend(gated) if cache is None else self.inner.decode(gated, cache)

    def _divided(self, inputs: Inputs, gate: Tensor, cache: Cache | None) -> Tensor | tuple[Tensor, Tensor]:
        if gate.dim() == inputs.key.dim():
            _, weights = self.inner.attend(inputs.change(return_weights=True))
            weights = weights * _for_heads(gate, weights).to(weights.dtype)
            weights = weights / _divisor(weights.sum(-1, keepdim=True))
            out = weighted_values(weights, inputs.value, inputs.options["dropout_p"])
            return (out, weights) if inputs.return_weights else out
        gate = gate[..., None].to(inputs.value.dtype)
        gated = inputs.change(
            value=torch.cat([inputs.value * gate, gate.expand(*inputs.value.shape[:-1], 1)], dim=-1)
        )
        result = self.inner.attend(gated) if cache is None else self.inner.decode(gated, cache)
        out = result[0] if isinstance(result, tuple) else result
        total = _divisor(out[..., -1:])
        if not isinstance(result, tuple):
            return out[..., :-1] / total
        return out[..., :-1] / total, result[1] * _for_heads(gate, result[1]).mT / total


def weighted_values(weights: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Weights (..., heads, rows, keys) times values (..., key heads, keys, width); a key that no row sees has
    no effect, whatever it holds.
    """
    value = _for_heads(value, weights)
    if not bool(value.isfinite().all()):
        value = torch.where((weights != 0).any(-2)[..., None], value, 0.0)
    return dropout(weights, dropout_p) @ value


def _for_heads(x: Tensor, weights: Tensor) -> Tensor:
    """What belongs to key heads, once for each head of the weights."""
    return x.repeat_interleave(weights.shape[-3] // x.shape[-3], dim=-3)


def _divisor(total: Tensor) -> Tensor:
    """1 for rows that see nothing."""
    return torch.where(total > 0, total, 1.0)


def _with_strength(formula: Formula) -> Formula:
    if formula.mass is None:
        raise ValueError(
            f"magnitude: where='mass' needs a mechanism with a normaliser; {formula.name or formula.weight}"
            " has none, and 'values' is the same"
        )
    # Added to the logit of softmax and its relatives, a mask multiplies weight and mass too.
    exponential = formula.weight == formula.mass == _EXPONENTIAL
    if formula.bias == "strength" or (exponential and formula.bias == "logit"):
        return formula
    return formula.change(bias="strength")


def _added(mask: Tensor | None, log: Tensor) -> Tensor:
    if mask is None:
        return log
    if mask.dtype == torch.bool:
        return torch.where(mask, log, -torch.inf)
    return mask.to(compute_dtype(mask.dtype)) + log
