"""The argument ``fields``: values per query and per key, checked and arranged as the tables of a call."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import CallRule, broadcasts, check_device, finite_part
from unsoft.formula.arguments import BUILT_IN, SIDES

Tables = tuple[Tensor | None, Tensor | None]


def field_tables(
    rule: CallRule,
    fields: Mapping[str, Any] | None,
    q: Tensor,
    k: Tensor,
    batch: tuple[int, ...],
    scale: float,
    dtype: torch.dtype,
) -> Tables:
    """Return the fields of queries (F, B, H, L) and of keys (F, B, H or Hk, S); None where a rule has none.

    ``fields`` may contain q2 and k2 too, as squared lengths without the scale, where they are known already.
    """
    values = _checked_names(rule, fields)
    if not rule.symbols.all:
        return None, None
    by_symbol: dict[str, Tensor] = {}
    for side, x, heads in (("query", q, {q.shape[1]}), ("key", k, {q.shape[1], k.shape[1]})):
        name = BUILT_IN[side]
        if name in rule.symbols.all:
            if name in values:
                squared = _table(name, values[name], batch, {x.shape[1]}, x, dtype)
            else:
                squared = squared_lengths(x, dtype)
            by_symbol[name] = scale * squared
        for field, sides in rule.fields.items():
            letter = SIDES[side]
            if letter in SIDES[sides]:
                value = _of_side(field, values[field], sides, letter, q.shape[2] == k.shape[2])
                by_symbol[f"{field}_{letter}"] = _table(field, value, batch, heads, x, dtype)
    return _stacked(by_symbol, rule.symbols.query), _stacked(by_symbol, rule.symbols.key)


def squared_lengths(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |x|^2 along the last dimension, in ``dtype``. NaN and Inf count as 0: being in the query or the
    key, they make rows NaN anyway."""
    return finite_part(x.to(dtype)).square().sum(-1)


def _checked_names(rule: CallRule, fields: Any) -> Mapping[str, Any]:
    if fields is not None and not isinstance(fields, Mapping):
        raise TypeError(
            f"attention: argument 'fields' must be a mapping from name to tensor, not {type(fields).__name__}"
        )
    values: Mapping[str, Any] = {} if fields is None else fields
    known = {*rule.fields, *(set(BUILT_IN.values()) & set(rule.symbols.all))}
    for name in values:
        if name not in known:
            listed = ", ".join(rule.fields) or "none"
            raise ValueError(
                f"attention: argument 'fields' names {name!r}, but the fields of this mechanism are: {listed}"
            )
    for name, side in rule.fields.items():
        if name not in values:
            wanted = {"query": "(batch, heads, queries)", "key": "(batch, heads, keys)"}.get(
                side, "(batch, heads, tokens), or a pair of them for queries and keys"
            )
            raise ValueError(
                f"attention: argument 'fields' lacks {name!r}: this formula needs fields={{{name!r}: tensor}}"
                f" of shape {wanted}"
            )
    return values


def _of_side(name: str, value: Any, sides: str, letter: str, same_tokens: bool) -> Any:
    """Return the values for queries (letter i) or keys (j)."""
    if sides != "query+key":
        return value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value["ij".index(letter)]
    if not isinstance(value, Tensor) or not same_tokens:
        single = isinstance(value, Tensor)
        got = f"one tensor of shape {tuple(value.shape)}" if single else repr(type(value))
        raise ValueError(
            f"attention: argument 'fields[{name!r}]' belongs to queries and keys, so it must be a pair of"
            f" tensors (of queries, of keys), or one tensor if both are the same tokens, not {got}"
        )
    return value


def _table(
    name: str, value: Any, batch: tuple[int, ...], heads: set[int], like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (B, one of ``heads``, length of ``like``), in the dtype of the arithmetic."""
    what = f"attention: argument 'fields[{name!r}]'"
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what} must be a tensor of a floating dtype, not {got}")
    check_device(f"fields[{name!r}]", value, like.device)
    length, shape = like.shape[2], value.shape
    own_heads = shape[-2] if len(shape) > 1 else 1
    fits = (
        0 < len(shape) <= len(batch) + 2
        and shape[-1] == length
        and (own_heads == 1 or own_heads in heads)
        and broadcasts(shape[:-2], batch)
    )
    if not fits:
        allowed = " or ".join(str((*batch, count, length)) for count in sorted(heads))
        raise ValueError(f"{what} has shape {tuple(value.shape)}, which does not broadcast to {allowed}")
    count = own_heads if own_heads in heads else max(heads)
    return value.to(dtype).expand(*batch, count, length).reshape(like.shape[0], count, length)


def _stacked(by_symbol: dict[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    """Return the fields in the order of ``names``. If some are per query head and some per key head, all are
    repeated for each query head."""
    if not names:
        return None
    tables = [by_symbol[name] for name in names]
    if len(tables) == 1:
        return tables[0][None]
    heads = max(x.shape[1] for x in tables)
    return torch.stack([x.repeat_interleave(heads // x.shape[1], dim=1) for x in tables])
