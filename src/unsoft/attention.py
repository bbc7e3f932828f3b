"""``unsoft.attention``: one function for every mechanism, with the arguments of torch's own attention; and
``unsoft.varlen_attn``, the same for packed documents."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from unsoft.engines.pointwise import run_formula
from unsoft.formula import Formula
from unsoft.mechanisms import resolve
from unsoft.modules.build import mechanism_like
from unsoft.modules.names import MechanismName
from unsoft.statistics import RowStatistics, with_statistics


class _Options(TypedDict, total=False):
    """Keywords of :func:`attention` that every overload takes."""

    engine: str
    params: Mapping[str, float | Tensor] | None
    positions: tuple[Tensor, Tensor] | None
    fields: Mapping[str, Tensor | tuple[Tensor, Tensor]] | None
    window: tuple[int | None, int | None] | None
    documents: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None
    key_lengths: Tensor | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: MechanismName | str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_weights: Literal[False] = ...,
    return_stats: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: MechanismName | str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_weights: Literal[True],
    return_stats: Literal[False] = ...,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: MechanismName | str | Formula = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool | str = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_weights: Literal[False] = ...,
    return_stats: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, RowStatistics]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: MechanismName | str | Formula = "softmax",
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
) -> Tensor | tuple[Tensor, Tensor | RowStatistics]:
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
        Also return statistics of the weights, an :class:`~unsoft.statistics.RowStatistics` with the
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
    window
        A pair (left, right) of positions that a row sees besides its own; None = no limit on that side.
        ``window=(256, 0)`` with ``is_causal=True`` sees 257 keys. Rows and keys are aligned as ``is_causal``
        aligns them, at the lower right without it. Linear attention, the delta rule and magnitude raise
        ValueError.
    documents
        Numbers of packed documents, one per token: (L,), or (..., L) with the batch dimensions. Equal numbers
        must be neighbours. The output equals one call for each document: counts, positions and states
        restart, and nothing leaks. If queries and keys are different tokens, a pair (of queries, of keys) of
        nondecreasing numbers; within a document they are aligned as ``is_causal`` aligns them.
    cu_seqlens
        The same as boundaries 0, ..., number of tokens, as FlashAttention takes them; or a pair (of queries,
        of keys).
    key_lengths
        (batch,): the keys from this number on are padding.

    These four need memory for two numbers per row, where a mask needs L * S, and kernels skip what they hide.
    They combine with each other, with ``is_causal`` and with masks: a key must pass all of them.

    >>> packed = attention(q, k, v, "cog", is_causal=True, cu_seqlens=torch.tensor([0, 60, 100]))
    >>> torch.allclose(packed[:, :, 60:], attention(q, k, v, "cog", is_causal=True)[:, :, 60:])
    False

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
    # One by one, without another dictionary: a step of decoding takes some 30 microseconds in all.
    if window is not None:
        options["window"] = window
    if documents is not None:
        options["documents"] = documents
    if cu_seqlens is not None:
        options["cu_seqlens"] = cu_seqlens
    if key_lengths is not None:
        options["key_lengths"] = key_lengths
    if isinstance(spec, Formula):
        summarise = with_statistics if return_stats else None
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


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    mechanism: MechanismName | str | Formula = "softmax",
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` with any mechanism: packed documents without batch dimension.

    query, key, value
        (tokens, heads, dim); keys and values may be other tokens than queries.
    cu_seq_q, cu_seq_k
        Boundaries of the documents among queries and keys, 0, ..., number of tokens. None for keys means the
        boundaries of the queries.
    max_q, max_k
        Lengths of the longest documents. Not needed here: engines skip what other documents hide.
    window_size
        (left, right), -1 = no limit. (-1, 0) is causal; the last query of a document sees its last key.
    num_splits
        Has no effect on results.

    Returns (tokens, heads, dim). ``return_aux``, ``seqused_k`` and ``block_table`` raise ValueError.

    >>> import torch
    >>> q, k, v = (torch.randn(100, 8, 64) for _ in range(3))
    >>> ends = torch.tensor([0, 60, 100], dtype=torch.int32)
    >>> varlen_attn(q, k, v, ends, ends, 60, 60, window_size=(-1, 0), mechanism="cog").shape
    torch.Size([100, 8, 64])
    """
    unsupported = {"return_aux": return_aux, "seqused_k": seqused_k, "block_table": block_table}
    for name, argument in unsupported.items():
        if argument is not None:
            raise ValueError(
                f"varlen_attn: argument '{name}' is unsupported, since mechanisms have no log-sum-exp and no"
                " paged keys; leave it out"
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(
                f"varlen_attn: argument '{name}' must be (tokens, heads, dim), not {tuple(x.shape)}"
            )
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(isinstance(side, int) and side >= -1 for side in window_size):
        raise ValueError(
            "varlen_attn: argument 'window_size' must be a pair (left, right) of whole numbers from -1 on,"
            f" not {window_size!r}"
        )
    left, right = (None if side == -1 else side for side in window_size)
    is_causal = right == 0
    cu_seqlens: Tensor | tuple[Tensor, Tensor] = cu_seq_q
    # One tensor means that queries and keys are the same tokens, which mechanisms with a state require.
    if cu_seq_k is not None and not torch.equal(cu_seq_q, cu_seq_k):
        cu_seqlens = (cu_seq_q, cu_seq_k)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    alignment = "lower_right" if is_causal else False
    window = None if left is None and (right is None or is_causal) else (left, right)
    out = attention(
        q, k, v, mechanism, None, 0.0, alignment, scale, enable_gqa, window=window, cu_seqlens=cu_seqlens
    )
    return out.transpose(0, 1)
