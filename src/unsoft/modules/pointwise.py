"""A formula as a module, with its prepared decoding step, and the modules and caches of its fields.

A field is a number of each token that a formula uses besides the logit. A :class:`FieldSource` computes
fields from the tokens; without one, the caller passes them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from unsoft.engines.call import Call, compute_dtype
from unsoft.engines.field_tables import squared_lengths
from unsoft.engines.native.step import Field
from unsoft.formula import Formula
from unsoft.formula.arguments import BUILT_IN
from unsoft.formula.expr import symbol
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.module import Inputs, Mechanism, Result, Values
from unsoft.modules.registry import builtin
from unsoft.modules.spec import Family, LayerSpec

_FACTOR = "unsoft_factor"


class Tokens(NamedTuple):
    """New tokens, from which a :class:`FieldSource` computes their fields."""

    query: Tensor
    """(..., heads, L, D)"""
    key: Tensor
    """(..., key heads, T, D); without a cache, all keys."""
    hidden: Tensor | None
    """(..., L, hidden_dim), if the call brought it."""
    past: Mapping[str, Tensor]
    """Fields of the keys before these, by name, (..., heads, tokens); empty without a cache."""
    offset: int
    """Query i belongs to the token of key i + offset of these keys."""
    there: Tensor | None = None
    """Bool, broadcastable to (..., heads, T): False for keys that the mask hides from every row (padding)."""


def keys_there(mask: Any, keys: int, cached: bool) -> Tensor | None:
    """Return which of the last ``keys`` keys a mask lets some row see; None = all.

    None also for a mask per row with a cache: a key hidden from these rows may be visible to later ones.

    >>> import torch
    >>> keys_there(torch.tensor([[True, False, True], [False, False, True]]), 3, cached=False)
    tensor([ True, False,  True])
    """
    if (
        not isinstance(mask, Tensor)
        or mask.shape[-1] == 1
        or (cached and mask.dim() > 1 and mask.shape[-2] > 1)
    ):
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return (seen.any(-2) if seen.dim() > 1 else seen)[..., -keys:]


class FieldSource(nn.Module):
    """Base class of modules that compute fields; made as ``cls(layer_spec, **options)``.

    >>> import torch, unsoft
    >>> class Loudness(FieldSource):
    ...     "Keys with larger norm get more weight."
    ...     def __init__(self, layer_spec):
    ...         super().__init__(layer_spec)
    ...         self.gain = nn.Parameter(torch.ones(()))
    ...     def forward(self, tokens):
    ...         return {"loud": self.gain * tokens.key.norm(dim=-1)}
    >>> formula = unsoft.Formula("exp(s + loud_j - m)", "exp(s + loud_j - m)", "s + loud_j",
    ...                          fields={"loud": "key"})
    >>> layer = unsoft.mechanism(formula, heads=2, head_dim=4, fields_from=Loudness)
    >>> layer(*(torch.randn(1, 2, 3, 4) for _ in range(3))).shape
    torch.Size([1, 2, 3, 4])
    """

    causal_only: ClassVar[bool] = False
    """True if its fields are defined only where queries look back."""
    uses_hidden: ClassVar[bool] = False
    """True if it uses the hidden state, which it gets if ``layer_spec.hidden_dim`` is set."""

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__()
        self.layer_spec = layer_spec

    @abstractmethod
    def forward(self, tokens: Tokens) -> Mapping[str, Values]:
        """Return the fields of these tokens by name, as ``unsoft.attention(fields=)`` takes them."""

    def open_start(self) -> None:
        """Set its parameters so that the mechanism does what plain attention does, if possible."""


def _no_source(layer_spec: LayerSpec) -> None:
    """Take no options: the engines compute the lengths of queries and keys themselves."""


def field_family(
    name: str,
    formula: Formula,
    *,
    fields_from: Callable[..., FieldSource] | None = None,
    definition: Callable[..., Any] | None = None,
) -> None:
    """Register a formula whose fields a module computes, or which only uses the lengths of queries and
    keys."""
    summary = formula.summary or str(formula.weight)

    source = fields_from or _no_source

    def build(layer_spec: LayerSpec, base: Formula, **options: Any) -> Mechanism:
        return Pointwise(base, layer_spec, source(layer_spec, **options))

    family = Family(name, build, summary, formula.properties, formula, formula.paper, takes=source)
    builtin(name, family, definition=definition)


class FieldCache(KeyValueCache):
    """Keys, values, and the fields of keys.

    >>> import torch
    >>> cache = FieldCache(batch=1)
    >>> fields = cache.append_fields({"c": torch.zeros(1, 2, 3)})
    >>> keys, values = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    >>> cache.append_fields({"c": torch.ones(1, 2, 1)})["c"]
    tensor([[[0., 0., 0., 1.],
             [0., 0., 0., 1.]]])
    """

    only_keys_and_values = False

    def __init__(self, batch: int, keeps_more: bool = True) -> None:
        """``keeps_more``: False if its fields can be computed again from the keys."""
        super().__init__(batch)
        self.only_keys_and_values = not keeps_more  # type: ignore[misc]
        self._fields: dict[str, Tensor] = {}

    @property
    def keeps_keys(self) -> bool:
        return True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *self._fields.values())

    @property
    def fields(self) -> dict[str, Tensor]:
        """Fields (batch, heads, length) by name."""
        return {name: x[..., : self.length, 0] for name, x in self._fields.items()}

    def append_fields(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the fields of new keys and return those of all keys. The keys must be appended next."""
        held = {
            name: self._appended(self._fields.get(name), x[..., None], self._end(x))
            for name, x in new.items()
        }
        self._fields = held  # a new dictionary, so that snapshots keep theirs
        return {name: x[..., : self._end(new[name]), 0] for name, x in held.items()}

    def buffer(self, name: str) -> Tensor:
        """Return the buffer (batch, heads, room) of a field, those that :meth:`append_fields` has added
        included."""
        return self._fields[name][..., 0]

    def _end(self, new: Tensor) -> int:
        return self.length + new.shape[-1]

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._fields = {name: x[index] for name, x in self._fields.items()}


