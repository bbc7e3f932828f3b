"""What config.json says of a swapped model: a model type and an architecture that nobody else knows.

A folder that said "llama" would be run as softmax by whatever knows Llama and not unsoft. So the type that is
written is the sentence that says what to install; in memory a config keeps its usual one.
:mod:`unsoft.hf.auto` reads such folders.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from transformers import PreTrainedConfig

MODEL_TYPE = "attention by unsoft: pip install 'unsoft[hf]', then import unsoft.hf"
PREFIX = "Unsoft"
"""Before the names of architectures."""
BASE = "unsoft_base_model_type"
"""Where the usual model type is kept."""


class Marked:
    """What a config class gains when its model is swapped."""

    @classmethod
    def get_config_dict(cls, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what config.json would say before the swap, so that transformers compares the usual model
        type with that of this class, and the options that were not used."""
        content, unused = super().get_config_dict(*args, **options)  # type: ignore[misc]
        return unmarked(content) if BASE in content else content, unused

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json."""
        content: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        content[BASE], content["model_type"] = content["model_type"], MODEL_TYPE
        content["architectures"] = [PREFIX + name for name in content.get("architectures") or []]
        return content

    def __reduce__(self) -> tuple[Any, ...]:
        """The class is made on the fly, so copies and pickles name the one it was made from."""
        return _blank, (type(self).__bases__[1],), self.__dict__


def _blank(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    made = marked_class(kind)
    return made.__new__(made)


@cache
def _marked(kind: Any) -> type[PreTrainedConfig]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Marked, kind), names)


def marked_class(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The class of a swapped model's config. It keeps its name."""
    return kind if issubclass(kind, Marked) else _marked(cast(Any, kind))


def mark(config: PreTrainedConfig) -> None:
    """From now on the config says wherever it is written that its model is swapped."""
    config.__class__ = marked_class(type(config))


def unmarked(content: dict[str, Any]) -> dict[str, Any]:
    """What config.json would say of the model before it was swapped."""
    names = [name.removeprefix(PREFIX) for name in content.get("architectures") or []]
    plain = content | {"model_type": content[BASE], "architectures": names}
    del plain[BASE]
    return plain
