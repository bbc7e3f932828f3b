"""Base class of mechanisms as modules, and the inputs of one call.

A mechanism that is a formula needs no module: ``unsoft.attention`` runs it. Mechanisms with weights of their
own, with a state, or around another mechanism are subclasses of :class:`Mechanism`; a formula becomes one too
(pointwise.py), so that ``unsoft.mechanism(name, heads=, head_dim=)`` gives the same kind of object for
every name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from unsoft.engines.arguments import (
    as_autocast,
    checked_call,
    checked_key_lengths,
    from_cu_seqlens,
    packed_documents,
)
from unsoft.engines.call import NO_NEEDS, Call, CallRule, compute_dtype, finite_part
from unsoft.engines.native.direct import observed
from unsoft.engines.pointwise import run_formula
from unsoft.engines.threads import threads_are_used
from unsoft.formula import Formula
from unsoft.modules.cache import Cache, KeyValueCache, of_kind
from unsoft.modules.spec import LayerSpec

Result = Tensor | tuple[Tensor, Tensor]
"""Output of a call, and the weights if asked for."""
AnyResult = TypeVar("AnyResult", bound=Result)
Values = Tensor | tuple[Tensor, Tensor]
"""A field of tokens: (..., heads, length) of queries or of keys, or a pair of both."""


_TENSORS = ("query", "key", "value")
STRUCTURE = {"window", "documents", "cu_seqlens", "key_lengths"}
"""Arguments that say which keys a row may see by two numbers per row, without a mask."""


class Inputs(NamedTuple):
    """The arguments of one call, after a cache has been read and filled."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None = None
    geometry_keys: Tensor | None = None
    first_value: Tensor | None = None
    return_weights: bool = False
    wide: bool = False
    """True: half-precision inputs may give an output in float32, for callers that compute further."""
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    """attn_mask, dropout_p, is_causal, scale, enable_gqa, engine, positions; and, if given, fields and the
    arguments of :data:`STRUCTURE`."""

    def change(self, **changes: Any) -> Inputs:
        return self._replace(**changes)

    def with_options(self, **changes: Any) -> Inputs:
        """Return the inputs with some options replaced."""
        return self._replace(options=self.options | changes)

    def checked(self, rule: CallRule = NO_NEEDS, **changes: Any) -> tuple[Call, torch.Size]:
        """Return the checked call of a rule, and the leading dimensions of its results."""
        options = {name: x for name, x in self.options.items() if name != "engine"} | changes
        call, leading = checked_call(*self.tensors, rule, **options)
        return (replace(call, wide=True) if self.wide else call), leading

    def run(self, formula: Formula, params: Mapping[str, Tensor] | None = None) -> Result:
        """Return the output of a formula, and the weights if asked for."""
        return run_formula(*self.tensors, formula, params=params, **self.all_options)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def all_options(self) -> dict[str, Any]:
        """The options, and those that say which results are needed."""
        return self.options | {"return_weights": self.return_weights, "wide": self.wide}

    @property
    def is_plain(self) -> bool:
        """True if compiled code may decode these tokens: no mask, no dropout, no weights asked for, and
        nothing (``torch.compile``, autocast, a transform) that has to see torch's own operations.

        ``hidden``, ``geometry_keys`` and ``fields`` do not matter here: they are the business of the
        mechanism that reads them.
        """
        options = self.options
        return (
            options["attn_mask"] is None
            and options["positions"] is None
            and options["dropout_p"] == 0.0
            and not STRUCTURE & options.keys()
            and options["engine"] in ("auto", "native")
            and not self.return_weights
            and not torch.compiler.is_compiling()
            and not observed()
        )

    @property
    def heads_fit(self) -> bool:
        """True if every query head reads one key head."""
        heads, shared = self.query.shape[-3], self.key.shape[-3]
        return heads == shared or bool(self.options["enable_gqa"] and shared and heads % shared == 0)

    def for_query_heads(self, name: str) -> Inputs | None:
        """Return the inputs in the dtype of the arithmetic, with a key and a value for every query head and a
        finite hidden state. None if there is no key, or if they do not fit, which an engine then says."""
        same = self.query.dtype == self.key.dtype == self.value.dtype
        keys = self.key.shape[-2]
        if not self.heads_fit or not same or not keys or self.value.shape[-2] != keys:
            return None
        check_hidden(name, self.hidden, keys)
        wide, every = compute_dtype(self.query.dtype), self.query.shape[-3] // self.key.shape[-3]
        key, value = (x.to(wide).repeat_interleave(every, -3) for x in (self.key, self.value))
        # What is not finite makes the rows that see it NaN, not what is summed over all tokens after it.
        hidden = None if self.hidden is None else finite_part(self.hidden.to(wide))
        inputs = self.change(query=self.query.to(wide), key=key, value=value, hidden=hidden)
        return inputs.with_options(enable_gqa=False)

    def rounded(self, result: AnyResult) -> AnyResult:
        """Return a result that was computed from wide ones as the caller gets it."""
        if self.wide:
            return result
        dtype = self.query.dtype
        if isinstance(result, tuple):
            return cast(AnyResult, tuple(x.to(dtype) for x in result))
        return cast(AnyResult, result.to(dtype))

    def as_autocast(self) -> Inputs:
        """Return the inputs as every engine takes them under autocast."""
        return self._replace(**dict(zip(_TENSORS, as_autocast(*self.tensors), strict=True)))