def with_cached_keys(
    formula: Formula, new: Mapping[str, Values], cache: FieldCache, key: Tensor
) -> dict[str, Values]:
    """Return the fields of a step: those of new queries, and those of all keys, which the cache then
    holds."""
    sides = {name: side for name, side in formula.fields.items() if name in new}  # run_formula checks names
    both = {name: x if isinstance(x, tuple) else (x, x) for name, x in new.items()}
    of_queries: dict[str, Values] = {name: both[name][0] for name in sides if "query" in sides[name]}
    of_keys = {name: both[name][1] for name in sides if "key" in sides[name]}
    if BUILT_IN["key"] in formula.symbols.key:
        of_keys[BUILT_IN["key"]] = squared_lengths(key, compute_dtype(key.dtype))
    held = cache.append_fields({name: _with_batch(x, key) for name, x in of_keys.items()})
    together = {name: (both[name][0], x) for name, x in held.items() if name in of_queries}
    return {**of_queries, **held, **together}


def _with_batch(field: Tensor, key: Tensor) -> Tensor:
    """Expand a field to (batch, heads or 1, tokens), as a cache keeps it."""
    heads = field.shape[-2] if field.dim() > 1 else 1
    return field.expand(key.shape[0], heads, key.shape[2])


@lru_cache(maxsize=64)
def _scaled(formula: Formula) -> Formula:
    """Return the formula with one more field, a factor of the key's weight and not of its mass."""
    weight = formula.weight * symbol(f"{_FACTOR}_j")
    return formula.change(weight=weight, fields={**formula.fields, _FACTOR: "key"})


