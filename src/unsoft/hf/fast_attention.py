"""The attention function of accelerated models: what the model computed before, by our kernels.

The model keeps its own function for everything else: other devices, returned weights, masks of an unusual
shape, and shapes where PyTorch's ``sdpa`` was measured to be faster (sdpa_speed.json, written by
``benchmarks/acceleration.py --table``).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from dis import get_instructions
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask

from unsoft.engines.native.availability import formula_failure
from unsoft.engines.pointwise import run_formula
from unsoft.formula import Formula
from unsoft.hf.architecture import code_strings, forward_code
from unsoft.hf.attention import weights_wanted
from unsoft.hf.masks import Visibility, pattern_of, visibility_of
from unsoft.hf.swap import capped
from unsoft.mechanisms.sink import sink
from unsoft.modules.registry import resolve

NAMES = {"eager": "unsoft_eager", "sdpa": "unsoft_sdpa"}
"""Names of the attention implementation of accelerated models, by the implementation that they replace."""
_TAKEN = {"scaling", "dropout", "softcap", "position_bias", "s_aux", "is_causal"}
"""Arguments of a model's attention function that ours has as well, besides tensors and mask."""
_CLOSE = 1e-5
"""Largest difference to a model's own function on random tensors of size 1."""


@cache
def softmax_formula(sinks: bool, softcap: float | None) -> Formula:
    """Return softmax, on request with a sink in the normaliser and with capped logits."""
    formula = resolve("softmax")
    assert isinstance(formula, Formula)
    formula = formula if softcap is None else capped(formula, softcap)
    return sink(formula) if sinks else formula


class LazyMask(Tensor):
    """A mask of transformers that is computed when something reads it.

    It has shape, dtype and device of the mask, and becomes the mask in any operation, so models may compute
    with it. Our attention function reads ``visibility`` instead and never builds the L * S entries.
    """

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: Any, *_: Any) -> LazyMask:
        make: Any = Tensor._make_wrapper_subclass
        made: LazyMask = make(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        build: Callable[[], Tensor],
        causal: bool,
        visibility: Visibility | Tensor | None,
    ) -> None:
        self._build, self.causal, self._visibility = build, causal, visibility
        self._table: Tensor | None = None
        self._shared = False

    def table(self) -> Tensor:
        """Return the mask as an ordinary tensor."""
        if self._table is None:
            self._table = self._build()
        return self._table

    def structure(self) -> tuple[Tensor | None, dict[str, Any]] | None:
        """Return a mask of keys, and keywords of ``attention``, that say the same; None if they do not."""
        if self._shared:
            return None
        options: dict[str, Any] = {"is_causal": "lower_right"} if self.causal else {}
        visibility = self._visibility
        if not isinstance(visibility, Visibility):
            return visibility, options
        return visibility.padding, options | visibility.structure

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The entries may be changed in place, now or later through a view.
        shared = any(argument.alias_info is not None for argument in func._schema.arguments)

        def entries(x: Any) -> Any:
            if not isinstance(x, LazyMask):
                return x
            x._shared |= shared
            return x.table()

        args, kwargs = tree_map(entries, (args, kwargs or {}))
        return func(*args, **kwargs)


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    implementation: str,
    **options: Any,
) -> Tensor | None:
    """Return the mask of an attention implementation, as a :class:`LazyMask` where that saves something."""
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    build = partial(
        AttentionMaskInterface()[implementation], *sizes, mask_function, attention_mask, **options
    )
    # The offset is a tensor for a static cache, whose unused keys are at the end.
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    pattern = pattern_of(mask_function) if at_the_end and not torch.compiler.is_compiling() else None
    if pattern is None:
        return build()  # type: ignore[no-any-return]
    device = options.get("device", "cpu")
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    visibility = visibility_of(q_length, kv_length, kv_offset, pattern, padding, device)
    if isinstance(visibility, Visibility) and not visibility.structure:
        visibility = visibility.padding
    if visibility is None and (not pattern.causal or (implementation == "sdpa" and q_length == kv_length)):
        return build()  # type: ignore[no-any-return]  # None, unless the model requests the entries
    dtype = torch.bool if implementation == "sdpa" else options.get("dtype", torch.float32)
    shape = (batch_size, 1, q_length, kv_length)
    return LazyMask(shape, dtype, device, build, pattern.causal, visibility)


@dataclass(frozen=True)
class AttentionPlan:
    """Plan by which an attention module runs; set as its attribute ``unsoft_plan``."""

    implementation: str
    """"eager" or "sdpa": what it ran before."""
    own: Callable[..., tuple[Tensor, Tensor | None]]
    """Its function for that implementation."""
    sinks: bool
    softcap: float | None
    formula: Formula
    reason: str | None = None
    """Why it keeps that function; None if it does not."""


