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
    "testing",
    "theory",
]


def __getattr__(name: str) -> Any:
    """``unsoft.hf`` on first use: it imports transformers, which takes seconds."""
    if name == "hf":
        return importlib.import_module("unsoft.hf")
    raise AttributeError(f"module 'unsoft' has no attribute {name!r}")
