"""The dense engine: attention as it is defined. It is the specification of all other engines.

    s_ij = scale * q_i . k_j                      (+ float mask, for formulas whose bias is "logit")
    m_i  = max over visible j of peak(s_ij)
    a_ij = weight(s_ij) / norm(sum over visible j of mass(s_ij) + offset)      0 if the normaliser is 0
    o_i  = sum over visible j of a_ij v_j

Plain differentiable torch on whole (L, S) matrices, so memory grows with L * S; gradients of any order,
forward-mode derivatives and torch.compile work. Shapes are those of :class:`unsoft.engines.call.Call`.

How masked and non-finite entries are kept apart:

- A masked entry is evaluated at a point that its row does see and its weight is then replaced by 0.
  Multiplying by 0 would not do: a masked logit may overflow, and 0 * inf is NaN in the output or in the
  gradient.
- NaN and Inf in q, k, v, the fields and the float mask are replaced by 0 at the start, and NaN is added at
  the end to exactly the outputs that see one. So a masked one has no effect, and gradients are those of the
  call with 0 in their place.
- m is treated as a constant: the weights do not depend on it, it only keeps exp in range.
"""

import torch
from torch import Tensor

from unsoft.engines.call import Call, finite_part
from unsoft.engines.dropout import keep_factor, kept_tile
from unsoft.engines.terms import BIAS, Terms, attention_terms
from unsoft.engines.visibility import visible_tile
from unsoft.formula.evaluation import evaluate, evaluate_all, vanishes

_NEUTRAL = 0.5
"""The logit of rows that see nothing: poles and corners of formulas are at 0, 1 and infinity."""


def dense_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and weights (B, H, L, S), both in the dtype of the inputs,
    or wide (see :class:`Call`).

    The weights are those before dropout, which touches the output only.
    """
    terms = attention_terms(call.formula, call.bias is not None)
    visible, logits = visible_entries(call), _logits(call)
    weights = _weights(terms, _symbols(call, logits), visible)
    return weighted_values(call, weights, visible)


def dense_logits(call: Call) -> tuple[Tensor, Tensor]:
    """Return the logits with the float mask added, and the visible entries; both (B, H, L, S)."""
    logits = _logits(call)
    if call.bias is not None:
        logits = logits + finite_part(call.bias)
    return logits, visible_entries(call).expand(logits.shape)


def _logits(call: Call) -> Tensor:
    q, k = (finite_part(x.to(call.compute_dtype)) for x in (call.q, call.k))
    return call.scale * _heads_product(q, k.mT)


def weighted_values(call: Call, weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output for weights (B, H, L, S) that are 0 where not visible, and the weights: applies
    dropout and the rules for NaN and Inf."""
    v = finite_part(call.v.to(call.compute_dtype))
    output = _heads_product(_dropped(weights, call), v)
    bad_rows, bad_outputs = _poison(call, visible)
    output, weights = output + bad_rows + bad_outputs, weights + torch.where(visible, bad_rows, 0.0)
    return output.to(call.out_dtype), weights.to(call.out_dtype)


def visible_entries(call: Call) -> Tensor:
    """Return bool (B|1, H|1, L, S): the mask, the causal rule and the spans together."""
    length, keys, device = call.q.shape[2], call.k.shape[2], call.q.device
    visible = torch.ones(1, 1, length, keys, dtype=torch.bool, device=device)
    tile = visible_tile(call, call.visible, slice(None), slice(0, length), slice(0, keys))
    return visible if tile is None else visible & tile


def _symbols(call: Call, logits: Tensor) -> dict[str, Tensor]:
    """Return every symbol of the formula but m, each broadcastable to (B, H, L, S)."""
    symbols = {name: x[..., None] for name, x in call.row_symbols().items()}
    symbols |= {name: x[..., None, :] for name, x in call.key_symbols().items()}
    symbols["s"] = logits
    if call.bias is not None and call.formula.bias == "logit":
        symbols["s"] = logits + finite_part(call.bias)
    elif call.bias is not None:
        symbols[BIAS] = finite_part(call.bias)
    return symbols


def _weights(terms: Terms, symbols: dict[str, Tensor], visible: Tensor) -> Tensor:
    live = visible.any(-1, keepdim=True)
    rows = {
        # A row that sees nothing may lie where the formula is undefined: its weights are replaced by 0 below,
        # and this keeps the NaN of its slopes from parameters, which it shares with other rows, and fields.
        name: torch.where(live, x, x.detach())
        for name, x in symbols.items()
        if name not in ("s", "j", BIAS, *terms.fields.key)
    }
    if symbols["s"].shape[-1] > 0:
        symbols, rows["m"] = _at_visible_points(terms, symbols, visible)
    else:
        rows["m"] = symbols["s"].new_zeros(*symbols["s"].shape[:-1], 1)
    wanted = {"weight": terms.weight} | ({} if terms.mass is None else {"mass": terms.mass})
    values = evaluate_all(wanted, symbols | rows)
    weight = torch.where(visible, values["weight"], 0.0)
    if terms.mass is None:
        return weight
    total = torch.where(visible, values["mass"], 0.0).sum(-1, keepdim=True)
    return _normalised(terms, rows, weight, total, live)


