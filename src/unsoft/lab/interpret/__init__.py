"""Interpret a model: measure every head, find confidence neurons, steer along directions.

Needs the extra ``hf``. The packages are imported on first use, since transformers is heavy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsoft.lab.interpret import inspection, neurons, steering
    from unsoft.lab.interpret.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect", "inspection", "neurons", "steering"]


def __getattr__(name: str) -> Any:
    """Import a package, or a name of ``inspection``, on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'unsoft.lab.interpret' has no attribute {name!r}")
    if name in ("Inspection", "inspect"):
        return getattr(importlib.import_module("unsoft.lab.interpret.inspection"), name)
    return importlib.import_module(f"unsoft.lab.interpret.{name}")


def __dir__() -> list[str]:
    return __all__
