"""Training on tasks with transformers' Trainer, and heads that repel each other. Needs the extra ``hf``;
imported on demand.

>>> import unsoft
>>> spec = unsoft.training.Spec(task="census", mechanism="magnitude+cog", steps=3)
>>> spec.filled().width
64
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unsoft.training.spec import Spec

if TYPE_CHECKING:
    from unsoft.training.conversion import Conversion, Converted, convert
    from unsoft.training.repulsion import Repulsion, repulse
    from unsoft.training.result import Result
    from unsoft.training.run import train

__all__ = ["Conversion", "Converted", "Repulsion", "Result", "Spec", "convert", "repulse", "train"]
_HOME = {
    "Conversion": "conversion",
    "Converted": "conversion",
    "convert": "conversion",
    "Repulsion": "repulsion",
    "repulse": "repulsion",
    "Result": "result",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    """What needs transformers is imported on first use: a study can be read, and judged, without it."""
    if name not in _HOME:
        raise AttributeError(f"module 'unsoft.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unsoft.training.{_HOME[name]}"), name)
