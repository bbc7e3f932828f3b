"""``attn_implementation="unsoft:cog"``: load a transformers model with a mechanism by its name.

transformers checks the names of attention implementations while it constructs a model. So importing
``unsoft.hf`` wraps the functions that load one: a name of ours is checked before anything is loaded, the
model is loaded with its own attention, and :func:`unsoft.hf.swap` follows. Other names are passed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from unsoft.hf.architecture import uses_interface
from unsoft.hf.attention import NAME
from unsoft.hf.swap import SwappedModel, swap
from unsoft.modules.build import mechanism as build_mechanism


def named_mechanism(implementation: object) -> str | None:
    """Return the mechanism that an ``attn_implementation`` names; None if it is not one of ours.

    Raise ValueError for "unsoft" alone, an unknown name, or a mechanism with parameters.

    >>> named_mechanism("unsoft:cog"), named_mechanism("sdpa")
    ('cog', None)
    >>> named_mechanism("unsoft:gpam")
    Traceback (most recent call last):
    ValueError: attn_implementation: 'gpam' has parameters ...; load the model without attn_implementation ...
    """
    if not isinstance(implementation, str) or implementation.partition(":")[0] != NAME:
        return None
    name = implementation.partition(":")[2]
    if not name:
        raise ValueError(
            f"attn_implementation: {implementation!r} names no mechanism; write 'unsoft:cog'. A model that"
            " was saved after unsoft.hf.swap is loaded by unsoft.hf.load or an Auto class of transformers"
        )
    try:
        # A middle layer: the first and last may have another mechanism, or no parameters.
        built = build_mechanism(name, heads=4, head_dim=8, layer=1, layers=3)
    except ValueError as error:
        raise ValueError(f"attn_implementation: {implementation!r}: {error}") from None
    if list(built.parameters()) or built.query_heads != 4 or built.takes_fields:
        raise ValueError(
            f"attn_implementation: {name!r} has parameters, which a model that was trained without them does"
            f" not; load the model without attn_implementation and call unsoft.hf.swap(model, {name!r})"
        )
    return name


def _requested(kind: type[PreTrainedModel], config: Any, options: dict[str, Any]) -> str | None:
    """Return the mechanism that a call requests by its keyword or its config."""
    implementation = options.get("attn_implementation", getattr(config, "_attn_implementation", None))
    swapped = issubclass(kind, SwappedModel) or hasattr(config, NAME)
    if swapped and implementation == NAME:  # as written in the config.json of swapped models
        return None
    name = named_mechanism(implementation)
    if name is not None and swapped:
        raise ValueError(
            f"attn_implementation: this model was saved with mechanisms of its own; load it without"
            f" attn_implementation and call unsoft.hf.swap(model, {name!r})"
        )
    return name


def _without_implementation(config: Any) -> Any:
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
        config._attn_implementation = None
    return config


def _wrap_loading() -> None:
    """Make ``from_pretrained`` and ``from_config`` accept our names, and other places raise a clear error."""
    pretrained, from_config = (
        cast(Any, vars(PreTrainedModel)[method]).__func__ for method in ("from_pretrained", "_from_config")
    )
    check: Callable[..., str] = PreTrainedModel.get_correct_attn_implementation

    @wraps(pretrained)
    def load(cls: Any, *args: Any, **options: Any) -> Any:
        name = _requested(cls, options.get("config"), options)
        if name is None:
            return pretrained(cls, *args, **options)
        options.pop("attn_implementation", None)
        options["config"] = _without_implementation(options.get("config"))
        loaded = pretrained(cls, *args, **options)
        swap(loaded[0] if isinstance(loaded, tuple) else loaded, name)  # a tuple: with its loading info
        return loaded

    @wraps(from_config)
    def make(cls: Any, config: Any, **options: Any) -> Any:
        name = _requested(cls, config, options)
        if name is None:
            return from_config(cls, config, **options)
        options.pop("attn_implementation", None)
        return swap(from_config(cls, _without_implementation(config), **options), name)

    @wraps(check)
    def checked(self: PreTrainedModel, requested: str | None, is_init_check: bool = False) -> str:
        # swap sets the name once the mechanisms are there; a model under construction has none.
        swapped = not is_init_check and all(hasattr(x, NAME) for x in self.modules() if uses_interface(x))
        name = None if requested == NAME and swapped else named_mechanism(requested)
        if name is not None:
            raise ValueError(
                f"attn_implementation: {requested!r} is for from_pretrained and from_config; for a model in"
                f" memory call unsoft.hf.swap(model, {name!r})"
            )
        return check(self, requested, is_init_check)

    changed: Any = PreTrainedModel  # mypy does not accept other functions for its methods
    changed.from_pretrained, changed._from_config = classmethod(load), classmethod(cast(Any, make))
    changed.get_correct_attn_implementation = checked


_wrap_loading()
