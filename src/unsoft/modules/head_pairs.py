"""Heads in pairs: what mechanisms share that subtract the map of one head from that of its neighbour.

Query and key heads 2p and 2p + 1 are the two maps of pair p, and both apply to the values of both, joined.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unsoft.modules.spec import LayerSpec


def check_pairs(name: str, layer_spec: LayerSpec) -> None:
    """ValueError unless heads can be paired."""
    if layer_spec.heads % 2:
        raise ValueError(
            f"{name}: argument 'heads' must be even, since heads come in pairs, not {layer_spec.heads}"
        )


def joined(value: Tensor) -> Tensor:
    """Values (..., heads, keys, Dv) of neighbouring heads side by side: (..., pairs, keys, 2 Dv)."""
    pairs: Tensor = value.unflatten(-3, (-1, 2)).transpose(-3, -2).flatten(-2)
    return pairs


def split(out: Tensor) -> Tensor:
    """The inverse for outputs (..., pairs, queries, 2 Dv).

    >>> import torch
    >>> x = torch.arange(8.0).view(1, 2, 2, 2)
    >>> torch.equal(split(joined(x)), x)
    True
    """
    heads: Tensor = out.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-4, -3)
    return heads


def of_half(
    which: int, query: Tensor, key: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, keys and options of the first or second map of all pairs."""
    mask = options["attn_mask"]
    if isinstance(mask, Tensor) and mask.dim() >= 3 and mask.shape[-3] > 1:
        options = options | {"attn_mask": mask[..., which::2, :, :]}
    return query[..., which::2, :, :], key[..., which::2, :, :], options
