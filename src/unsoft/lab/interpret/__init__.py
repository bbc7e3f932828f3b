"""Interpret a model: measure every head, log attention while training, find confidence neurons, steer.

Needs the extra ``hf``. The packages are imported on first use, since transformers is heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsoft.lab.interpret import inspection, neurons, steering
    from unsoft.lab.interpret.attention_stats import AttentionStats
    from unsoft.lab.interpret.inspection import Inspection, inspect

__all__ = ["AttentionStats", "Inspection", "inspect", "inspection", "neurons", "steering"]


def __getattr__(name: str) -> Any:
    """Import a package or a class on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'unsoft.lab.interpret' has no attribute {name!r}")
    modules = {"AttentionStats": "attention_stats", "Inspection": "inspection", "inspect": "inspection"}
    if name in modules:
        return getattr(importlib.import_module(f"unsoft.lab.interpret.{modules[name]}"), name)
    return importlib.import_module(f"unsoft.lab.interpret.{name}")


def __dir__() -> list[str]:
    return __all__
