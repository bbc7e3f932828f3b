"""The attention function that transformers calls, and the module with the mechanism that it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from unsoft.engines.arguments import from_cu_seqlens
from unsoft.hf.architecture import UNSUPPORTED
from unsoft.hf.masks import Visibility, key_mask, token_positions, visible
from unsoft.hf.rotary import Angles, KeyRotation, probing
from unsoft.modules.module import Mechanism
from unsoft.modules.spec import LayerSpec

NAME = "unsoft"
"""Name of the attention implementation, of the submodule, and of the section in config.json."""


class FirstValues:
    """The values of the first layer, kept from the first to the last layer of a forward pass."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def seen_by(self, layer_spec: LayerSpec, value: Tensor, label: str) -> Tensor:
        """Return the first layer's values for a layer whose own values are ``value``.

        The first layer stores them and the last one drops them.
        """
        first = value if layer_spec.layer == 0 else self.value
        self.value = None if layer_spec.layer + 1 == layer_spec.layers else first
        if first is None or first.shape != value.shape:
            problem = "are gone: gradient checkpointing, which runs layers again, does not work with it"
            if first is not None:
                problem = f"have the shape {tuple(first.shape)}, not {tuple(value.shape)}"
            raise ValueError(
                f"swap: {label!r} in layer {layer_spec.layer} adds the values of the first, which {problem}"
            )
        return first


