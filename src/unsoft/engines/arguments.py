"""From what a user passes to ``attention`` to one checked :class:`Call`. Every wrong argument raises here,
before any work.

Every message names the argument, what was given, and what would work.
"""

import math
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import NO_NEEDS, Call, CallRule, broadcasts, check_device, compute_dtype
from unsoft.engines.dropout import draw_seed
from unsoft.engines.field_tables import field_tables
from unsoft.engines.visibility import count_visible, spans_of, split_float_mask

_LARGEST = sys.float_info.max
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def checked_call(
    query: Any,
    key: Any,
    value: Any,
    rule: CallRule = NO_NEEDS,
    *,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    params: Mapping[str, float | Tensor] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    fields: Mapping[str, Any] | None = None,
    **structure: Any,
) -> tuple[Call, torch.Size]:
    """Return the checked call, and the leading dimensions (batch dimensions and heads) of its results.

    ``structure``: the last arguments of :func:`_spans`.
    """
    query, key, value = as_autocast(query, key, value)
    check_tensors(query, key, value)
    check_sizes(query, key, value)
    batch = batch_shape(query, key, value)
    heads = head_count(query, key, value, enable_gqa)
    _check_number("dropout_p", dropout_p, low=0.0, high=1.0)
    q, k, v = (as_4d(x, batch) for x in (query, key, value))
    length, keys = q.shape[2], k.shape[2]
    dtype, device = compute_dtype(q.dtype), q.device

    offset = _causal_offset("is_causal", is_causal, length, keys)
    offset, attn_mask = _without_causal_bias(offset, attn_mask, length, keys)
    lower_right = is_causal is False or is_causal == "lower_right"
    spans, starts = _spans((length, keys), batch, offset, device, lower_right=lower_right, **structure)
    if starts is not None and positions is None and rule.uses & {"i", "j"}:
        positions = starts
    visible = bias = None
    if is_block_mask(attn_mask):
        attn_mask = _dense_block_mask(attn_mask, length, keys)
    if attn_mask is not None:
        mask = _mask_as_4d(attn_mask, query, batch, length, keys)
        visible, bias = (mask, None) if mask.dtype == torch.bool else split_float_mask(mask, dtype)
    scale = _scale(scale, q.shape[3])
    table = _parameter_table(rule, params, q.shape[1], dtype, device)
    counts = count_visible(visible, offset, length, keys, device, dtype, spans) if "n" in rule.uses else None
    places = None if positions is None else _positions(positions, batch, q, k, rule)
    tables = field_tables(rule, fields, q, k, batch, scale, dtype)
    seed = draw_seed(device) if dropout_p > 0 else None
    masks, of_rows = (visible, bias, offset, spans), (counts, places, *tables)
    call = Call(q, k, v, rule, table, *masks, *of_rows, scale, float(dropout_p), seed)
    return call, torch.Size((*batch, *heads))


def with_leading(x: Tensor, leading: torch.Size) -> Tensor:
    """Return ``x`` (B, H, ...) with the leading dimensions of the user's tensors."""
    return x.reshape(*leading, *x.shape[2:])


def _causal_offset(name: str, alignment: bool | str, length: int, keys: int) -> int | None:
    if alignment is False:
        return None
    if alignment is True or alignment == "upper_left":
        return 0
    if alignment == "lower_right":
        return keys - length
    error = ValueError if isinstance(alignment, str) else TypeError
    raise error(
        f"attention: argument '{name}' must be True, False, 'upper_left' or 'lower_right', not {alignment!r}"
    )


Starts = tuple[Tensor, Tensor]


def _spans(
    sizes: tuple[int, int],
    batch: tuple[int, ...],
    offset: int | None,
    device: torch.device,
    *,
    lower_right: bool,
    window: Any = None,
    documents: Any = None,
    cu_seqlens: Any = None,
    key_lengths: Any = None,
    before: bool = False,
) -> tuple[Tensor | None, Starts | None]:
    """Return the spans of rows, and positions of queries and keys that restart with every document.

    ``before``: the spans of a causal call end before the row's own key.
    """
    if documents is not None and cu_seqlens is not None:
        raise ValueError("attention: give 'documents' or 'cu_seqlens', not both: they say the same")
    length, keys = sizes
    sides = (None, None) if window is None else _window(window)
    numbers = None
    if documents is not None:
        numbers = packed_documents(documents, batch, sizes, device)
    elif cu_seqlens is not None:
        numbers = from_cu_seqlens(cu_seqlens, sizes, device)
    if key_lengths is not None:
        key_lengths = checked_key_lengths(key_lengths, batch, keys, device)
    if sides == (None, None) and numbers is None and key_lengths is None:
        return None, None
    spans = spans_of(
        *(length, keys, offset),
        lower_right=lower_right,
        window=sides,
        documents=numbers,
        key_lengths=key_lengths,
        before=before,
        device=device,
    )
    if numbers is None:
        return spans, None
    of_queries, of_keys = numbers
    first = (torch.searchsorted(x.contiguous(), x.contiguous()) for x in (of_queries, of_keys))
    places = (torch.arange(n, device=device) for n in sizes)
    i, j = (place - start for place, start in zip(places, first, strict=True))
    return spans, (_like_batch(i, batch), _like_batch(j, batch))


