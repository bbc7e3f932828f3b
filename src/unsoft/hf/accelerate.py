"""``unsoft.hf.accelerate``: the same model with the same outputs, computed by our kernels.

Nothing is assumed of a model: every attention function that is replaced is compared with ours on random
tensors first. Softmax attention is replaced through transformers' attention interface, under another name of
the implementation. Delta rules are global functions of a model's file; a module gets a class of its own whose
``forward`` has the same code and other globals, so that other models in the process are unaffected.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from unsoft.hf.architecture import code_strings, passes_keywords, uses_interface
from unsoft.hf.attention import NAME
from unsoft.hf.fast_attention import NAMES, AttentionPlan, FastInterface, describe, plan_attention
from unsoft.hf.fast_delta import delta_difference, delta_functions, describe_delta
from unsoft.hf.swap import derived

_REPORT = "unsoft_acceleration"
_PLAN = "unsoft_plan"


class AttentionEntry(NamedTuple):
    """One attention module of a report."""

    name: str
    module: nn.Module
    what: str
    """Its attention in words, such as "softmax with sinks, window 128"."""
    reason: str | None
    """Why it was not replaced; None if it was."""


@dataclass
class Acceleration:
    """Report of what :func:`accelerate` replaced in a model. ``str(report)`` is a table."""

    model: PreTrainedModel
    entries: list[AttentionEntry]
    _classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)
    _configs: list[tuple[PreTrainedConfig, str | None]] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[AttentionEntry]:
        """The attention modules that run our kernels."""
        return [entry for entry in self.entries if entry.reason is None]

    @property
    def kept(self) -> list[AttentionEntry]:
        """The attention modules that are unchanged, each with its reason."""
        return [entry for entry in self.entries if entry.reason is not None]

    @property
    def intact(self) -> bool:
        """False if another attention implementation has been set since."""
        return all(config._attn_implementation in NAMES.values() for config, _ in self._configs)

    def undo(self) -> None:
        """Restore the model; calling it twice does nothing. What replaced ours later (swap) stays."""
        for config, before in self._configs:
            if config._attn_implementation in NAMES.values():
                config._attn_implementation_internal = before
        for module, kind in self._classes:
            if issubclass(type(module), _Faster):
                module.__class__ = kind
        for entry in self.entries:
            vars(entry.module).pop(_PLAN, None)
        _remove_hook(self.model)
        vars(self.model).pop(_REPORT, None)

    def __str__(self) -> str:
        rows = Counter((type(x.module).__name__, x.what, x.reason or "replaced") for x in self.entries)
        lines = [(str(count), *row) for row, count in rows.items()]
        table = [("layers", "module", "attention", "result"), *lines]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        return "\n".join(
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
            for row in table
        )


def accelerate(model: PreTrainedModel) -> Acceleration:
    """Make the attention of a model faster on CPUs, in place, with the same outputs; return a report.

    Replaced are softmax attention with sinks, sliding windows, soft caps, position biases and packed texts,
    plain softmax at shapes where it was measured to be faster than ``sdpa``, and the (gated) delta rule.
    Weights, state dict and saved files are unchanged; ``report.undo()`` restores the model. A second call
    returns the report of the first.

    Raise TypeError if ``model`` is not a transformers model and ValueError if it has no attention that can
    be replaced; the model is then unchanged.

    >>> import torch, unsoft
    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_key_value_heads": 1}
    >>> tiny = MistralConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, sliding_window=4)
    >>> model, ids = MistralForCausalLM(tiny).eval(), torch.arange(9)[None]
    >>> before = model(ids).logits
    >>> report = unsoft.hf.accelerate(model)
    >>> print(report)
    layers  module            attention          result
    2       MistralAttention  softmax, window 4  replaced
    >>> torch.allclose(model(ids).logits, before, atol=1e-5)
    True
    >>> report.undo()
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"accelerate: argument 'model' must be a transformers model, not {type(model).__name__}; of a"
            " wrapper such as a PEFT model, pass the model inside"
        )
    existing = vars(model).get(_REPORT)
    if existing is not None:
        if existing.intact:
            return existing  # type: ignore[no-any-return]
        existing.undo()
    entries: list[AttentionEntry] = []
    plans: list[AttentionPlan | None] = []
    for name, module in model.named_modules():
        if uses_interface(module):
            plan = _attention_plan(module)
            reason = plan if isinstance(plan, str) else plan.reason
            entries.append(AttentionEntry(name, module, describe(module), reason))
            plans.append(None if isinstance(plan, str) else plan)
        elif delta_functions(type(module)):
            reason = _unsuitable_device(module) or delta_difference(type(module))
            entries.append(AttentionEntry(name, module, describe_delta(type(module)), reason))
            plans.append(None)
    report = Acceleration(model, entries)
    if not report.replaced:
        reasons = "; ".join(dict.fromkeys(f"{type(x.module).__name__} {x.reason}" for x in entries))
        raise ValueError(
            f"accelerate: {type(model).__name__} has no attention that can be replaced: "
            + (reasons or "none goes through transformers' attention interface, and none is a delta rule")
        )
    _install(report, plans)
    return report