class Swapped(nn.Module):
    """A mechanism inside an attention module, with parameters that it needs beyond the model's projections.

    Some mechanisms use several queries per head. The model computes one, so the others are a learned linear
    map of it, initially the identity. The buffer ``swapped`` puts a name into every saved model that plain
    transformers does not expect, so that it reports it.
    """

    def __init__(
        self, mechanism: Mechanism, label: str, softcap: float | None, windowed: bool, causal: bool | None
    ) -> None:
        super().__init__()
        self.mechanism, self.label, self.softcap, self.causal = mechanism, label, softcap, bool(causal)
        layer_spec, kept = mechanism.layer_spec, mechanism.new_cache(1)
        self.windowed = windowed
        self.stateful = not kept.only_keys_and_values
        self.uses_positions = mechanism.uses_positions
        self.gates_keys = any(part.needs_all_keys for part in mechanism.parts)
        # A window is a mask for each row, which a cache of fixed size cannot apply.
        self.decodes_with_state = self.stateful and (kept.keeps_keys or not windowed)
        # A sliding window lets transformers drop keys, which buffers for prepared steps do not.
        self.decodes_by_steps = mechanism.prepares_steps and not windowed
        self.causal_only = mechanism.causal_only
        self.aligned = any(part.aligned for part in mechanism.parts)
        self.wants_hidden = mechanism.uses_hidden and layer_spec.hidden_dim is not None
        self.needs_first_value = any(part.needs_first_value for part in mechanism.parts)
        self.first_values: FirstValues | None = None
        """Set by swap if some layer of the model needs the values of its first one."""
        self.rotation: KeyRotation | None = None
        """Set by swap if the mechanism compares keys, and the model rotates them."""
        more = mechanism.query_heads // layer_spec.heads - 1
        identity = torch.eye(layer_spec.head_dim).expand(layer_spec.heads, more, -1, -1)
        self.more_queries = nn.Parameter(identity.clone()) if more else None
        self.register_buffer("swapped", torch.tensor(1))

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Run the mechanism; key gates are not traced, since our own compiled code solves for them."""
        if self.gates_keys and torch.compiler.is_compiling():
            return self._untraced(*args, **options)  # type: ignore[no-any-return]
        return self._attend(*args, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _untraced(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self._attend(*args, **options)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Visibility | Tensor | None,
        *,
        causal: bool,
        return_weights: bool,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        unsoft_hidden: Tensor | None = None,
        unsoft_angles: Angles | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (batch, heads, queries, width), and the weights if requested.

        The keywords with a default are those of transformers; others of its keywords have no effect.
        """
        if self.causal_only and not causal:
            raise ValueError(f"swap: {self.label!r} looks back only, and this attention looks both ways")
        if self.more_queries is not None:
            query = _with_more_queries(query, self.more_queries)
        length, cache, positions = query.shape[2], None, None
        if not torch.compiler.is_compiling():
            layer = getattr(key, "unsoft_layer", None)
            cache = None if layer is None else layer.cache_for(key)
        keys = key.shape[2] + (0 if cache is None else cache.length)
        structure: dict[str, Any] = {}
        shown = None
        if isinstance(mask, Visibility):
            shown = mask.shown
            mask, structure = self._structure(mask, causal)
        if cu_seq_lens_q is not None:
            documents = _flattened(cu_seq_lens_q, cu_seq_lens_k, query, keys)
            structure["documents"] = _intersection(documents, structure.get("documents"))
        if self.uses_positions and "documents" in structure:
            positions = None if position_ids is None else (position_ids, position_ids)
        elif self.uses_positions:
            positions = token_positions(
                position_ids,
                mask,
                length,
                keys,
                causal=causal,
                cached=causal and use_cache is not False,
                label=self.label,
                shown=shown,
            )
        if cache is not None:
            is_causal: bool | str = True
        elif self.stateful or self.aligned:
            self._check(mask, causal, length, key, sliding_window)
            is_causal = "lower_right" if causal else False
        else:
            # A mask with a row per query includes causality. A single query sees everything before it and
            # needs the rule only if positions are counted by it.
            needed = (length > 1 or self.uses_positions) and (mask is None or mask.shape[2] == 1)
            is_causal = "lower_right" if causal and needed else False
        if self.gates_keys and causal and mask is not None:
            self._check_gates(mask, sliding_window)
        more: dict[str, Any] = structure
        if self.rotation is not None and unsoft_angles is not None:
            more["geometry_keys"] = self.rotation.undo(key, unsoft_angles)
        if self.first_values is not None:
            first = self.first_values.seen_by(self.mechanism.layer_spec, value, self.label)
            more |= {"first_value": first} if self.needs_first_value else {}
        result = self.mechanism(
            query,
            key,
            value,
            mask,
            dropout,
            is_causal,
            scaling,
            query.shape[1] != key.shape[1],
            return_weights=return_weights,
            cache=cache,
            positions=positions,
            hidden=unsoft_hidden,
            **more,
        )
        return result if return_weights else (result, None)

    def _structure(self, visibility: Visibility, causal: bool) -> tuple[Tensor | None, dict[str, Any]]:
        """Return a mask and the arguments of the mechanism that say the same together."""
        if causal != visibility.causal:
            return visibility.table(), {}
        structure = visibility.structure
        if self.mechanism.takes_window or structure.pop("window", None) is None:
            return visibility.padding, structure
        return visibility.table(documents=False), structure

    def _check(self, mask: Tensor | None, causal: bool, length: int, key: Tensor, window: int | None) -> None:
        """Raise ValueError if the positions of keys are not those that a mechanism with a cache assumes."""
        keys = key.shape[-2]
        if self.wants_hidden and length < keys:
            raise ValueError(
                f"swap: {self.label!r} keeps a number of every token, which this cache does not; use"
                " generate() or past_key_values=unsoft.hf.MechanismCache(model)"
            )
        partial = window is not None and window <= keys and length < keys
        if partial and self.gates_keys:
            raise ValueError(
                f"swap: the gates of {self.label!r} need all keys, and this cache shows a sliding window;"
                " use generate() or past_key_values=unsoft.hf.MechanismCache(model), and around linear"
                " attention use_cache=False"
            )
        if mask is None or not causal or torch.compiler.is_compiling():  # tracing must not read values
            return
        seen = visible(mask)
        if length < keys and not bool(seen[..., -1].any()):
            raise ValueError(
                f"swap: {self.label!r} depends on positions, which a static cache does not tell; use the"
                " default cache"
            )
        if mask.shape[-2] == 1:
            return
        if bool(seen.triu(keys - length + 1).any()):
            raise ValueError(
                f"swap: {self.label!r} needs to know which keys come later, and this mask lets tokens see"
                " some of them"
            )

    def _check_gates(self, mask: Tensor, window: int | None) -> None:
        """Raise ValueError if an earlier key is hidden from a row but visible to another, outside the window.

        The gate of that key would depend on another text.
        """
        length, keys = mask.shape[-2:]
        if length == 1 or torch.compiler.is_compiling():
            return
        seen = visible(mask)
        expected = seen.any(-2, keepdim=True).expand_as(seen).tril(keys - length)
        if window is not None:
            expected = expected.triu(keys - length - window + 1)
        if bool((expected & ~seen).any()):
            raise ValueError(
                f"swap: the gates of {self.label!r} depend on all keys before, and this mask hides some of"
                " them from some rows; pass packed texts one by one, or padded"
            )