def _like_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return (B|1, n) with the batch dimensions of the user's tensors."""
    return x[0] if len(x) == 1 else x.reshape(*batch, -1)


def _window(window: Any) -> tuple[int | None, int | None]:
    pair = tuple(window) if isinstance(window, (tuple, list)) else ()
    good = all(x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= 0) for x in pair)
    if len(pair) != 2 or not good:
        raise ValueError(
            "attention: argument 'window' must be a pair (left, right) of whole numbers from 0 on, or None"
            f" for no limit, not {window!r}; (256, 0) sees the 256 positions before a row's own"
        )
    return pair


def packed_documents(
    documents: Any, batch: tuple[int, ...], sizes: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return nondecreasing numbers of documents for queries and keys, (B|1, L) and (B|1, S)."""
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2:
        raise TypeError("attention: argument 'documents' must be a tensor or a pair (of queries, of keys)")
    numbers = []
    for x, count in zip(pair, sizes, strict=True):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"attention: argument 'documents' must hold whole numbers, not {kind}")
        check_device("documents", x, device)
        numbers.append(_by_token("'documents'", x, batch, count).long())
    if isinstance(documents, tuple):
        if not torch.compiler.is_compiling() and any(bool((x.diff(dim=-1) < 0).any()) for x in numbers):
            raise ValueError("attention: argument 'documents' as a pair must hold nondecreasing numbers")
        return numbers[0], numbers[1]
    # Runs of equal numbers, counted: any labels will do, as long as no document is interrupted.
    runs = torch.nn.functional.pad((numbers[0].diff(dim=-1) != 0).cumsum(-1), (1, 0))
    if not torch.compiler.is_compiling() and _interrupted(numbers[0], runs):
        raise ValueError(
            "attention: argument 'documents' must not interrupt a document: equal numbers must be neighbours"
        )
    return runs, runs


def _by_token(name: str, x: Tensor, batch: tuple[int, ...], count: int) -> Tensor:
    """Return numbers of tokens as (B|1, count)."""
    target = (*batch, count)
    if x.dim() == 0 or x.shape[-1] != count or not broadcasts(x.shape, target):
        raise ValueError(
            f"attention: argument {name} has shape {shape_of(x)}, which does not broadcast to {target}; give"
            " one number per token, or a pair (of queries, of keys)"
        )
    return (x if x.dim() == 1 else x.expand(target)).reshape(-1, count)


def _interrupted(numbers: Tensor, runs: Tensor) -> bool:
    """Return True if some number occurs in two runs."""
    ordered = numbers.sort(dim=-1).values
    different = (ordered.diff(dim=-1) != 0).sum(-1)
    return bool((different != runs[:, -1]).any()) if runs.shape[-1] else False


def from_cu_seqlens(cu_seqlens: Any, sizes: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return numbers of documents from where each begins: 0, ..., number of tokens."""
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or not all(isinstance(x, Tensor) and x.dim() == 1 for x in pair):
        raise TypeError(
            "attention: argument 'cu_seqlens' must be a 1-D tensor or a pair (of queries, of keys)"
        )
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"attention: argument 'cu_seqlens' has {len(pair[0]) - 1} documents of queries and"
            f" {len(pair[1]) - 1} of keys; they must match"
        )
    numbers = []
    for x, count in zip(pair, sizes, strict=True):
        if not torch.compiler.is_compiling():
            ends = x.tolist()
            if len(ends) < 2 or ends[0] != 0 or ends[-1] != count or any(b < a for a, b in pairwise(ends)):
                raise ValueError(
                    f"attention: argument 'cu_seqlens' must rise from 0 to the number of tokens, {count}, not"
                    f" {ends if len(ends) <= 8 else [*ends[:4], '...', *ends[-2:]]}"
                )
        places = torch.arange(count, device=device)
        numbers.append((torch.searchsorted(x.to(device).long(), places, right=True) - 1)[None])
    return numbers[0], numbers[1]


