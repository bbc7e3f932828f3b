"""``unsoft.mechanism``: any mechanism, by name, as a module for one layer of a network."""

import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.modules.module import Mechanism
from unsoft.modules.names import MechanismName
from unsoft.modules.registry import resolve
from unsoft.modules.spec import LayerSpec, MechanismSpec
from unsoft.tracing import outside_transforms

_FIRST_LAST = re.compile(r"\s*first_last\(([^()]*(?:\([^()]*\))?[^()]*)\)\s*\+(.*)", re.DOTALL)


def mechanism(
    name: MechanismName | str | Formula,
    *,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    hidden_dim: int | None = None,
    layer: int = 0,
    layers: int | None = None,
    positions: int | None = None,
    **options: Any,
) -> Mechanism:
    """Return the mechanism called ``name`` (or a formula) as an ``nn.Module``.

    ``heads`` and ``head_dim`` are those of the queries' layer; ``value_dim`` that of the values if it
    differs; ``hidden_dim`` the width of ``hidden=``, for mechanisms that compute a factor from the hidden
    state (without it they use the query); ``layer`` is the number of its layer, of ``layers``;
    ``positions`` the length that the model is made for. Further keywords go to the mechanism's own class.

    ``"first_last(softmax)+cog"`` keeps softmax in the first and last layer, as Cog's authors prescribe.

    >>> import torch
    >>> layer = mechanism("logn+cog", heads=2, head_dim=8)
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> whole = layer(q, k, v, is_causal=True)
    >>> cache = layer.new_cache(batch=1)
    >>> steps = [layer(q[:, :, [t]], k[:, :, [t]], v[:, :, [t]], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, dim=2), whole, atol=1e-6)
    True
    >>> name = "first_last(softmax)+cog"
    >>> [mechanism(name, heads=2, head_dim=8, layer=t, layers=3).extra_repr() for t in range(3)]
    ['softmax', 'cog', 'softmax']
    """
    layer_spec = LayerSpec(heads, head_dim, value_dim, hidden_dim, layer, layers, positions)
    if isinstance(name, str) and (match := _FIRST_LAST.fullmatch(name)):
        if layers is None:
            raise ValueError("mechanism: first_last(...) depends on the layer: pass layer= and layers=")
        name = match[1] if layer in (0, layers - 1) else match[2]
    spec = resolve(name)
    if isinstance(spec, Formula):
        spec = MechanismSpec(spec.name or "this formula", None, spec)
    return spec.build(layer_spec, **options)


def names_in(text: str) -> tuple[str, ...]:
    """Return the registered mechanisms that a text names for the layers of a model.

    >>> names_in("first_last(softmax)+cog"), names_in("logn+cog")
    (('softmax', 'cog'), ('logn+cog',))
    """
    match = _FIRST_LAST.fullmatch(text)
    return (text,) if match is None else (match[1], match[2])


def mechanism_like(spec: MechanismSpec, query: Tensor, key: Tensor, value: Tensor) -> Mechanism:
    """Return the mechanism with its initial parameters, sized by tensors, as ``unsoft.attention`` runs names
    that are not formulas."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() < 3:
            raise ValueError(
                f"attention: argument '{name}' must be a tensor (..., heads, length, dim) for {spec.name!r}"
            )
    return _initial_module(spec, query.shape[-3], query.shape[-1], value.shape[-1], query.device)


@lru_cache(maxsize=64)
def _initial_module(
    spec: MechanismSpec, query_heads: int, head_dim: int, value_dim: int, device: torch.device
) -> Mechanism:
    # A start that is random is the same in every call, and costs the caller nothing. It is kept for later
    # calls, so torch.func transforms around this one have no part in it.
    with torch.random.fork_rng(devices=[]), outside_transforms():
        torch.manual_seed(0)
        module = spec.build(LayerSpec(query_heads, head_dim, value_dim))
        if module.query_heads != query_heads:  # several queries for each head of the output
            if query_heads % (module.query_heads // query_heads):
                raise ValueError(
                    f"attention: argument 'query' has {query_heads} heads; {spec.name!r} needs them in pairs"
                )
            module = spec.build(
                LayerSpec(query_heads * query_heads // module.query_heads, head_dim, value_dim)
            )
        return module.to(device).eval()
