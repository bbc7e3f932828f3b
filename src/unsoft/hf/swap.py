"""``unsoft.hf.swap``: another mechanism in the attention of a transformers model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from unsoft.formula import Formula
from unsoft.hf.architecture import Found, attention_modules
from unsoft.hf.attention import NAME, Swapped
from unsoft.hf.cache import MechanismCache
from unsoft.hf.recipe import Recipe
from unsoft.hf.softcap import cap_logits
from unsoft.hf.start import open_start


def swap(
    model: PreTrainedModel, mechanism: str | Formula,
    layers: int | str | Collection[int | str] | Mapping[int | str, str | Formula] | None = None,
    keep_first_last: bool = False, init: str = "open", **options: Any,
) -> PreTrainedModel:  # fmt: skip
    """The same model with ``mechanism`` in its attention; changed in place and returned.

    layers
        None: all of them. Numbers and ranges (``[0, "4-7", -1]``): only those, softmax elsewhere. A mapping
        (``{0: "softmax", "8-": "cog"}``): those get their own, all others ``mechanism``. Towers are counted each for itself.
    keep_first_last
        Softmax in the first and last layer, as Cog's authors prescribe.
    init
        "open": learnable mechanisms start close to doing nothing, where they can; "paper": as published.
    options
        Keywords of the mechanism, such as ``where="mass"`` for magnitude.

    Projections, positions and masks stay the model's own. Parameters of the mechanism are submodules of the attention modules: they are
    trained, saved by ``save_pretrained`` and read by :func:`unsoft.hf.load`. A model that cannot be swapped faithfully is a ValueError.

    >>> import torch, unsoft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
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


class SwappedModel:
    """What a model class gains when it is swapped; see :func:`swapped_class`."""

    config: PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        _install(self, Recipe.from_dict(getattr(config, NAME)))  # type: ignore[arg-type]

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        """Refuses anything else: it would silently drop the mechanisms."""
        if attn_implementation != NAME:
            raise ValueError(
                f"set_attn_implementation: {attn_implementation!r} would drop the mechanisms of this model; use unsoft.hf.swap(model,"
                " 'softmax') for softmax"
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        plain = (
            generation_config.cache_implementation in (None, "dynamic")
            and generation_config.use_cache is not False
        )
        if plain and model_kwargs.get("past_key_values") is None and MechanismCache.needed(self):  # type: ignore[arg-type]
            model_kwargs["past_key_values"] = MechanismCache(self)  # type: ignore[arg-type]
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


@cache
def swapped_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A model class whose instances have the mechanisms that their config names. It keeps its name, which pipelines look at."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (SwappedModel, kind), names)


def _install(model: PreTrainedModel, recipe: Recipe) -> None:
    found = attention_modules(model)
    built = [_swapped(one, recipe) for one in found]  # all of them first: an error leaves the model as it was
    for one, swapped in zip(found, built, strict=True):
        setattr(one.module, NAME, swapped.train(one.module.training))
    PreTrainedModel.set_attn_implementation(model, NAME)
    setattr(model.config, NAME, recipe.to_dict())
    # Written to config.json, so that plain transformers refuses to load what it cannot run.
    model.config.attn_implementation = NAME


def _swapped(found: Found, recipe: Recipe) -> Swapped:
    mechanism = recipe.build(found.place)
    if recipe.init == "open":
        open_start(mechanism)
    label = str(recipe.mechanism_of(found.place.layer, found.place.layers))
    softcap = getattr(found.module, "attn_logit_softcapping", None)
    if softcap is not None and not cap_logits(mechanism, softcap):
        raise ValueError(
            f"swap: {type(found.module).__name__} caps its logits at {softcap:g}, and {label!r} has no logits that could be capped"
        )
    swapped = Swapped(mechanism, label, softcap, getattr(found.module, "sliding_window", None))
    like = next(found.module.parameters())
    return swapped.to(device=like.device, dtype=like.dtype)
