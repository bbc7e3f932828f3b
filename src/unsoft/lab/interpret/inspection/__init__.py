"""Measure the attention heads of a transformers model. Inspection is read-only."""

from unsoft.lab.interpret.inspection.result import Inspection
from unsoft.lab.interpret.inspection.walk import inspect

__all__ = ["Inspection", "inspect"]
