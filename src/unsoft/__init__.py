"""Attention beyond softmax: one formula, every engine.

>>> import torch, unsoft
>>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
>>> unsoft.attention(q, k, v, "cog", is_causal=True).shape
torch.Size([1, 2, 5, 8])
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsoft import errors, hf, lab, magnitude, measure, nn, testing, theory
    from unsoft.attention import attention, varlen_attn
    from unsoft.formula import Formula
    from unsoft.mechanisms import mechanisms, register
    from unsoft.modules.build import mechanism

__version__ = "0.2.0"
__all__ = [
    "Formula",
    "attention",
    "errors",
    "hf",
    "lab",
    "magnitude",
    "measure",
    "mechanism",
    "mechanisms",
    "nn",
    "register",
    "testing",
    "theory",
    "varlen_attn",
]

_HOME = {
    "Formula": "unsoft.formula",
    "attention": "unsoft.attention",
    "mechanism": "unsoft.modules.build",
    "mechanisms": "unsoft.mechanisms",
    "register": "unsoft.mechanisms",
    "varlen_attn": "unsoft.attention",
}
"""The modules of the names that are not modules themselves."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``unsoft --help`` then does not import torch, nor ``import unsoft``
    transformers."""
    if name not in __all__:
        raise AttributeError(f"module 'unsoft' has no attribute {name!r}")
    if name not in _HOME:
        return _imported(f"unsoft.{name}")
    globals()[name] = value = getattr(_imported(_HOME[name]), name)
    return value


def _imported(name: str) -> ModuleType:
    """Import a module outside of torch.func transforms: what it creates outlives the one in which it is first
    needed."""
    if "torch" not in sys.modules:
        return importlib.import_module(name)
    from unsoft.tracing import outside_transforms

    with outside_transforms():
        return importlib.import_module(name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__path__", "__version__"})


class _Package(ModuleType):
    """``unsoft.attention`` and ``unsoft.mechanisms`` are functions,
    whichever modules of the same name are imported first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