class Pointwise(Mechanism):
    """A formula as a module; its parameters are learnable, one value per head.

    Its fields, if it has any, come from ``source``, or from the caller.

    >>> from unsoft.modules.registry import resolve
    >>> layer = Pointwise(resolve("cog"), LayerSpec(heads=2, head_dim=4))
    >>> layer(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)).shape
    torch.Size([1, 2, 3, 4])
    """

    takes_window = True

    formula_names = ("formula",)

    def __init__(self, formula: Formula, layer_spec: LayerSpec, source: FieldSource | None = None) -> None:
        super().__init__(layer_spec)
        self.formula = formula
        self.source = source
        self.packs_documents = source is None
        """False if fields are computed from all tokens, which sums over them would mix."""
        self.values = nn.ParameterDict(
            {
                name: nn.Parameter(torch.full((layer_spec.heads,), start))
                for name, start in formula.params.items()
            }
        )

    def attend(self, inputs: Inputs) -> Result:
        inputs, params = self._completed(inputs)
        return inputs.run(self.formula, params)

    def attend_scaled(self, inputs: Inputs, factor: Tensor) -> Result:
        """Return the output with weights times ``factor`` (..., key heads, keys).

        The kernel multiplies in float32. Half-precision values that were multiplied before would be rounded
        once more, which a peaked row sees in full: 1.4 times the error.
        """
        inputs, params = self._completed(inputs)
        fields = {**inputs.options.get("fields", {}), _FACTOR: factor}
        return inputs.with_options(fields=fields).run(_scaled(self.formula), params)

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        """Return the checked call of the formula, and the leading dimensions of its results."""
        inputs, params = self._completed(inputs)
        return inputs.checked(self.formula, params=params)

    def _completed(self, inputs: Inputs) -> tuple[Inputs, dict[str, Tensor] | None]:
        """Return the inputs with the fields of the source, and the parameters."""
        if self.source is not None and "fields" not in inputs.options:
            inputs = inputs.with_options(fields=self._computed(inputs))
        return inputs, dict(self.values) if len(self.values) else None

    @property
    def prepares_steps(self) -> bool:
        return not self.formula.symbols.all and not len(self.values)

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        return self._step(inputs, cache) if type(cache) is KeyValueCache else None

    def _step(self, inputs: Inputs, cache: KeyValueCache, field: Field | None = None) -> Tensor | None:
        if len(self.values):
            return None
        scale, grouped = inputs.options["scale"], inputs.options["enable_gqa"]
        return cache.step_by(self.formula, *inputs.tensors, scale, grouped, field)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        if isinstance(cache, FieldCache):
            cache.check(inputs.key)
            new = inputs.options.get("fields") if self.source is None else self._computed(inputs, cache)
            fields = with_cached_keys(self.formula, new or {}, cache, inputs.key)
            out = self._step_with_field(inputs, cache, fields) if inputs.is_plain else None
            if out is not None:
                return out
            inputs = inputs.with_options(fields=fields)
        return super().attend_cached(inputs, cache)

    def _step_with_field(
        self, inputs: Inputs, cache: FieldCache, fields: Mapping[str, Values]
    ) -> Tensor | None:
        """Return the output of the prepared step, which takes one field of queries and keys; None for others.

        Not a :meth:`prepared_step`: the fields of the new keys are in the cache by now, and computing them
        twice would cost more than the step.
        """
        names = self.formula.fields
        if list(names.values()) != ["query+key"] or len(self.formula.symbols.all) != 2:
            return None
        (name,) = names
        of_queries = fields[name][0] if name in fields else None
        if type(of_queries) is not Tensor:
            return None
        return self._step(inputs, cache, Field(of_queries, cache.buffer(name)))

    def _computed(self, inputs: Inputs, cache: FieldCache | None = None) -> Mapping[str, Values]:
        """Return the fields that the source computes for the tokens of a call."""
        assert self.source is not None
        alignment = inputs.options["is_causal"] if cache is None else "lower_right"
        offset = inputs.key.shape[-2] - inputs.query.shape[-2] if alignment == "lower_right" else 0
        past = {} if cache is None else cache.fields
        there = keys_there(inputs.options["attn_mask"], inputs.key.shape[-2], cache is not None)
        fields: Mapping[str, Values] = self.source(
            Tokens(inputs.query, inputs.key, inputs.hidden, past, offset, there)
        )
        return fields

    def new_cache(self, batch: int) -> Cache:
        if not self.formula.symbols.key:
            return super().new_cache(batch)
        # Fields that are computed from the keys alone can be computed again.
        from_keys = not self.formula.fields or (self.source is not None and not self.uses_hidden)
        return FieldCache(batch, keeps_more=not from_keys)

    @property
    def takes_fields(self) -> bool:
        return bool(self.formula.fields) and self.source is None

    @property
    def uses_hidden(self) -> bool:
        return self.source is not None and self.source.uses_hidden

    @property
    def causal_only(self) -> bool:
        return self.source is not None and self.source.causal_only

    @torch.no_grad()
    def open_start(self) -> None:
        """Give a sink exp(-4) = 0.02 of the mass, and open the source of the fields."""
        if "sink" in self.values:
            self.values["sink"].fill_(-4.0)
        if self.source is not None:
            self.source.open_start()

    def extra_repr(self) -> str:
        return self.formula.name or str(self.formula.weight)