class Derived:
    """A value computed from parameters, kept for as long as they stay the same.

    It is never kept once a gradient was possible: fused optimizers change parameters without counting their
    versions up. Copies and pickles of a module start without it, since another tensor may get the old
    address.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._value: Any = None
        self._trained = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Derived, ()

    def get(self, compute: Callable[[], Any], key: object, *parameters: Tensor | None) -> Any:
        """Return ``compute()``, or the earlier result for this key and the same values of the parameters."""
        learned = [x for x in parameters if x is not None]
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            self._trained = True
        if self._trained or compiling or any(x.is_inference() for x in learned):
            return compute()
        key = (key, *((x.data_ptr(), x._version) for x in learned))
        if self._key != key:
            self._value, self._key = compute(), key
        return self._value


class TokenFactor(nn.Module):
    """x W + c per head, shape (..., heads, length, width), in float32 at least: it multiplies a whole output,
    so that its rounding would add to that of every channel. At the start W is 0, so every token begins with
    ``start``.

    ``hidden`` is (..., length, hidden_dim), shared by the heads, with W (hidden_dim, heads * width); the
    query, used where there is none, is (..., heads, length, head_dim), with one W (head_dim, width) per head.
    """

    def __init__(self, layer_spec: LayerSpec, width: int, start: float = 0.0) -> None:
        super().__init__()
        self.heads, self.width, self.hidden_dim = layer_spec.heads, width, layer_spec.hidden_dim
        self.constant = nn.Parameter(torch.full((layer_spec.heads, width), start))
        if layer_spec.hidden_dim is None:
            self.weight = nn.Parameter(torch.zeros(layer_spec.heads, layer_spec.head_dim, width))
        else:
            self.weight = nn.Parameter(torch.zeros(layer_spec.hidden_dim, layer_spec.heads * width))

    @torch.no_grad()
    def begin_as_map(self) -> None:
        """Start with the query itself, or with a random map of the hidden state, which has another width."""
        if self.hidden_dim is None:
            self.weight.copy_(torch.eye(self.width))
        else:
            self.weight.normal_(std=self.hidden_dim**-0.5)

    def forward(self, query: Tensor, hidden: Tensor | None) -> Tensor:
        dtype = compute_dtype(query.dtype)
        weight, constant = self.weight.to(dtype), self.constant.to(dtype)[:, None, :]
        if self.hidden_dim is None:
            if hidden is not None:
                raise ValueError(
                    "argument 'hidden' was given, but the mechanism was made without hidden_dim=; it uses"
                    " the query"
                )
            return query.to(dtype) @ weight + constant
        if hidden is None:
            raise ValueError(
                f"argument 'hidden' is missing: the mechanism was made with hidden_dim={self.hidden_dim}"
            )
        if hidden.shape[-1] != self.hidden_dim:
            raise ValueError(
                f"argument 'hidden' has width {hidden.shape[-1]} (shape {tuple(hidden.shape)}); hidden_dim is"
                f" {self.hidden_dim}"
            )
        by_head = (hidden.to(dtype) @ weight).unflatten(-1, (self.heads, self.width))
        factor: Tensor = by_head.transpose(-3, -2) + constant
        return factor


class Mechanism(nn.Module):
    """Base class of mechanisms.

    A subclass defines :meth:`attend`, and its cache if it keeps more than keys and values. The other methods
    and attributes describe a mechanism to code that does not know its class; a subclass overrides those that
    differ.
    """

    formula_names: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold the formulas it runs; they may be replaced (:meth:`replace_formulas`)."""
    key_head_multiple: ClassVar[int] = 1
    """The number of key heads must be a multiple of this."""
    needs_first_value: bool = False
    """True if it needs the values of the network's first layer (``first_value=``)."""
    sees_itself: bool = True
    """True if a causal row sees the key of its own token."""
    takes_window: bool = False
    """True if its rows may be limited to a window of keys."""
    packs_documents: bool = False
    """True if its engines keep packed documents apart. Otherwise each document is a call."""
    needs_all_keys: ClassVar[bool] = False
    """True if it uses all keys at once, so that neither a cache that drops some of them nor a mask that hides
    some from some rows is supported."""

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
        window: tuple[int | None, int | None] | None = None,
        documents: Tensor | tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
        key_lengths: Tensor | None = None,
    ) -> Result:
        """The arguments of :func:`unsoft.attention`, and

        hidden
            The hidden state (..., length, hidden_dim), for mechanisms that compute a factor from it;
            without it they use the query.
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
        inputs = Inputs(
            query, key, value, hidden, geometry_keys, first_value, return_weights, options=options
        )
        given = {
            "window": window,
            "documents": documents,
            "cu_seqlens": cu_seqlens,
            "key_lengths": key_lengths,
        }
        if any(argument is not None for argument in given.values()):
            inputs = self._structured(inputs, given)
        apart = self.packs_documents or not {"documents", "cu_seqlens"} & inputs.options.keys()
        if cache is not None:
            if not apart:
                raise ValueError("argument 'documents': decode documents with a cache of their own")
            return self.decode(inputs, cache)
        if is_causal is False and self.causal_only:
            raise ValueError("argument 'is_causal': this mechanism looks back only; pass is_causal=True")
        return self.attend(inputs) if apart else attend_by_document(self, inputs)

    def _structured(self, inputs: Inputs, given: Mapping[str, Any]) -> Inputs:
        """Return the inputs with the arguments of ``STRUCTURE``, lengths of keys as a mask if need be."""
        structure = {name: argument for name, argument in given.items() if argument is not None}
        if "window" in structure and not self.takes_window and tuple(structure["window"]) != (None, None):
            raise ValueError(
                f"argument 'window': {type(self).__name__} looks at all keys before a row at once; use a"
                " mechanism with weights for single keys"
            )
        if "key_lengths" in structure and not self.takes_window:
            mask = key_padding(inputs.query, inputs.key, structure.pop("key_lengths"))
            inputs = inputs.with_options(attn_mask=joined_masks(inputs.options["attn_mask"], mask))
        return inputs.with_options(**structure)

    def decode(self, inputs: Inputs, cache: Cache) -> Result:
        """Attend from new tokens to all tokens so far: by the prepared step if the call is plain and the
        mechanism has one, otherwise by :meth:`attend_cached`.

        This is the only place that chooses between the two. Wrappers call it on the mechanism inside them.
        """
        if inputs.is_plain:
            out = self.prepared_step(inputs, cache)
            if out is not None:
                return out
        return self.attend_cached(inputs, cache)

    @abstractmethod
    def attend(self, inputs: Inputs) -> Result:
        """Return the output, and the weights if asked for."""

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        """Return the output of a plain decoding step by compiled code that was prepared in an earlier one.

        None, with the cache as it was, if these inputs need :meth:`attend_cached`. The base class has no such
        step.
        """
        return None

    @property
    def prepares_steps(self) -> bool:
        """True if it has a :meth:`prepared_step`, and its :class:`KeyValueCache` holds keys and values
        unchanged, so that others may append to it too."""
        return False

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        """Append to the cache and attend; here for mechanisms that need all keys and values."""
        return self.attend(self.with_cached_tokens(inputs, cache))

    def with_cached_tokens(self, inputs: Inputs, cache: Cache) -> Inputs:
        """Append the new tokens to a cache of keys and values, and return the inputs with all tokens."""
        keys, values = of_kind(KeyValueCache, cache).append(inputs.key, inputs.value)
        return inputs.change(key=keys, value=values).with_options(is_causal="lower_right")

    def new_cache(self, batch: int) -> Cache:
        """Return an empty cache for decoding ``batch`` sequences."""
        return KeyValueCache(batch)

    @property
    def causal_only(self) -> bool:
        """True if it looks back only, so that ``is_causal`` must be set."""
        return any(part.causal_only for part in self.parts_inside)

    @property
    def aligned(self) -> bool:
        """True if a row must know which key belongs to its own token, so that ``is_causal`` is required where
        there are more keys than queries."""
        return self.causal_only

    @property
    def query_heads(self) -> int:
        """Number of query heads for ``layer_spec.heads`` heads of output."""
        return self.layer_spec.heads

    @property
    def parts(self) -> list[Mechanism]:
        """The mechanism and those inside it."""
        return [part for part in self.modules() if isinstance(part, Mechanism)]

    @property
    def parts_inside(self) -> list[Mechanism]:
        """The mechanisms inside it."""
        return self.parts[1:]

    @property
    def formulas(self) -> list[Formula]:
        """All formulas that it and the mechanisms inside it run; none for linear attention."""
        return [getattr(part, name) for part in self.parts for name in part.formula_names]

    def replace_formulas(self, change: Callable[[Formula], Formula]) -> None:
        """Replace every formula by ``change(formula)``."""
        for part in self.parts:
            for name in part.formula_names:
                setattr(part, name, change(getattr(part, name)))

    def open_start(self) -> None:
        """Set its parameters so that it does what plain attention does, if possible; for pretrained
        models."""

    @property
    def uses_positions(self) -> bool:
        """True if the result depends on the positions of tokens, beyond which keys a row sees."""
        own = [getattr(self, name).uses & {"i", "j"} for name in self.formula_names]
        return any(own) or any(part.uses_positions for part in self.parts_inside)

    @property
    def takes_fields(self) -> bool:
        """True if the caller must pass fields."""
        return any(part.takes_fields for part in self.parts_inside)

    @property
    def uses_hidden(self) -> bool:
        """True if a part of it computes something from the hidden state, for which the query is a poor
        substitute."""
        return any(part.uses_hidden for part in self.parts_inside)

    @property
    def mass_gate(self) -> str | None:
        """Return the way to apply a gate on the mass of keys: a "mask" of the formulas, a "column" of the
        values, or None if there is none."""
        return "mask" if self.formulas else None


def attend_by_document(mechanism: Mechanism, inputs: Inputs) -> Result:
    """Return the results of packed documents by one call for each: nothing can leak between them.

    For mechanisms whose engines have a state, or a geometry, of all keys.
    """
    numbers = document_numbers(inputs)
    rows = [slice(None)] if len(numbers) == 1 else [slice(b, b + 1) for b in range(len(numbers))]
    outputs, weights = [], []
    for batch, own in zip(rows, numbers, strict=True):
        results = [mechanism.attend(_document(inputs, batch, part)) for part in _runs(own)]
        if inputs.return_weights:
            outputs.append(torch.cat([out for out, _ in results], dim=-2))
            weights.append(_block_diagonal([matrix for _, matrix in results]))
        else:
            outputs.append(torch.cat(results, dim=-2))  # type: ignore[arg-type]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not inputs.return_weights:
        return out
    return out, weights[0] if len(weights) == 1 else torch.cat(weights)


def _document(inputs: Inputs, batch: slice, part: slice) -> Inputs:
    """Return the tokens of one document of some sequences."""

    def cut(x: Tensor | None) -> Any:
        return None if x is None else (x[batch] if x.dim() > 3 else x)[..., part, :]

    options = {name: x for name, x in inputs.options.items() if name not in ("documents", "cu_seqlens")}
    options["attn_mask"] = _cut_mask(options["attn_mask"], batch, part)
    if options["positions"] is not None:
        options["positions"] = tuple(
            (x[batch] if x.dim() > 1 and len(x) > 1 else x)[..., part] for x in options["positions"]
        )
    if "fields" in options:
        options["fields"] = {name: _cut_field(x, batch, part) for name, x in options["fields"].items()}
    hidden = inputs.hidden
    if hidden is not None:  # it has no heads
        hidden = (hidden[batch] if hidden.dim() > 2 else hidden)[..., part, :]
    by_head = {name: cut(getattr(inputs, name)) for name in (*_TENSORS, "geometry_keys", "first_value")}
    return inputs.change(hidden=hidden, options=options, **by_head)


def document_numbers(inputs: Inputs) -> Tensor:
    """Return (B|1, L): which document each token belongs to, for queries and keys of the same tokens."""
    query, given = inputs.query, inputs.options.get("documents")
    length, keys = query.shape[-2], inputs.key.shape[-2]
    if length != keys or isinstance(given, tuple) or isinstance(inputs.options.get("cu_seqlens"), tuple):
        raise ValueError(
            "argument 'documents': this mechanism packs documents only if queries and keys are the same"
            f" tokens; there are {length} queries and {keys} keys"
        )
    batch = tuple(query.shape[:-3])
    if given is not None:
        return packed_documents(given, batch, (length, keys), query.device)[0]
    return from_cu_seqlens(inputs.options["cu_seqlens"], (length, keys), query.device)[0]


def _runs(numbers: Tensor) -> list[slice]:
    """Return the tokens of every document of one sequence."""
    lengths = torch.unique_consecutive(numbers, return_counts=True)[1]
    ends = lengths.cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _cut_mask(mask: Tensor | None, batch: slice, part: slice) -> Tensor | None:
    """Return the rows and keys of one document of a mask, whose dimensions may be 1."""
    if mask is None:
        return None
    if mask.dim() == 4 and len(mask) > 1:
        mask = mask[batch]
    keys = part if mask.shape[-1] > 1 else slice(None)
    rows = part if mask.dim() > 1 and mask.shape[-2] > 1 else slice(None)
    return mask[..., rows, keys] if mask.dim() > 1 else mask[keys]


def _cut_field(field: Values, batch: slice, part: slice) -> Values:
    """Return the tokens of one document of a field (..., heads, length)."""
    if isinstance(field, tuple):
        return tuple(_cut_field(x, batch, part) for x in field)  # type: ignore[return-value]
    return (field[batch] if field.dim() == 3 and len(field) > 1 else field)[..., part]


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return weights (..., L, L) of all documents, 0 between two of them."""
    length = sum(block.shape[-2] for block in blocks)
    whole, start = blocks[0].new_zeros(*blocks[0].shape[:-2], length, length), 0
    for block in blocks:
        stop = start + block.shape[-1]
        whole[..., start:stop, start:stop] = block
        start = stop
    return whole


