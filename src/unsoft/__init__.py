"""Attention beyond softmax: one formula, every engine.

>>> import torch, unsoft
>>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
>>> unsoft.attention(q, k, v, "cog", is_causal=True).shape
torch.Size([1, 2, 5, 8])
"""

import importlib
from typing import Any

from unsoft import errors, magnitude, measure, nn, testing, theory
from unsoft.attention import attention
from unsoft.formula import Formula
from unsoft.mechanisms import mechanisms
from unsoft.mechanisms.build import mechanism

__version__ = "0.1.0"
__all__ = [
    "Formula",
    "attention",
    "errors",
    "hf",
    "magnitude",
    "measure",
    "mechanism",
    "mechanisms",
    "nn",
    "tasks",
    "testing",
    "theory",
    "training",
]

_ON_FIRST_USE = ("hf", "tasks", "training")


def __getattr__(name: str) -> Any:
    """Rooms on first use: two of them import transformers, which takes seconds."""
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"unsoft.{name}")
    raise AttributeError(f"module 'unsoft' has no attribute {name!r}")
