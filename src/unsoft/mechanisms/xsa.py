"""xsa: exclusive self attention, the output of any mechanism without its part along the token's own value.

    y_i = o_i - (o_i . v_i) v_i / |v_i|^2      o: output of the mechanism inside, v_i: the token's own value

Paper: Exclusive Self Attention, arXiv 2603.09078 (2026); taken up in speed runs of small language models.

Strengths: it adds only what the token does not have already: its own value reaches the next layer by the
residual stream anyway. It works around every mechanism whose rows belong to tokens: ``xsa+softmax``,
``xsa+gated+cog``.
Limitations: rows that do not see their own key (padding, more queries than keys) stay as they are. Nothing is
learned.

Removing the part is the same as lowering the weight of the own key by (o_i . v_i) / |v_i|^2, so the returned
weights include that, and the weight of the own key may be negative.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("xsa+softmax", heads=1, head_dim=4)
>>> q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
>>> bool(((layer(q, k, v, is_causal=True) * v).sum(-1).abs() < 1e-5).all())      # nothing along the own value
True
"""

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.modules.cache import Cache
from unsoft.modules.definition import Definition, Layer, WrittenCall
from unsoft.modules.module import Inputs, Result, Wrapper
from unsoft.modules.registry import modifier


class ExclusiveSelf(Wrapper):
    """See the module's docstring."""

    aligned = True

    def attend(self, inputs: Inputs) -> Result:
        return _without_own(inputs, self.inner.attend(inputs.change(wide=True)))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        before = cache.length
        result = self.inner.decode(inputs.change(wide=True), cache)
        mask = inputs.options["attn_mask"]
        if isinstance(mask, Tensor) and mask.shape[-1] == cache.length:
            mask = mask[..., before:]  # of the new keys
        new = inputs.with_options(attn_mask=mask, is_causal=True)
        return _without_own(new, result, before)


def _own_keys(inputs: Inputs) -> tuple[int, Tensor | None]:
    """Return the index of a row's own key minus the row, and whether the row sees it (B|1, H|1, L)."""
    length, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    offset = keys - length if inputs.options["is_causal"] == "lower_right" else 0
    mask = inputs.options["attn_mask"]
    if mask is None or keys == 0:
        return offset, None
    call, _ = inputs.checked(enable_gqa=True, positions=None)  # some have several queries per head
    visible = call.visible
    if visible is None:
        return offset, None
    rows = torch.arange(length, device=visible.device)
    own = (rows + offset).clamp(0, keys - 1)
    rows, own = (index * (size > 1) for index, size in ((rows, visible.shape[2]), (own, visible.shape[3])))
    return offset, visible[:, :, rows, own]


def _without_own(inputs: Inputs, result: Result, earlier: int = 0) -> Result:
    """Remove the part along the own value. ``earlier``: keys of the weights before those of the call."""
    offset, seen = _own_keys(inputs)
    out = result[0] if isinstance(result, tuple) else result
    length, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    first, last = max(0, -offset), max(0, min(length, keys - offset))  # rows whose own key is among the keys
    value = inputs.value[..., first + offset : last + offset, :]
    value = value.to(compute_dtype(value.dtype))
    value = value.repeat_interleave(out.shape[-3] // max(value.shape[-3], 1), dim=-3)
    if seen is not None:
        sees = seen[:, :: max(1, seen.shape[1] // out.shape[-3]), first:last, None]
        value = torch.where(sees.reshape(sees.shape[max(0, 4 - value.dim()) :]), value, 0.0)
    square = value.square().sum(-1, keepdim=True)
    rows = out[..., first:last, :]
    part = (rows * value).sum(-1, keepdim=True) / torch.where(square == 0, 1.0, square)
    out = inputs.rounded(torch.cat([out[..., :first, :], rows - part * value, out[..., last:, :]], dim=-2))
    if not isinstance(result, tuple):
        return out
    index = torch.arange(first, last, device=out.device)
    less = torch.zeros_like(result[1])
    less[..., index, index + offset + earlier] = part[..., 0].to(less.dtype)
    return out, inputs.rounded(result[1] - less)


def definition(inner: Definition) -> Definition:
    """Return y - (y . v) v / |v|^2 for every row that sees its own key."""

    def exclusive(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
        weights, out = inner(call, layer.inner)
        own = call.keys == call.rows[:, None]  # (R, S)
        chosen = (own & call.visible[:, :: call.visible.shape[1] // out.shape[1]]).to(out.dtype)
        v = chosen @ call.value.repeat_interleave(out.shape[1] // call.value.shape[1], dim=1)
        square = v.square().sum(-1, keepdim=True)
        part = (out * v).sum(-1, keepdim=True) / torch.where(square == 0, 1.0, square)
        return weights - part * chosen, out - part * v

    return exclusive


modifier(
    "xsa",
    ExclusiveSelf,
    summary="exclusive self attention: the output without its part along the token's own value",
)
