"""Which keys of a call there are, and where: the points that the geometry of magnitude is taken from."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.call import Call, compute_dtype
from unsoft.magnitude.points import Points
from unsoft.modules.module import Inputs


def key_points(call: Call, inputs: Inputs, log_t: Tensor) -> Points:
    """The keys, or those that were given for their geometry, scaled; a key that no row may see, or that is
    not finite, is not there.
    """
    given = inputs.geometry_keys
    keys = call.k if given is None else _checked_geometry(given, inputs.key, call.k)
    present = _seen_by_some_row(call)
    keys = keys.to(compute_dtype(keys.dtype))
    finite = keys.isfinite().all(-1)
    if torch.compiler.is_compiling() or not bool(finite.all()):
        present = finite if present is None else present & finite
        keys = torch.where(finite[..., None], keys, 0.0)
    if present is not None:
        keys = torch.where(present[..., None], keys, 0.0)
        present = present.expand(keys.shape[:-1]).flatten(0, 1)
    scale = key_scale(log_t, keys.shape[1], keys.shape[-1], keys.dtype)
    return Points((keys * scale).flatten(0, 1), present, keys.shape[:2])


def key_scale(log_t: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """sqrt(t / d) of each key head, (heads, 1, 1)."""
    return (by_key_head(log_t, heads).to(dtype).exp() / width).sqrt()[:, None, None]


def by_key_head(parameter: Tensor, heads: int) -> Tensor:
    """One value for each key head: the mean of those of the query heads that share it."""
    if len(parameter) == heads:
        return parameter
    if heads == 0 or len(parameter) % heads:
        raise ValueError(
            f"magnitude: argument 'key' has {heads} heads; the mechanism was made for {len(parameter)}"
        )
    mean: Tensor = parameter.unflatten(0, (heads, -1)).mean(-1)
    return mean


def _seen_by_some_row(call: Call) -> Tensor | None:
    """Bool (B|1, Hk|1, S): may any row see the key?"""
    if call.visible is None:
        return None
    if call.visible.shape[2] > 1 and call.causal_offset is None:
        raise ValueError(
            "magnitude: argument 'attn_mask' differs from row to row; the gates of keys would tell a row of"
            " keys that it must not see. Pass is_causal=True, or a mask of whole keys (..., 1, S)"
        )
    seen = call.visible.any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.k.shape[1], -1)).any(2)
    return seen


def _checked_geometry(keys: Tensor, key: Tensor, k: Tensor) -> Tensor:
    if not isinstance(keys, Tensor) or keys.shape[:-1] != key.shape[:-1]:
        got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(
            f"magnitude: argument 'geometry_keys' is {got}; expected a tensor (..., key heads, S, width) like"
            f" 'key', {tuple(key.shape)}"
        )
    return keys.expand(*key.shape[:-1], keys.shape[-1]).reshape(*k.shape[:3], keys.shape[-1])