def _attention_plan(module: nn.Module) -> AttentionPlan | str:
    """Return the plan of an attention module, or why it cannot have one."""
    config: Any = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if implementation == NAME:
        return "runs a mechanism of unsoft.hf.swap already"
    if implementation in NAMES.values():
        return "was accelerated with a part of the model already"
    if implementation not in NAMES:
        return f"runs {implementation!r}; load the model with 'sdpa' or 'eager'"
    plan = plan_attention(module, implementation)
    return replace(plan, reason=plan.reason or _unsuitable_device(module))


def _unsuitable_device(module: nn.Module) -> str | None:
    devices = {str(x.device) for x in module.parameters()} - {"cpu"}
    return f"is on {', '.join(sorted(devices))}; accelerate is for CPUs" if devices else None


def _install(report: Acceleration, plans: list[AttentionPlan | None]) -> None:
    configs: dict[int, PreTrainedConfig] = {}
    by_name = any(_compares_names(type(module)) for module in report.model.modules())
    for entry, plan in zip(report.entries, plans, strict=True):
        module = entry.module
        if plan is not None:
            setattr(module, _PLAN, plan)
            if not by_name:
                configs[id(module.config)] = module.config  # type: ignore[assignment]
                continue
        if entry.reason is None:
            report._classes.append((module, type(module)))
            module.__class__ = faster_class(cast(Any, type(module)))
    for config in configs.values():
        before = config._attn_implementation
        report._configs.append((config, before))
        # The property of this name would also change the configs inside.
        config._attn_implementation_internal = NAMES[before or "eager"]
    _add_hook(report.model)
    setattr(report.model, _REPORT, report)


def _add_hook(model: PreTrainedModel) -> None:
    """Make a model pass the boundaries of packed texts on to all layers."""
    if passes_keywords(model):
        model.register_forward_pre_hook(_add_boundaries, with_kwargs=True)


def _remove_hook(model: PreTrainedModel) -> None:
    """Undo :func:`_add_hook`."""
    for number in [key for key, hook in model._forward_pre_hooks.items() if hook is _add_boundaries]:
        del model._forward_pre_hooks[number]
        model._forward_pre_hooks_with_kwargs.pop(number, None)


def _add_boundaries(
    model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a model with ``cu_seq_lens_q``, where its positions restart from 0.

    A flattening collator passes positions only, by default. Delta rules do not receive them, and some models
    do not build their masks from them.
    """
    positions = options.get("position_ids")
    earlier = any(options.get(x) is not None for x in ("attention_mask", "past_key_values", "cu_seq_lens_q"))
    if positions is None or earlier or positions.dim() != 2 or len(positions) != 1:
        return None
    if torch.compiler.is_compiling() or not bool((positions[0, 1:] == 0).any()):
        return None
    starts = (positions[0] == 0).nonzero().flatten()
    ends = torch.nn.functional.pad(starts[starts > 0], (1, 1))
    ends[-1] = positions.shape[1]
    return args, options | {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int()}


def _compares_names(kind: type[nn.Module]) -> bool:
    """Return True if a module behaves differently for another name of its attention implementation."""
    methods = (inspect.unwrap(x) for x in vars(kind).values() if inspect.isfunction(x))
    return any(
        "_attn_implementation" in method.__code__.co_names
        and not NAMES.keys().isdisjoint(code_strings(method.__code__))
        for method in methods
    )


class _Faster:
    """Marks the classes of :func:`faster_class`; copies and pickles by the original class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__dict__


def _blank(kind: Any) -> Any:
    made = faster_class(kind)
    return made.__new__(made)


@cache
def faster_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class whose forward calls our functions."""
    names: dict[str, Any] = {"ALL_ATTENTION_FUNCTIONS": FastInterface()}
    ours, own = _with_globals(kind.forward, delta_functions(kind) or names), kind.forward

    @wraps(own)
    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        # Dynamo looks up the globals of a function in the module that it names.
        return (own if torch.compiler.is_compiling() else ours)(self, *args, **options)

    made: type[nn.Module] = derived(_Faster, cast(Any, kind), forward=forward)
    return made


def _with_globals(function: Any, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function, and of the decorators around it, in which some globals are others."""
    inner = getattr(function, "__wrapped__", None)
    scope, cells = function.__globals__, function.__closure__
    if inner is None:
        scope = scope | names
    else:
        copied = _with_globals(inner, names)
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
