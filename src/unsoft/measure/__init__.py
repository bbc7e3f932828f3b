"""Measures: tensors in, numbers out. Can it focus, does it subtract and delete, is it hijacked,
does it collapse?

Weights are (..., queries, keys) of any floating dtype, signed or not, normalised or not; a bool ``mask`` that
broadcasts to them says which keys each row sees (True = visible). Row measures give one number for each row,
so that callers average as they like:

>>> import torch
>>> from unsoft import measure
>>> weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
>>> measure.effective_keys(weights)
tensor([1., 4.])

- Hidden entries change nothing, even if they hold NaN. A visible NaN or infinite weight makes NaN of exactly
  the rows that see it (an infinite one leaves ``row_sum`` infinite).
- Rows without mass (all weights 0, nothing visible, no keys) have values, never NaN, and finite gradients:
  focus measures call them flat, shares of mass are 0. Each measure says which value.
- Half precision is computed and answered in float32.
- Differentiable, except ``recovery``, ``key_groups``, ``discrimination``, ``gradient`` and counting.
- Large tensors are walked through in blocks of rows; no copy of their size is made, unless gradients need it.

A file of this folder is a measure: what its ``__all__`` names is found here, and a row measure
(``@row_measure``) is part of ``summary`` and so of ``unsoft inspect``.
"""

import importlib
import pkgutil
from typing import Any as _Any

__all__: list[str] = []


def _collect() -> None:
    found = {info.name for info in pkgutil.iter_modules(__path__)}
    for name in [*sorted(found - {"overview"}), "overview"]:  # which has a field for every measure before it
        module = importlib.import_module(f"{__name__}.{name}")
        for public in getattr(module, "__all__", ()):
            globals()[public] = getattr(module, public)
            __all__.append(public)
    __all__.sort()


_collect()


def __getattr__(name: str) -> _Any:  # for type checkers, which cannot see what was collected
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