def plan_attention(module: nn.Module, implementation: str) -> AttentionPlan:
    """Return the plan for an attention module that uses transformers' attention interface."""
    names = inspect.unwrap(type(module).forward).__globals__
    interface, eager = names["ALL_ATTENTION_FUNCTIONS"], names.get("eager_attention_forward")
    sinks = isinstance(getattr(module, "sinks", None), Tensor)
    softcap: float | None = getattr(module, "attn_logit_softcapping", None)
    reason: str | None = "has no eager attention function to compare with"
    if eager is not None:
        reason = _unknown_argument(eager) or _difference(module, eager)
    own = interface.get_interface(implementation, eager)
    return AttentionPlan(implementation, own, sinks, softcap, softmax_formula(sinks, softcap), reason)


def describe(module: nn.Module) -> str:
    """Return the kind of a module's attention in words."""
    kind = "softmax"
    if isinstance(getattr(module, "sinks", None), Tensor):
        kind += " with sinks"
    if (cap := getattr(module, "attn_logit_softcapping", None)) is not None:
        kind += f", soft cap {cap:g}"
    code = forward_code(type(module))
    if "position_bias" in code_strings(code):
        kind += " with position bias"
    config = getattr(module, "config", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if isinstance(window, int) and "sliding_window" in (*code.co_names, *code_strings(code)):
        kind += f", window {window}"
    return kind


def _unknown_argument(eager: Callable[..., Any]) -> str | None:
    """Return why the arguments of an eager function may change its result in a way that ours ignores."""
    _, *rest = inspect.signature(eager).parameters.values()
    keywords = {x.name for x in rest if x.kind is x.VAR_KEYWORD}
    unknown = {x.name for x in rest[4:]} - keywords - _TAKEN
    if unknown:
        return f"passes arguments that our kernels do not take ({', '.join(sorted(unknown))})"
    used = {step.argval for step in get_instructions(inspect.unwrap(eager)) if step.opname == "LOAD_FAST"}
    return "reads further arguments of its attention function" if used & keywords else None


class _StandIn:
    """A module in evaluation mode with other sinks, since its own may not be initialised or loaded."""

    training = False

    def __init__(self, module: nn.Module, sinks: Tensor | None) -> None:
        self._module, self.sinks = module, sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _difference(module: nn.Module, eager: Callable[..., Any]) -> str | None:
    """Return how our kernels differ from a module's eager function on a small call; None if they agree."""
    groups = getattr(module, "num_key_value_groups", 1)
    sinks: Tensor | None = getattr(module, "sinks", None)
    strings = set(code_strings(forward_code(type(module))))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    with torch.device("cpu"), torch.no_grad():
        heads = 2 * groups if sinks is None else sinks.numel()
        q, k, v = draw(2, heads, 5, 8), draw(2, heads // groups, 7, 8), draw(2, heads // groups, 7, 8)
        later = torch.ones(5, 7, dtype=torch.bool).triu(3)
        mask = torch.zeros(2, 1, 5, 7, dtype=q.dtype).masked_fill(later, torch.finfo(q.dtype).min)
        options: dict[str, Any] = {"scaling": 0.7, "dropout": 0.0}
        if "softcap" in inspect.signature(eager).parameters:
            options["softcap"] = 0.9
        if "position_bias" in strings:
            options["position_bias"] = draw(1, heads, 5, 7)
        other = None if sinks is None else draw(heads)
        if "s_aux" in strings:
            options["s_aux"] = other
        try:
            expected = eager(_StandIn(module, other), q, k, v, mask, **options)[0]
            formula = softmax_formula(options.get("s_aux") is not None, options.get("softcap"))
            actual = _run(formula, q, k, v, mask, {}, **options)
            close = bool((actual - expected).abs().max() <= _CLOSE)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"does not run on a sample ({type(error).__name__}: {error})"
    return None if close else "computes something else than softmax of scaled products"


def _run(
    formula: Formula,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    structure: dict[str, Any],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return softmax attention as (batch, queries, heads, width)."""
    if position_bias is not None:
        mask, structure = _with_bias(position_bias, mask, structure)
    if s_aux is not None:
        structure = structure | {"params": {"sink": s_aux}}
    is_causal = structure.pop("is_causal", False)
    gqa = query.shape[1] != key.shape[1]
    out = run_formula(query, key, value, formula, mask, dropout, is_causal, scaling, gqa, **structure)
    return out.transpose(1, 2).contiguous()  # type: ignore[union-attr]


def _with_bias(bias: Tensor, mask: Tensor | None, structure: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return a position bias and a mask as one float mask."""
    if mask is None:
        return bias, structure
    if mask.dtype != torch.bool:
        return bias + mask, structure
    if mask.shape[1:3] == (1, 1):
        keys = mask[:, 0, 0]
        lengths = keys.sum(-1)
        if bool((keys == (torch.arange(keys.shape[1]) < lengths[:, None])).all()):  # padding on the right
            return bias, structure | {"key_lengths": lengths}
    return torch.where(mask, bias, -math.inf), structure


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers' interface; returns what the module's own function returns,
    without weights."""
    plan: AttentionPlan = module.unsoft_plan  # type: ignore[assignment]
    ours = {name: options[name] for name in _TAKEN & options.keys()}
    call = None
    if plan.reason is None and query.device.type == "cpu" and not _wants_more(plan, options):
        call = _visibility(plan, module, query, key, attention_mask, options)
        ours.pop("is_causal", None)
    if call is None or not _preferred(plan, query, key, value, call[1], call[2], ours):
        if isinstance(attention_mask, LazyMask):
            attention_mask = attention_mask.table()
        return plan.own(module, query, key, value, attention_mask, **options)
    if plan.implementation == "eager" and not module.training:
        ours["dropout"] = 0.0
    return _run(plan.formula, query, key, value, *call[:2], **ours), None


def _wants_more(plan: AttentionPlan, options: dict[str, Any]) -> bool:
    """Return True for a call that only the module's own function can serve."""
    unscaled = plan.implementation == "eager" and options.get("scaling") is None
    return bool(
        unscaled or options.get("cache") is not None or options.get("output_attentions") or weights_wanted()
    )


def _visibility(
    plan: AttentionPlan,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor | None, dict[str, Any], str] | None:
    """Return a mask, keywords of ``run_formula`` and the kind of visibility; None if it is unusual."""
    length, keys = query.shape[2], key.shape[2]
    described: tuple[Tensor | None, dict[str, Any]] | None
    if mask is None:
        # sdpa takes causality from the module, and eager functions from the mask only.
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        causal = plan.implementation == "sdpa" and length > 1 and bool(causal)
        described = None, {"is_causal": True} if causal else {}
    elif mask.dim() != 4 or mask.shape[2] not in (1, length) or mask.shape[3] != keys:
        return None
    else:
        described = mask.structure() if isinstance(mask, LazyMask) else None
    if described is None:
        return (mask.table() if isinstance(mask, LazyMask) else mask), {}, "mask"
    padding, structure = described
    ends = options.get("cu_seq_lens_q")
    whole_row = len(query) == 1 and length == keys and padding is None
    if ends is not None and whole_row and "is_causal" in structure and "documents" not in structure:
        # Flash attention keeps these texts apart. Not every model puts them into its masks (gpt-oss).
        structure["cu_seqlens"] = ends
    if not structure.keys().isdisjoint(("window", "documents", "cu_seqlens")):
        return padding, structure, "window"
    return padding, structure, "mask" if padding is not None else "causal" if structure else "full"


def _preferred(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: dict[str, Any],
    kind: str,
    options: dict[str, Any],
) -> bool:
    """Return True unless sdpa ran before and is faster, the formula is not compiled, or the call has another
    one."""
    if (options.get("s_aux") is not None, options.get("softcap")) != (plan.sinks, plan.softcap):
        return False
    if formula_failure(plan.formula.key, query.dtype == torch.float64) is not None:
        return False
    # sdpa has no sinks and caps, and no boundaries of texts that are not in the mask.
    if plan.implementation == "eager" or plan.sinks or plan.softcap is not None or "cu_seqlens" in structure:
        return True
    bias = options.get("position_bias")
    kind = "decode" if query.shape[2] == 1 else "bias" if bias is not None else kind
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return faster_than_sdpa(kind, query.dtype, query.shape[3], key.shape[2], training=training)


def faster_than_sdpa(kind: str, dtype: torch.dtype, width: int, keys: int, *, training: bool) -> bool:
    """Return True if our kernel was measured to be faster than ``sdpa`` at the nearest recorded shape.

    ``kind``: "causal", "full", "window" (or packed documents), "mask", "bias" or "decode" (one query).

    >>> faster_than_sdpa("window", torch.float32, 64, 4096, training=True)
    True
    """
    half = dtype in (torch.bfloat16, torch.float16)
    shapes = _RECORDED[kind, "bfloat16" if half else "float32", training and kind != "decode"]
    distance = {
        shape: abs(math.log2(shape[0] / max(width, 1))) + abs(math.log2(shape[1] / max(keys, 1)))
        for shape in shapes
    }
    return shapes[min(distance, key=lambda shape: distance[shape])] > 1


def _recorded() -> dict[tuple[str, str, bool], dict[tuple[int, int], float]]:
    """Return time of sdpa over ours by kind, dtype and training, then by head width and number of keys."""
    table: dict[tuple[str, str, bool], dict[tuple[int, int], float]] = {}
    for row in json.loads((Path(__file__).parent / "sdpa_speed.json").read_text())["rows"]:
        for direction in ("forward", "training"):
            if direction in row:
                shapes = table.setdefault((row["kind"], row["dtype"], direction == "training"), {})
                shapes[row["width"], row["keys"]] = row[direction]
    return table


_RECORDED = _recorded()  # not at the first call, which may be traced


class FastInterface:
    """An attention interface with one function, for modules that compare the name of their implementation
    with others, so that the name has to stay."""

    @staticmethod
    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return :func:`attend`."""
        return attend


for _before, _name in NAMES.items():
    AttentionInterface.register(_name, attend)
    AttentionMaskInterface.register(_name, partial(lazy_mask, implementation=_before))
