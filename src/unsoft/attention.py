"""``unsoft.attention``: one function for every mechanism, with the arguments of torch's own attention."""

from collections.abc import Mapping
from typing import Any, Literal, overload

from torch import Tensor

from unsoft.engines.pointwise import run_formula
from unsoft.formula import Formula
from unsoft.mechanisms import resolve
from unsoft.modules.build import mechanism_like
from unsoft.statistics import AttentionStats, statistics


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    engine: str = ...,
    return_weights: Literal[False] = ...,
    return_stats: Literal[False] = ...,
    params: Mapping[str, float | Tensor] | None = ...,
    positions: tuple[Tensor, Tensor] | None = ...,
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None = ...,
    window: tuple[int | None, int | None] | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ...,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = ...,
    key_lengths: Tensor | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    engine: str = ...,
    return_weights: Literal[True],
    return_stats: Literal[False] = ...,
    params: Mapping[str, float | Tensor] | None = ...,
    positions: tuple[Tensor, Tensor] | None = ...,
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None = ...,
    window: tuple[int | None, int | None] | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ...,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = ...,
    key_lengths: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    engine: str = ...,
    return_weights: Literal[False] = ...,
    return_stats: Literal[True],
    params: Mapping[str, float | Tensor] | None = ...,
    positions: tuple[Tensor, Tensor] | None = ...,
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None = ...,
    window: tuple[int | None, int | None] | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ...,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = ...,
    key_lengths: Tensor | None = ...,
) -> tuple[Tensor, AttentionStats]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    engine: str = ...,
    return_weights: bool,
    return_stats: Literal[False] = ...,
    params: Mapping[str, float | Tensor] | None = ...,
    positions: tuple[Tensor, Tensor] | None = ...,
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None = ...,
    window: tuple[int | None, int | None] | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ...,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = ...,
    key_lengths: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: str | Formula = "softmax",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    engine: str = "auto",
    return_weights: bool = False,
    return_stats: bool = False,
    params: Mapping[str, float | Tensor] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None = None,
    window: tuple[int | None, int | None] | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor | AttentionStats]:
    """Attention with any mechanism; the other arguments are those of ``F.scaled_dot_product_attention``.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))      # (batch, heads, length, dim)
    >>> attention(q, k, v, "cog", is_causal=True).shape
    torch.Size([2, 8, 100, 64])
    >>> softmax = attention(q, k, v, "softmax")
    >>> torch.allclose(softmax, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
    True

    query
        (..., heads, L, D), with any number of batch dimensions, or none, or no heads either. float32,
        float64, bfloat16 or float16; the last two are computed in float32.
    key, value
        (..., heads, S, D) and (..., heads, S, Dv). Batch dimensions broadcast; the number of heads must be
        that of the query unless ``enable_gqa=True``, which lets H / Hk consecutive query heads share one key
        head.
    mechanism
        A name (see ``unsoft.mechanisms()``) or a :class:`~unsoft.Formula` of your own.
    attn_mask
        Broadcastable to (..., heads, L, S). Bool: True = may attend. Floating: added to the logits of a
        non-negative mechanism; for a signed one it multiplies the strength of a weight by exp(mask) and never
        changes its sign. -inf, and the lowest finite number of the mask's dtype, mean "masked". Also
        ``torch.nn.attention.bias.CausalBias``.
    dropout_p
        Probability of dropping a weight, drawn from torch's generator. Unlike a module, the function does not
        know whether it is training.
    is_causal
        True or "upper_left": row i sees the keys 0..i, as in torch. "lower_right": the last row sees the last
        key, which is what decoding with a cache means. They differ only if L != S; for 3 queries and 5 keys::

            upper_left  x . . . .      lower_right  x x x . .
                        x x . . .                   x x x x .
                        x x x . .                   x x x x x

        Together with a mask: a key must pass both.
    scale
        Factor of the dot product, 1 / sqrt(D) by default.
    engine
        "auto" picks the fastest one that supports the call; see :mod:`unsoft.engines`. All give the same
        result.
    return_weights
        Also return the weights (..., heads, L, S), before dropout, computed by the dense engine.
    return_stats
        Also return statistics of the weights, an :class:`~unsoft.statistics.AttentionStats` with the
        measures of :mod:`unsoft.measure`: ``entropy``, ``sparsity``, ``row_sum``, ``negative_share``,
        ``top_key``, ``top_weight`` and ``first_share`` of each row (..., heads, L), and ``received`` of each
        key (..., heads, S). Memory is linear in L and S. For formulas only; not differentiable.
    params
        Values for the mechanism's parameters, each a number or a tensor: a scalar or one value per query
        head. Gradients flow to them.
    positions
        The symbols i and j of a formula: a pair of tensors, (..., L) for the queries and (..., S) for the
        keys, with or without batch dimensions. By default keys count from 0 and queries as ``is_causal``
        aligns them, from 0 without it. They do not affect which keys a row sees. Mechanisms that depend on
        distances only, retention and decay, raise ValueError unless positions are consecutive.
    fields
        Values for the fields of a formula, by name: (..., heads, L) for a field of queries, (..., heads, S)
        for one of keys (query heads, or key heads if they are fewer), a pair of both for "query+key", or one
        tensor if queries and keys are the same tokens. Gradients flow to them.

    A row that may see nothing outputs exact zeros. Masked keys have no effect, even if they are NaN; a NaN or
    Inf that is visible makes exactly the rows that see it NaN. Wrong arguments raise ValueError or TypeError
    before any work.

    >>> out, weights = attention(q, k, v, "cog", return_weights=True)
    >>> torch.allclose(weights.abs().sum(-1), torch.ones(2, 8, 100)), bool((weights < 0).any())
    (True, True)
    >>> out, stats = attention(q, k, v, "cog", is_causal=True, return_stats=True)
    >>> stats.entropy.shape, stats.received.shape, bool((stats.top_weight < 0).any())
    (torch.Size([2, 8, 100]), torch.Size([2, 8, 100]), True)
    >>> stats.top_key[0, 0, 0]                                        # the first row sees one key
    tensor(0)
    """
    spec = resolve(mechanism)
    tensors = query, key, value
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "engine": engine,
        "return_weights": return_weights,
        "positions": positions,
    }
    given = {"window": window, "documents": documents, "cu_seqlens": cu_seqlens, "key_lengths": key_lengths}
    options |= {name: value for name, value in given.items() if value is not None}
    if isinstance(spec, Formula):
        summarise = statistics if return_stats else None
        return run_formula(*tensors, spec, params=params, fields=fields, statistics=summarise, **options)
    if return_stats:
        raise ValueError(
            f"attention: argument 'return_stats' is for formulas such as 'softmax' and 'cog', and"
            f" {spec.name!r} is none; use return_weights=True and unsoft.measure"
        )
    for name, argument in (("params", params), ("fields", fields)):
        if argument is not None:
            raise ValueError(
                f"attention: argument '{name}' is for formulas; make a module of {spec.name!r} with"
                " unsoft.mechanism(...)"
            )
    result: Tensor | tuple[Tensor, Tensor] = mechanism_like(spec, *tensors)(*tensors, **options)
    return result
