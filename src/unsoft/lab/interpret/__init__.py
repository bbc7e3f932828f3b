"""Interpret a model: measure every head, find confidence neurons, steer along directions.

Needs the extra ``hf``.
"""

from unsoft.lab.interpret import inspection, neurons, steering
from unsoft.lab.interpret.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect", "inspection", "neurons", "steering"]