def checked_key_lengths(lengths: Any, batch: tuple[int, ...], keys: int, device: torch.device) -> Tensor:
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(
            "attention: argument 'key_lengths' must be a tensor of whole numbers, one per batch row"
        )
    if lengths.numel() != math.prod(batch):
        raise ValueError(
            f"attention: argument 'key_lengths' has shape {shape_of(lengths)}; give one number for each of"
            f" the {math.prod(batch)} batch rows"
        )
    if not torch.compiler.is_compiling() and bool(((lengths < 0) | (lengths > keys)).any()):
        raise ValueError(
            f"attention: argument 'key_lengths' must lie between 0 and the number of keys, {keys}, not"
            f" {lengths.tolist()}"
        )
    return lengths.to(device).long().reshape(-1)


def is_block_mask(mask: Any) -> bool:
    """Return True for a BlockMask of FlexAttention, whose module is slow to import."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)


def _dense_block_mask(mask: Any, length: int, keys: int) -> Tensor:
    """Return the bool mask that a BlockMask describes."""
    _check_lengths("BlockMask", mask.seq_lengths, (length, keys))
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.kv_num_blocks.shape[:2]
    return create_mask(mask.mask_mod, batch, heads, length, keys, device=mask.kv_num_blocks.device)


def _check_lengths(kind: str, given: tuple[int, int], sizes: tuple[int, int]) -> None:
    if given != sizes:
        raise ValueError(
            f"attention: argument 'attn_mask' is a {kind} for {given[0]} queries and {given[1]} keys, but"
            f" there are {sizes[0]} queries and {sizes[1]} keys"
        )


def _without_causal_bias(offset: int | None, mask: Any, length: int, keys: int) -> tuple[int | None, Any]:
    """Return the offset of the stricter causal rule, and no mask, if the mask is a CausalBias."""
    # Importing the class costs more than importing unsoft; if its module is not imported, none exists.
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(mask, module.CausalBias):
        return offset, mask
    _check_lengths("CausalBias", (mask.seq_len_q, mask.seq_len_kv), (length, keys))
    own = 0 if mask.variant.name == "UPPER_LEFT" else keys - length
    return (own if offset is None else min(offset, own)), None


def _mask_as_4d(mask: Any, query: Tensor, batch: tuple[int, ...], length: int, keys: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention: argument 'attn_mask' must be a tensor or None, not {type(mask).__name__}"
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(
            f"attention: argument 'attn_mask' has dtype {mask.dtype}; use bool (True = may attend) or a"
            " floating dtype (added to the logits)"
        )
    check_device("attn_mask", mask, query.device)
    target = (*query.shape[:-2], length, keys)
    target = (*batch, *target[len(batch) :])
    if not broadcasts(mask.shape, target):
        raise ValueError(
            f"attention: argument 'attn_mask' has shape {shape_of(mask)}, which does not broadcast to"
            f" {target}, the shape (..., heads, queries, keys) of the attention weights"
        )
    whole: Tensor = mask.reshape((1,) * (max(4, len(target)) - mask.dim()) + tuple(mask.shape))
    leading = whole.shape[:-3]
    if len(leading) == 1:
        return whole
    if all(size == 1 for size in leading):
        return whole.reshape(1, *whole.shape[-3:])
    return whole.expand(*batch, *whole.shape[-3:]).reshape(math.prod(batch), *whole.shape[-3:])


def _positions(positions: Any, batch: tuple[int, ...], q: Tensor, k: Tensor, rule: CallRule) -> Tensor | None:
    """Return (B|1, L + S): positions of the queries, then of the keys. None if the rule does not use them."""
    if not isinstance(positions, tuple) or len(positions) != 2:
        raise TypeError(
            "attention: argument 'positions' must be a pair of tensors (of queries, of keys), not"
            f" {type(positions).__name__}"
        )
    parts = []
    for what, x, count in zip(("queries", "keys"), positions, (q.shape[2], k.shape[2]), strict=True):
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_complex():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"attention: argument 'positions' of {what} must be a tensor of numbers, not {kind}"
            )
        x = _by_token(f"'positions' of {what}", x, batch, count)
        parts.append(x.to(q.device, compute_dtype(q.dtype)))
    if not rule.uses & {"i", "j"}:
        return None
    rows = max(len(x) for x in parts)
    return torch.cat([x.expand(rows, -1) for x in parts], dim=1)


def _parameter_table(
    rule: CallRule, params: Mapping[str, Any] | None, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return (P, H): the value of each parameter for each query head."""
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(
            f"attention: argument 'params' must be a mapping from name to value, not {type(params).__name__}"
        )
    params = params or {}
    known = sorted(rule.params)
    for name in params:
        if name not in rule.params:
            listed = ", ".join(known) or "none"
            raise ValueError(
                f"attention: argument 'params' names {name!r}, but the parameters of this mechanism are:"
                f" {listed}"
            )
    rows = [_parameter_row(name, params.get(name, rule.params[name]), heads, dtype, device) for name in known]
    return torch.stack(rows) if rows else torch.zeros(0, heads, dtype=dtype, device=device)


