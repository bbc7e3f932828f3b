"""Training on tasks with transformers' Trainer, conversion of pretrained models, and repulsion between heads.

Needs the extra ``hf``; imported on demand.

>>> import unsoft
>>> spec = unsoft.lab.training.Spec(task="census", mechanism="magnitude+cog", steps=3)
>>> spec.filled().width
64
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unsoft.lab.training.spec import Spec

if TYPE_CHECKING:
    from unsoft.lab.training.conversion import Conversion, Converted, convert
    from unsoft.lab.training.repulsion import Repulsion, repulse
    from unsoft.lab.training.run import Result, train

__all__ = ["Conversion", "Converted", "Repulsion", "Result", "Spec", "convert", "repulse", "train"]
_HOME = {
    **dict.fromkeys(("Conversion", "Converted", "convert"), "conversion"),
    **dict.fromkeys(("Repulsion", "repulse"), "repulsion"),
    **dict.fromkeys(("Result", "train"), "run"),
}


def __getattr__(name: str) -> Any:
    """Import names that need transformers on first use: studies can be read and judged without it."""
    if name not in _HOME:
        raise AttributeError(f"module 'unsoft.lab.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unsoft.lab.training.{_HOME[name]}"), name)
