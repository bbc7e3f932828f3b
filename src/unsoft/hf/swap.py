"""``unsoft.hf.swap``: replace the attention mechanism of a transformers model.

If the config.json of a swapped model said "llama", any program that knows Llama but not unsoft would run it
with softmax. So the model type that is written is "unsoft_llama", and the model card says what to install; in
memory a config keeps its usual type. :mod:`unsoft.hf.models` reads such folders.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from unsoft.formula import Formula
from unsoft.formula.expr import make, symbol
from unsoft.hf import architecture
from unsoft.hf.architecture import AttentionModule, attention_modules
from unsoft.hf.attention import NAME, FirstValues, Swapped
from unsoft.hf.cache import MechanismCache
from unsoft.hf.card import write_card
from unsoft.hf.recipe import Recipe
from unsoft.hf.rotary import key_rotation
from unsoft.modules.module import Mechanism
from unsoft.modules.names import MechanismName
from unsoft.modules.registry import label_of

_WRAPPERS = ("torch", "peft")
"""Packages whose wrappers call the wrapped module: sharding, checkpointing, adapters."""
TYPE_PREFIX, PREFIX = "unsoft_", "Unsoft"
"""Prefixes of the model type and of the names of architectures in config.json."""


def swap(
    model: PreTrainedModel,
    mechanism: MechanismName | str | Formula,
    layers: int | str | Collection[int | str] | Mapping[int | str, str | Formula] | None = None,
    keep_first_last: bool = False,
    init: str = "open",
    **options: Any,
) -> PreTrainedModel:
    """Replace the attention of a model by ``mechanism``, in place, and return the model.

    layers
        None: all layers. Numbers and ranges (``[0, "4-7", -1]``): only those, softmax elsewhere. A mapping
        (``{0: "softmax", "8-": "cog"}``): a mechanism for each of those, ``mechanism`` for all others. Each
        tower is numbered from 0.
    keep_first_last
        Softmax in the first and last layer, as Cog's authors recommend.
    init
        "open": learnable mechanisms start close to softmax, where they can; "paper": as published.
    options
        Keywords of the mechanism, such as ``where="mass"`` for magnitude.

    Projections, positions and masks of the model are unchanged. Parameters of the mechanism are submodules of
    the attention modules: they are trained, saved by ``save_pretrained`` and read by :func:`unsoft.hf.load`.
    Raise ValueError for a model that cannot be swapped faithfully.

    >>> import torch, unsoft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    >>> tiny = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> model, ids = LlamaForCausalLM(tiny).eval(), torch.arange(9)[None]
    >>> before = model(ids).logits
    >>> torch.allclose(unsoft.hf.swap(model, "softmax")(ids).logits, before, atol=1e-6)
    True
    >>> torch.allclose(unsoft.hf.swap(model, "cog", layers=[-1])(ids).logits, before, atol=1e-6)
    False
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"swap: argument 'model' must be a transformers model, not {type(model).__name__}")
    _install(model, Recipe(mechanism, layers, keep_first_last, init, options))
    if not isinstance(model, SwappedModel):
        model.__class__ = swapped_class(type(model))
    return model


class _MadeAtRunTime:
    """Pickles and copies by the original class, since the class itself is created at run time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__dict__


def _blank(kind: Any) -> Any:
    """Return an empty swapped model or marked config, for copies and pickles to fill."""
    made = swapped_class(kind) if issubclass(kind, PreTrainedModel) else marked_class(kind)
    return made.__new__(made)


@cache
def derived(mixin: type, kind: type, **more: Any) -> Any:
    """Return ``kind`` with the methods of ``mixin``, under the same name, since pipelines depend on it."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names | more)