def _parameter_row(name: str, value: Any, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        _check_number(f"params[{name!r}]", value)
        return torch.full((heads,), float(value), dtype=dtype, device=device)
    if not value.dtype.is_floating_point:
        raise TypeError(
            f"attention: argument 'params[{name!r}]' has dtype {value.dtype}; use a floating dtype"
        )
    check_device(f"params[{name!r}]", value, device)
    if tuple(value.shape) not in ((), (heads,)):
        raise ValueError(
            f"attention: argument 'params[{name!r}]' has shape {shape_of(value)}; use a scalar or one value"
            f" per query head, shape ({heads},)"
        )
    return value.to(dtype).expand(heads)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    _check_number("scale", scale)
    return float(scale)


def _check_number(name: str, value: Any, low: float = -_LARGEST, high: float = _LARGEST) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"attention: argument '{name}' must be a number, not {type(value).__name__}")
    # Comparisons alone, which are False for NaN: torch.compile knows no math.isfinite of a symbolic number.
    if not low <= value <= high:
        allowed = "finite" if high == _LARGEST else f"between {low:g} and {high:g}"
        raise ValueError(f"attention: argument '{name}' must be {allowed}, not {value!r}")


def device_type(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"


def as_autocast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return the inputs in the dtype that autocast gives to torch's attention; the arithmetic inside keeps
    its precision."""
    kind = device_type(query)
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    query, key, value = (
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrow else x for x in (query, key, value)
    )
    return query, key, value


def check_tensors(query: Any, key: Any, value: Any) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"attention: argument '{name}' must be a tensor, not {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise TypeError(f"attention: argument '{name}' must be a dense tensor, not nested or {x.layout}")
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"attention: argument '{name}' has dtype {x.dtype}; supported are {allowed}")
        if x.dim() < 2:
            raise ValueError(
                f"attention: argument '{name}' has shape {shape_of(x)}; expected (..., heads, length, dim),"
                " at least 2-D"
            )
    for name in ("key", "value"):
        x = named[name]
        if x.dtype != query.dtype:
            raise TypeError(
                f"attention: argument '{name}' has dtype {x.dtype}, 'query' has {query.dtype}; they must"
                " match"
            )
        check_device(name, x, query.device)
        if x.dim() != query.dim():
            raise ValueError(
                f"attention: argument '{name}' has {x.dim()} dimensions (shape {shape_of(x)}), 'query' has"
                f" {query.dim()} (shape {shape_of(query)}); they must match"
            )


def check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(_mismatch("key", key, "query", query, "head dimension", -1))
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(_mismatch("value", value, "key", key, "keys", -2))


def batch_shape(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the dimensions before the heads, broadcast over the three tensors."""
    batch = list(query.shape[:-3])
    for name, x in (("key", key), ("value", value)):
        for dim, size in enumerate(x.shape[:-3]):
            if size != 1 and batch[dim] not in (1, size):
                raise ValueError(
                    f"attention: argument '{name}' has batch size {size} in dimension {dim} (shape"
                    f" {shape_of(x)}), which does not broadcast with 'query' (shape {shape_of(query)}) and"
                    f" 'key' (shape {shape_of(key)})"
                )
            batch[dim] = size if batch[dim] == 1 else batch[dim]
    return tuple(batch)


def head_count(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the head dimension of the output: () for 2-D inputs."""
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"attention: argument 'enable_gqa' must be True or False, not {enable_gqa!r}")
    if query.dim() == 2:
        return ()
    heads, shared = query.shape[-3], key.shape[-3]
    if value.shape[-3] != shared:
        raise ValueError(_mismatch("value", value, "key", key, "heads", -3))
    if heads != shared and not enable_gqa:
        raise ValueError(
            _mismatch("key", key, "query", query, "heads", -3)
            + ", unless enable_gqa=True lets groups of query heads share one key head"
        )
    if heads != shared and (shared == 0 or heads % shared):
        raise ValueError(
            f"attention: argument 'query' has {heads} heads (shape {shape_of(query)}), which is not a"
            f" multiple of the {shared} heads of 'key' (shape {shape_of(key)})"
        )
    return (heads,)


def as_4d(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    if x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
    return x if x.dim() == 4 else x.reshape(math.prod(batch), *x.shape[-3:])


def _mismatch(name: str, x: Tensor, other: str, y: Tensor, what: str, dim: int) -> str:
    size = f"{x.shape[dim]} {what}" if what.endswith("s") else f"{what} {x.shape[dim]}"
    return (
        f"attention: argument '{name}' has {size} (shape {shape_of(x)}), '{other}' has {y.shape[dim]}"
        f" (shape {shape_of(y)}); they must match"
    )


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
