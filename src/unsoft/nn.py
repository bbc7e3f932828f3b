"""Layers around one mechanism: projections, heads and masks, no mathematics of attention.

Mechanisms of your own are subclasses of ``Mechanism``, or of ``WrittenOut``, which needs only their
weights; see :func:`unsoft.register`.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from unsoft.formula import Formula
from unsoft.modules.build import mechanism as build_mechanism
from unsoft.modules.cache import Cache
from unsoft.modules.module import Inputs, Mechanism
from unsoft.modules.names import MechanismName
from unsoft.modules.pointwise import FieldSource
from unsoft.modules.rows import WrittenOut
from unsoft.modules.spec import LayerSpec

__all__ = ["MultiheadAttention", "Mechanism", "WrittenOut", "FieldSource", "LayerSpec", "Inputs"]


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with any mechanism: its constructor and forward, plus ``mechanism=``
    and ``cache=``.

    With a mechanism that has no weights of its own it loads the state dict of torch's layer and, with
    softmax, gives its outputs; rows that may see nothing are 0 instead of NaN. As there, bool masks say True
    = *not* allowed, and dropout acts on the weights while training. ``is_causal=True`` needs no mask here.

    >>> layer = MultiheadAttention(16, 4, mechanism="cog", batch_first=True)
    >>> x = torch.randn(2, 10, 16)
    >>> y, weights = layer(x, x, x, is_causal=True)
    >>> y.shape, weights.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        mechanism: MechanismName | str | Formula = "softmax",
        layer: int = 0,
        layers: int | None = None,
        **options: Any,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, **made
        )
        place: dict[str, Any] = {"hidden_dim": embed_dim, "layer": layer, "layers": layers}
        built = build_mechanism(mechanism, heads=num_heads, head_dim=self.head_dim, **place, **options)
        self.mechanism = built.to(**made)
        more = self.mechanism.query_heads // num_heads - 1
        self.more_queries = nn.Linear(embed_dim, more * embed_dim, bias, **made) if more else None

    def new_cache(self, batch: int, dtype: str | None = None) -> Cache:
        """Return an empty cache for decoding with ``forward(..., cache=)``. ``dtype="int8"``: keys and values
        in a quarter of the memory, for mechanisms that keep nothing else."""
        cache = self.mechanism.new_cache(batch)
        return cache if dtype is None else cache.quantise(dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
        window: tuple[int | None, int | None] | None = None,
        documents: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if ``need_weights``, the weights: averaged over heads, or (batch, heads, L,
        S). ``window`` and ``documents`` are those of :func:`unsoft.attention`."""
        self._check(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        k, v, extra = self._with_extra_keys(k, v)
        if extra and (window is not None or documents is not None):
            raise ValueError(
                "MultiheadAttention: arguments 'window' and 'documents' have no place for the keys of"
                " add_bias_kv and add_zero_attn; make the layer without them"
            )
        mask = _joined_mask(attn_mask, key_padding_mask, query.shape[0], self.num_heads, extra, q.dtype)
        dropout_p, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        options: dict[str, Any] = {"hidden": query, "cache": cache, "window": window, "documents": documents}
        result = self.mechanism(
            q, k, v, mask, dropout_p, is_causal, enable_gqa=grouped, return_weights=need_weights, **options
        )
        out, weights = result if need_weights else (result, None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                order = "(batch, length, width)" if self.batch_first else "(length, batch, width)"
                raise ValueError(
                    f"MultiheadAttention: argument '{name}' has shape {tuple(x.shape)}; expected {order} or"
                    f" (length, width) with width {width}, like the other two"
                )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as (batch, heads, length, head_dim)."""
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        if self.more_queries is not None:  # the further queries of a head follow its first
            more = (
                self.more_queries(query)
                .unflatten(-1, (self.num_heads, -1, self.head_dim))
                .permute(0, 2, 3, 1, 4)
            )
            q = torch.cat([q[:, :, None], more], dim=2).flatten(1, 2)
        return q, k, v

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned key and the zero key, if the layer has them; every query may see those."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            shape = (self.num_heads, 1, self.head_dim)
            k, v = (
                torch.cat([x, b.view(shape).expand(len(x), *shape)], dim=2)
                for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
            extra += 1
        return k, v, extra


def _joined_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return one mask in the convention of ``unsoft.attention``: bool with True = may attend, or additive."""
    masks = {}
    if attn_mask is not None:
        if attn_mask.dim() == 3 and attn_mask.shape[0] == batch * heads:
            attn_mask = attn_mask.unflatten(0, (batch, heads))
        elif attn_mask.dim() != 2:
            raise ValueError(
                f"MultiheadAttention: argument 'attn_mask' has shape {tuple(attn_mask.shape)}; expected (L,"
                f" S) or (batch * heads, L, S) with batch * heads = {batch * heads}"
            )
        masks["attn_mask"] = attn_mask
    if key_padding_mask is not None:
        if key_padding_mask.dim() != 2 or key_padding_mask.shape[0] != batch:
            raise ValueError(
                f"MultiheadAttention: argument 'key_padding_mask' has shape {tuple(key_padding_mask.shape)};"
                f" expected (batch, S) with batch = {batch}"
            )
        masks["key_padding_mask"] = key_padding_mask[:, None, None, :]
    for name, mask in masks.items():
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"MultiheadAttention: argument '{name}' has dtype {mask.dtype}; use bool (True = hidden) or"
                " floating"
            )
        masks[name] = pad(mask, (0, extra)) if extra else mask
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks.values()):
        return ~reduce(torch.logical_or, masks.values())
    return reduce(torch.add, (_additive(mask, dtype) for mask in masks.values()))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in which True hides as one that is added; other masks are returned as they are."""
    return torch.where(mask, -torch.inf, 0.0).to(dtype) if mask.dtype == torch.bool else mask