def _at_visible_points(
    terms: Terms, symbols: dict[str, Tensor], visible: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the symbols with masked entries moved to their row's peak, and that peak m (B, H, L, 1)."""
    shape = symbols["s"].shape
    if terms.peak is None:
        # Without a peak any visible key will do; argmax of a bool tensor is not implemented.
        best = visible.expand(shape).to(torch.uint8).argmax(-1, keepdim=True)
        m = torch.zeros_like(best, dtype=symbols["s"].dtype)
    else:
        peaks = evaluate(terms.peak, {name: x.detach() for name, x in symbols.items()})
        peaks = peaks.masked_fill(~visible, -torch.inf)
        best = peaks.argmax(-1, keepdim=True)
        m = peaks.gather(-1, best)
        m = torch.where(visible.any(-1, keepdim=True), m, 0.0)
    moved = dict(symbols)
    for name in {"s", "j", BIAS, *terms.fields.key} & symbols.keys():
        x = symbols[name].expand(shape)
        at_best = torch.where(visible.any(-1, keepdim=True), x.detach().gather(-1, best), _NEUTRAL)
        moved[name] = torch.where(visible, x, at_best)
    return moved, m


def _normalised(terms: Terms, rows: dict[str, Tensor], weight: Tensor, total: Tensor, live: Tensor) -> Tensor:
    if terms.offset is not None:
        total = total + evaluate(terms.offset, rows)
    if terms.norm is None:
        zero, norm = vanishes(total) | ~live, total
    else:
        detached = {name: x.detach() for name, x in rows.items()} | {"z": total.detach()}
        zero = vanishes(evaluate(terms.norm, detached)) | ~live
        # The slope of sqrt at 0 is infinite: take the zero out before the function, not only after it.
        norm = evaluate(terms.norm, rows | {"z": torch.where(zero, 1.0, total)})
    # 1.0 before the division: its gradient at 0 would be Inf, and torch.where turns 0 * Inf into NaN.
    return torch.where(zero, 0.0, weight / torch.where(zero, 1.0, norm))


def _dropped(weights: Tensor, call: Call) -> Tensor:
    kept = kept_tile(call, *(slice(0, size) for size in weights.shape))
    return weights if kept is None else weights * kept * keep_factor(call.dropout_p)


def _poison(call: Call, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN where something non-finite is visible, else 0: for rows (B, H, L, 1) and outputs (B, H, L,
    Dv)."""
    (batch, heads, length, _), keys = call.q.shape, call.k.shape[2]
    bad_q, bad_k = (~x.isfinite().all(-1) for x in (call.q, call.k))
    bad_k = bad_k.repeat_interleave(heads // max(call.k.shape[1], 1), dim=1)
    if call.query_fields is not None:
        bad_q = bad_q | ~call.query_fields.isfinite().all(0)
    key_fields = call.spread_key_fields()
    if key_fields is not None:
        bad_k = bad_k | ~key_fields.isfinite().all(0)
    bad = bad_q[..., :, None] | bad_k[..., None, :]
    if call.bias is not None:
        bad = bad | ~call.bias.isfinite()
    seen = visible.expand(batch, heads, length, keys)
    bad_rows = (bad & seen).any(-1, keepdim=True)
    # A product with 0 and 1 counts the bad values that a row sees; rounding cannot make a positive count 0.
    bad_outputs = _heads_product(seen.to(call.compute_dtype), (~call.v.isfinite()).to(call.compute_dtype)) > 0
    nan = torch.full((), torch.nan, dtype=call.compute_dtype, device=call.q.device)
    return torch.where(bad_rows, nan, 0.0), torch.where(bad_outputs, nan, 0.0)


def _heads_product(x: Tensor, y: Tensor) -> Tensor:
    """Return (B, H, L, X) times (B, Hk, X, Y). Query heads of one key head are stacked as rows, so y is not
    copied."""
    (batch, heads, length, inner), shared = x.shape, y.shape[1]
    if heads == shared:
        return x @ y
    stacked = x.reshape(batch, shared, heads // shared * length, inner)
    return (stacked @ y).reshape(batch, heads, length, y.shape[-1])
