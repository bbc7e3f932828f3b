"""Attention as a module: what every mechanism is once it belongs to a layer of a network.

A mechanism that is a formula needs no module: ``unsoft.attention`` runs it. Mechanisms with weights of their
own, with a state, or around another mechanism are subclasses of :class:`Mechanism`; a formula becomes one too
(pointwise.py), so that ``unsoft.mechanism(name, heads=, head_dim=)`` gives the same kind of object for
every name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from unsoft.engines.arguments import as_autocast
from unsoft.engines.threads import threads_are_used
from unsoft.formula import Formula
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.field_source import (
    Values,
)
from unsoft.modules.spec import LayerSpec


class Inputs(NamedTuple):
    """The arguments of one call, after a cache has been read and filled."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None = None
    geometry_keys: Tensor | None = None
    first_value: Tensor | None = None
    return_weights: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    """attn_mask, dropout_p, is_causal, scale, enable_gqa, engine, positions."""

    def change(self, **changes: Any) -> Inputs:
        return self._replace(**changes)

    def as_autocast(self) -> Inputs:
        """Return the inputs as every engine takes them under autocast."""
        query, key, value = as_autocast(self.query, self.key, self.value)
        return self._replace(query=query, key=key, value=value)


class Mechanism(nn.Module):
    """Base class. A subclass says how it attends (:meth:`attend`) and, if it keeps more than keys and values,
    its cache.

    The rest is what others ask of a mechanism without knowing which it is;
    a subclass changes what is different for it.
    """

    formula_names: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold the formulas it runs; they may be replaced (:meth:`replace_formulas`)."""
    key_head_multiple: ClassVar[int] = 1
    """The number of key heads must be a multiple of this."""
    needs_first_value: bool = False
    """Does it want the values of the network's first layer (``first_value=``)?"""
    sees_itself: bool = True
    """Does a causal row see the key of its own token?"""
    needs_all_keys: ClassVar[bool] = False
    """Does it look at all keys at once, so that a cache that shows some of them,
    or a mask that hides some from some rows, will not do?"""

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__()
        self.layer_spec = layer_spec

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool | str = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        engine: str = "auto",
        return_weights: bool = False,
        hidden: Tensor | None = None,
        geometry_keys: Tensor | None = None,
        first_value: Tensor | None = None,
        cache: Cache | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
        fields: Mapping[str, Values] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The arguments of :func:`unsoft.attention`, and

        hidden
            The hidden state (..., length, hidden_dim), for mechanisms that compute a factor from it;
            the query stands in for it when absent.
        geometry_keys
            Keys (..., key heads, S, any width) for mechanisms that look at the distances between keys, if
            those should not be the keys that are attended to: rotary embedding makes their distances depend
            on position.
        first_value
            The values of the network's first layer for the same tokens, for mechanisms that add them to their
            own (``needs_first_value``).
        cache
            From :meth:`new_cache`. The keys and values given are those of new tokens; the queries see all
            tokens so far, causally. Works for whole prompts, chunks and single tokens alike. Then
            ``positions`` are those of the new queries and of all keys, and ``fields`` those of new tokens.
        """
        threads_are_used()
        options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "engine": engine,
            "positions": positions,
        }
        if fields is not None:
            if not self.takes_fields:
                raise ValueError(
                    "argument 'fields' is for formulas that declare fields and get them from the caller,"
                    f" which {type(self).__name__} does not"
                )
            options["fields"] = fields
        inputs = Inputs(query, key, value, hidden, geometry_keys, first_value, return_weights, options)
        if cache is None:
            return self.attend(inputs)
        return self.attend_cached(inputs, cache)

    @abstractmethod
    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        """Output, and weights if asked for."""

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        """One step of decoding; here for mechanisms that need all keys and values."""
        if not isinstance(cache, KeyValueCache):
            raise TypeError(
                f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another"
                " kind"
            )
        keys, values = cache.append(inputs.key, inputs.value)
        options = inputs.options | {"is_causal": "lower_right"}
        return self.attend(inputs.change(key=keys, value=values, options=options))

    def new_cache(self, batch: int) -> Cache:
        """An empty cache for decoding ``batch`` sequences."""
        return KeyValueCache(batch)

    @property
    def causal_only(self) -> bool:
        """Does it look back only, so that ``is_causal`` must be set?"""
        return False

    @property
    def aligned(self) -> bool:
        """Must a row know which key is that of its own token, so that ``is_causal`` has to tell where there
        are more keys than queries?"""
        return self.causal_only

    @property
    def query_heads(self) -> int:
        """How many query heads it wants for ``layer_spec.heads`` heads of output."""
        return self.layer_spec.heads

    @property
    def parts(self) -> list[Mechanism]:
        """The mechanism and those inside it."""
        return [part for part in self.modules() if isinstance(part, Mechanism)]

    @property
    def formulas(self) -> list[Formula]:
        """All formulas that it and the mechanisms inside it run; none for linear attention."""
        return [getattr(part, name) for part in self.parts for name in part.formula_names]

    def replace_formulas(self, change: Callable[[Formula], Formula]) -> None:
        """Puts ``change(formula)`` in the place of every formula."""
        for part in self.parts:
            for name in part.formula_names:
                setattr(part, name, change(getattr(part, name)))

    def open_start(self) -> None:
        """Moves its own parameters to where it does what plain attention does, if there is such a place:
        for trained models."""

    @property
    def uses_positions(self) -> bool:
        """Does the result depend on where tokens stand, and not only on who sees whom?"""
        return any(formula.uses & {"i", "j"} for formula in self.formulas)

    @property
    def takes_fields(self) -> bool:
        """Must the caller give fields?"""
        return any(part.takes_fields for part in self.parts if part is not self)

    @property
    def uses_hidden(self) -> bool:
        """Can a part of it compute something from the hidden state that the query is a poor stand-in for?"""
        return any(part.uses_hidden for part in self.parts if part is not self)

    @property
    def mass_gate(self) -> str | None:
        """How a gate on the mass of keys gets in: by a "mask" of its formulas, a "column" of the values,
        or not at all (None)."""
        return "mask" if self.formulas else None

    def set_key_gate(self, *, beta: float, gamma: float, t: float) -> bool:
        """Puts these numbers into a gate sigmoid(beta w + gamma) on every key, w its weight in the geometry
        of the keys at the scale t, and says whether there is one. Here there is none."""
        return False

    @property
    def clone_theory(self) -> dict[str, Any] | None:
        """Keywords of :func:`unsoft.theory.magnitude_hijack` if that says how much attention clones of a key
        get at the start; otherwise None."""
        return None


class Wrapper(Mechanism):
    """A mechanism that stands around another one and keeps what that one keeps;
    base of the module modifiers."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__(inner.layer_spec)
        self.inner = inner

    @property
    def query_heads(self) -> int:
        return self.inner.query_heads

    @property
    def causal_only(self) -> bool:
        return self.inner.causal_only

    @property
    def uses_positions(self) -> bool:
        return self.inner.uses_positions

    @property
    def mass_gate(self) -> str | None:
        return self.inner.mass_gate

    def set_key_gate(self, *, beta: float, gamma: float, t: float) -> bool:
        return self.inner.set_key_gate(beta=beta, gamma=gamma, t=t)

    def new_cache(self, batch: int) -> Cache:
        return self.inner.new_cache(batch)
