"""A formula as a module, with its short way through decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.engines.native.step import Field, prepare_step
from unsoft.engines.pointwise import run_formula
from unsoft.formula import Formula
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.field_source import (
    FieldCache,
    FieldSource,
    Tokens,
    Values,
    keys_there,
    with_cached_keys,
)
from unsoft.modules.module import Inputs, Mechanism
from unsoft.modules.spec import LayerSpec

SHORT_OPTIONS = {"scale", "enable_gqa"}
"""The options that :func:`short_step` knows."""


def short_step(
    formula: Formula,
    cache: KeyValueCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
    field: Field | None = None,
) -> Tensor | None:
    """A plain step of decoding by one call of compiled code; None, and nothing done,
    if it has to take the general way."""
    buffers, options = cache.buffers, (scale, enable_gqa)
    step = cache.step
    if step is None or not step.serves(formula, buffers, options, field):
        step = cache.step = prepare_step(query, key, value, formula, scale, enable_gqa, buffers, field)
        if step is None:
            return None
    out = step.run(query, key, value, cache.length, field)
    if out is None:
        cache.step = None  # inputs of another shape, or a buffer that is full
    else:
        cache.length += key.shape[2]
    return out


class Pointwise(Mechanism):
    """A formula as a module; its parameters are learnable, one value per head.

    Its fields, if it has any, come from ``source``, or from the caller.

    >>> from unsoft.modules.registry import resolve
    >>> layer = Pointwise(resolve("cog"), LayerSpec(heads=2, head_dim=4))
    >>> layer(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)).shape
    torch.Size([1, 2, 3, 4])
    """

    formula_names = ("formula",)

    def __init__(self, formula: Formula, layer_spec: LayerSpec, source: FieldSource | None = None) -> None:
        super().__init__(layer_spec)
        self.formula = formula
        self.source = source
        self.values = nn.ParameterDict(
            {
                name: nn.Parameter(torch.full((layer_spec.heads,), start))
                for name, start in formula.params.items()
            }
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        cache: Cache | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :meth:`Mechanism.forward`. A plain step of decoding takes the short way."""
        plain = not args and not len(self.values) and options.keys() <= SHORT_OPTIONS
        if plain and type(cache) is KeyValueCache and not torch.compiler.is_compiling():
            out = short_step(self.formula, cache, query, key, value, **options)
            if out is not None:
                return out
        return super().forward(query, key, value, *args, cache=cache, **options)

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        params = dict(self.values) if len(self.values) else None
        options = inputs.options
        if self.source is not None and "fields" not in options:
            options = options | {"fields": self._computed(inputs)}
        return run_formula(
            inputs.query,
            inputs.key,
            inputs.value,
            self.formula,
            return_weights=inputs.return_weights,
            params=params,
            **options,
        )

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(cache, FieldCache):
            cache.check(inputs.key)
            given = inputs.options.get("fields")
            if self.source is not None:
                given = self._computed(inputs, cache)
            fields = with_cached_keys(self.formula, given or {}, cache, inputs.key)
            out = self._short_step(inputs, cache, fields)
            if out is not None:
                return out
            inputs = inputs.change(options=inputs.options | {"fields": fields})
        return super().attend_cached(inputs, cache)

    def _short_step(self, inputs: Inputs, cache: FieldCache, fields: Mapping[str, Values]) -> Tensor | None:
        """A plain step whose formula knows one number of queries and of keys; None, and nothing done, if it
        has to take the general way."""
        names, options = self.formula.fields, inputs.options
        one = list(names.values()) == ["query+key"] and len(self.formula.symbols.all) == 2
        if not one or len(self.values) or inputs.return_weights or torch.compiler.is_compiling():
            return None
        if options["attn_mask"] is not None or options["positions"] is not None:
            return None
        if options["engine"] not in ("auto", "native") or options["dropout_p"] != 0.0:
            return None
        (name,) = names
        of_queries = fields[name][0] if name in fields else None
        if type(of_queries) is not Tensor:
            return None
        field = Field(of_queries, cache.buffer(name))
        scale, enable_gqa = options["scale"], options["enable_gqa"]
        return short_step(
            self.formula, cache, inputs.query, inputs.key, inputs.value, scale, enable_gqa, field
        )

    def _computed(self, inputs: Inputs, cache: FieldCache | None = None) -> Mapping[str, Values]:
        """The fields of the call's tokens, by the source."""
        assert self.source is not None
        alignment = inputs.options["is_causal"] if cache is None else "lower_right"
        if self.source.causal_only and alignment is False:
            raise ValueError(
                "argument 'is_causal' must be set: the fields of this mechanism mean something only where"
                " queries look back"
            )
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
        """A sink takes exp(-4) = 0.02 of the mass; fields are where their source does least."""
        if "sink" in self.values:
            self.values["sink"].fill_(-4.0)
        if self.source is not None:
            self.source.open_start()

    def extra_repr(self) -> str:
        return self.formula.name or str(self.formula.weight)
