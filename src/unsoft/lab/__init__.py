"""The lab: tasks, training, studies, comparisons and interpretation. It tells you whether a mechanism helps.

The library (:mod:`unsoft`) never imports the lab. Packages of the lab are imported on first use, since
several of them need transformers or altair.

>>> from unsoft import lab
>>> "census" in lab.tasks.tasks()
True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsoft.lab import bench, compare, interpret, records, report, study, tasks, training
    from unsoft.lab.trial import try_formula

__all__ = ["bench", "compare", "interpret", "records", "report", "study", "tasks", "training", "try_formula"]


def __getattr__(name: str) -> Any:
    """Import a package of the lab, or ``try_formula``, on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'unsoft.lab' has no attribute {name!r}")
    if name == "try_formula":
        return importlib.import_module("unsoft.lab.trial").try_formula
    return importlib.import_module(f"unsoft.lab.{name}")


def __dir__() -> list[str]:
    return __all__