def key_padding(query: Tensor, key: Tensor, lengths: Any) -> Tensor:
    """Return a mask (batch, 1, 1, S) that hides the keys from ``lengths`` on."""
    checked = checked_key_lengths(lengths, tuple(query.shape[:-3]), key.shape[-2], query.device)
    return torch.arange(key.shape[-2], device=query.device) < checked[:, None, None, None]


def joined_masks(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Return a mask that also hides what is False in ``visible``."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


class Wrapper(Mechanism):
    """A mechanism around another one, with the cache of that one; base of the module modifiers."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__(inner.layer_spec)
        self.inner = inner

    @property
    def query_heads(self) -> int:
        return self.inner.query_heads

    @property
    def mass_gate(self) -> str | None:
        return self.inner.mass_gate

    def new_cache(self, batch: int) -> Cache:
        return self.inner.new_cache(batch)


def check_hidden(name: str, hidden: Tensor | None, keys: int) -> None:
    """Raise ValueError unless the hidden state, if there is one, holds the tokens of all keys."""
    if hidden is not None and hidden.shape[-2] != keys:
        raise ValueError(
            f"{name}: argument 'hidden' holds {hidden.shape[-2]} tokens (shape {tuple(hidden.shape)}), but"
            f" there are {keys} keys, and it needs the token of every key; decode with the cache of"
            " new_cache(), and use another mechanism for cross-attention"
        )