class MarkedConfig(_MadeAtRunTime):
    """Methods that a config class gains when its model is swapped."""

    @classmethod
    def get_config_dict(cls, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content of config.json before the swap, and the unused options.

        transformers compares its model type with that of this class.
        """
        content, unused = super().get_config_dict(*args, **options)  # type: ignore[misc]
        return unmarked(content), unused

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content to write to config.json."""
        content: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        content["model_type"] = TYPE_PREFIX + content["model_type"]
        content["architectures"] = [PREFIX + name for name in content.get("architectures") or []]
        return content


def marked_class(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the config class of swapped models."""
    if issubclass(kind, MarkedConfig):
        return kind
    made: type[PreTrainedConfig] = derived(MarkedConfig, cast(Any, kind))
    return made


def mark(config: PreTrainedConfig) -> None:
    """Make a config state, wherever it is written, that its model is swapped."""
    config.__class__ = marked_class(type(config))


def unmarked(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json as it was before the swap."""
    names = [name.removeprefix(PREFIX) for name in content.get("architectures") or []]
    usual = content.get("model_type", "").removeprefix(TYPE_PREFIX)
    return content | {"model_type": usual, "architectures": names}


class SwappedModel(_MadeAtRunTime):
    """Methods that a model class gains when it is swapped; see :func:`swapped_class`."""

    config: PreTrainedConfig
    unsoft_places: list[tuple[nn.Module, str, nn.Module]]
    """Parent, attribute name and module of every attention module."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = None  # the model's default until the mechanisms are there
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        with _ordinary_tensors():
            recipe = Recipe.from_dict(getattr(config, NAME))
        _install(self, recipe)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; raise ValueError if a tool has replaced the swapped attention by its own."""
        if not torch.compiler.is_compiling():
            for parent, name, module in self.unsoft_places:
                if getattr(parent, name) is not module:
                    _check_wrapper(getattr(parent, name), f"{type(parent).__name__}.{name}")
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any
    ) -> None:
        """Raise ValueError for any other implementation: it would silently drop the mechanisms."""
        if attn_implementation != NAME:
            raise ValueError(
                f"set_attn_implementation: {attn_implementation!r} would drop the mechanisms of this model;"
                " use unsoft.hf.swap(model, 'softmax') for softmax"
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **options: Any
    ) -> None:
        """Save model and config as transformers does, and a model card beside them."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **options)  # type: ignore[misc]
        if is_main_process:
            write_card(Path(save_directory), getattr(self.config, NAME), type(self).__name__)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        dynamic = generation_config.cache_implementation in (None, "dynamic")
        wanted = generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None
        if dynamic and wanted and MechanismCache.preferred(self):  # type: ignore[arg-type]
            model_kwargs["past_key_values"] = MechanismCache(self)  # type: ignore[arg-type]
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


def _check_wrapper(module: object, where: str) -> None:
    """Raise ValueError unless ``module`` is known to run the attention module that it replaced."""
    tool = type(module).__module__.partition(".")[0]
    if tool not in _WRAPPERS:
        raise ValueError(
            f"swap: {where} of this model was replaced by a {type(module).__name__} of {tool}, which may"
            " compute softmax instead of the mechanism; use unsoft.lab.interpret.inspect to look into"
            " swapped models"
        )


def swapped_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a model class whose instances have the mechanisms that their config lists."""
    config_class: Any = marked_class(cast(Any, kind.config_class))  # reads swapped folders
    made: type[PreTrainedModel] = derived(SwappedModel, cast(Any, kind), config_class=config_class)
    return made


def _install(model: PreTrainedModel, recipe: Recipe) -> None:
    attentions = attention_modules(model)
    with _ordinary_tensors():  # build all of them first, so that an error leaves the model unchanged
        built = [_swapped(attention, recipe) for attention in attentions]
    _share_first_values(attentions, built)
    for attention, swapped in zip(attentions, built, strict=True):
        setattr(attention.module, NAME, swapped.train(attention.module.training))
        if swapped.wants_hidden or swapped.uses_positions or swapped.rotation is not None:
            architecture.pass_on_inputs(attention.module)
    parts = [(attention.name.rpartition("."), attention.module) for attention in attentions]
    places = [(model.get_submodule(parent), name, module) for (parent, _, name), module in parts]
    model.unsoft_places = places  # type: ignore[assignment]
    PreTrainedModel.set_attn_implementation(model, NAME)
    setattr(model.config, NAME, recipe.to_dict() | _origin(model))
    # Both are written to config.json, so that plain transformers raises instead of running softmax.
    model.config.attn_implementation = NAME
    mark(model.config)


def _origin(model: PreTrainedModel) -> dict[str, Any]:
    """Return what the model card says about the origin of a model: a later swap or loading keeps it."""
    known: Mapping[str, Any] = getattr(model.config, NAME, {})
    base = known.get("base_model") or model.config.name_or_path or ""
    if base and Path(base).exists():  # a path of this machine
        base = Path(base).resolve().name
    origin = {"base_model": base, "conversion": known.get("conversion")}
    return {name: value for name, value in origin.items() if value}


def _share_first_values(attentions: list[AttentionModule], built: list[Swapped]) -> None:
    needing = next((swapped for swapped in built if swapped.needs_first_value), None)
    if needing is None:
        return
    if sum(attention.layer_spec.layer == 0 for attention in attentions) != 1:
        raise ValueError(
            f"swap: {needing.label!r} adds the values of the first layer, and this model has several that"
            " are first (an encoder and a decoder, or two towers)"
        )
    shared = FirstValues()
    for swapped in built:
        swapped.first_values = shared


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make new tensors float32 on the CPU.

    While transformers loads a model, new tensors have no content, and formulas cannot be analysed.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _swapped(attention: AttentionModule, recipe: Recipe) -> Swapped:
    module, layer_spec = attention.module, attention.layer_spec
    mechanism = recipe.build(layer_spec)
    what = recipe.mechanism_of(layer_spec.layer, layer_spec.layers or 1)
    label = label_of(what) if isinstance(what, str) else str(what)
    if mechanism.takes_fields or "fields_from" in recipe.options:
        raise ValueError(
            f"swap: a model cannot give {label!r} its fields, and a class cannot be saved with it; register"
            " the formula with unsoft.register(name, formula, fields_from=...) and swap by that name"
        )
    if mechanism.uses_hidden:
        mechanism = recipe.build(architecture.with_hidden_width(attention, label))
    _check_direction(mechanism, label, attention)
    _check_key_heads(mechanism, label, getattr(module.config, "num_key_value_heads", None))
    if recipe.init == "open":  # docs/hf.md lists how close each part starts to doing nothing
        for part in mechanism.parts:
            part.open_start()
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None and not mechanism.formulas:  # linear attention has none
        raise ValueError(
            f"swap: {type(module).__name__} caps its logits at {softcap:g}, and {label!r} has no"
            " logits that could be capped"
        )
    if softcap is not None:
        mechanism.replace_formulas(lambda formula: capped(formula, softcap))
    swapped = Swapped(mechanism, label, softcap, architecture.has_window(module), attention.causal)
    if swapped.gates_keys:
        swapped.rotation = key_rotation(module, label)
    like = next(module.parameters(), None)
    if like is None:
        raise ValueError(
            f"swap: {type(module).__name__} {attention.name!r} has no parameters: projections are missing"
        )
    return swapped.to(device=like.device, dtype=like.dtype)


def capped(formula: Formula, cap: float) -> Formula:
    """Return the formula with Gemma 2's cap on logits, s to c tanh(s / c).

    A float mask is added after the cap, as in the model.

    >>> from unsoft.modules.registry import resolve
    >>> logits = torch.tensor([90.0, 0.0, -3.0])
    >>> torch.allclose(capped(resolve("softmax"), 5.0).row(logits), (5 * (logits / 5).tanh()).softmax(-1))
    True
    """
    return formula.with_logit(cap * make("tanh", symbol("s") / cap))


def _check_direction(mechanism: Mechanism, label: str, attention: AttentionModule) -> None:
    module = attention.module
    both_ways = attention.causal is False or not getattr(module.config, "is_causal", True)
    if both_ways and mechanism.causal_only:
        raise ValueError(
            f"swap: {label!r} looks back only, and {type(module).__name__} looks both ways; use a"
            " mechanism that can, such as 'linear-relu' or 'softmax', there"
        )
    if both_ways and mechanism.uses_positions and getattr(module, "is_decoder", False):
        raise ValueError(
            f"swap: {label!r} uses positions, and queries and keys of the cross-attention {attention.name}"
            " have none in common"
        )


def _check_key_heads(mechanism: Mechanism, label: str, key_heads: int | None) -> None:
    for part in mechanism.parts:
        multiple = part.key_head_multiple
        if (key_heads or 0) % multiple:
            wanted = "even" if multiple == 2 else f"a multiple of {multiple}"
            raise ValueError(
                f"swap: {label!r} puts heads together, so the number of key heads must be {wanted}, not"
                f" {key_heads}"
            )