def _flattened(of_queries: Tensor, of_keys: Tensor | None, query: Tensor, keys: int) -> Tensor:
    """Return the numbers of documents (1, tokens) that a flattening collator passes as their boundaries."""
    length = query.shape[2]
    if len(query) != 1 or keys != length or (of_keys is not None and not torch.equal(of_queries, of_keys)):
        raise ValueError(
            "swap: cu_seq_lens_q and cu_seq_lens_k are for one row of packed texts without earlier keys; here"
            f" are {len(query)} rows with {length} queries and {keys} keys"
        )
    return from_cu_seqlens(of_queries, (length, keys), query.device)[0]


def _intersection(documents: Tensor, others: Tensor | None) -> Tensor:
    """Return numbers of documents that begin wherever one of two packings has a boundary."""
    if others is None:
        return documents
    begins = (documents.diff(dim=-1) != 0) | (others.diff(dim=-1) != 0)
    return torch.nn.functional.pad(begins.cumsum(-1), (1, 0))


def _with_more_queries(query: Tensor, maps: Tensor) -> Tensor:
    """Insert the additional queries of each head right after its first."""
    more = torch.einsum("bhld,hmde->bhmle", query, maps.to(query.dtype))
    return torch.cat([query[:, :, None], more], dim=2).flatten(1, 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers' interface; returns (batch, queries, heads, width)."""
    swapped = getattr(module, NAME, None)
    if swapped is None:
        raise RuntimeError(
            f"this {type(module).__name__} has no mechanism: a model that was saved after unsoft.hf.swap"
            " must be loaded with unsoft.hf.load(path)"
        )
    if probing(module):  # this call is about the keys only
        swapped.rotation.probed.append(key)
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None
    for word in options.keys() & UNSUPPORTED.keys():
        if options[word] is not None:
            raise ValueError(
                f"swap: {type(module).__name__} {UNSUPPORTED[word]} ({word}), which no mechanism carries"
            )
    if swapped.wants_hidden and options.get("unsoft_hidden") is None:
        raise ValueError(
            f"swap: the hidden state of {type(module).__name__} did not reach {swapped.label!r}, which needs"
            " it"
        )
    if softcap != swapped.softcap:
        raise ValueError(
            f"swap: {type(module).__name__} caps its logits at {softcap}, but was swapped with"
            f" {swapped.softcap}; swap again"
        )
    if is_causal is None:
        # vars(), since attribute access on a config takes as long as a small attention call.
        config_allows = vars(module.config).get("is_causal", True)
        is_causal = getattr(module, "is_causal", swapped.causal) and config_allows
    return_weights = output_attentions or weights_wanted()
    out, weights = swapped(
        query, key, value, attention_mask, causal=bool(is_causal), return_weights=return_weights, **options
    )
    return out.transpose(1, 2).contiguous(), weights


def weights_wanted() -> bool:
    """Return True if the model was called with output_attentions=True; not every model passes that on."""
    if torch.compiler.is_compiling():
        return False
    return "attentions" in (_active_collector.get() or {})


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, key_mask)
