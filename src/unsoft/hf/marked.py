"""config.json of a swapped model: a model type and an architecture that only unsoft knows.

If a folder said "llama", any program that knows Llama but not unsoft would run it with softmax. So the model
type that is written is the sentence that says what to install; in memory a config keeps its usual type.
:mod:`unsoft.hf.load` reads such folders.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from transformers import PreTrainedConfig

MODEL_TYPE = "attention by unsoft: pip install 'unsoft[hf]', then import unsoft.hf"
PREFIX = "Unsoft"
"""Prefix of the names of architectures."""
BASE = "unsoft_base_model_type"
"""Key of the usual model type."""


class MarkedConfig:
    """Methods that a config class gains when its model is swapped."""

    @classmethod
    def get_config_dict(cls, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content of config.json before the swap, and the unused options.

        transformers compares its model type with that of this class.
        """
        content, unused = super().get_config_dict(*args, **options)  # type: ignore[misc]
        return unmarked(content) if BASE in content else content, unused

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content to write to config.json."""
        content: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        content[BASE], content["model_type"] = content["model_type"], MODEL_TYPE
        content["architectures"] = [PREFIX + name for name in content.get("architectures") or []]
        return content

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the original class, since the marked one is created at run time."""
        return _blank, (type(self).__bases__[1],), self.__dict__


def _blank(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    made = marked_class(kind)
    return made.__new__(made)


@cache
def _marked(kind: Any) -> type[PreTrainedConfig]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (MarkedConfig, kind), names)


def marked_class(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the config class of swapped models, under the same name."""
    return kind if issubclass(kind, MarkedConfig) else _marked(cast(Any, kind))


def mark(config: PreTrainedConfig) -> None:
    """Make a config state, wherever it is written, that its model is swapped."""
    config.__class__ = marked_class(type(config))


def unmarked(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json as it was before the swap."""
    names = [name.removeprefix(PREFIX) for name in content.get("architectures") or []]
    plain = content | {"model_type": content[BASE], "architectures": names}
    del plain[BASE]
    return plain
