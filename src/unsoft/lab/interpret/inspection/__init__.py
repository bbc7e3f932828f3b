"""What do the heads of a transformers model do? Nothing of the model is changed to find out."""

from unsoft.lab.interpret.inspection.inspection import Inspection
from unsoft.lab.interpret.inspection.walk import inspect

__all__ = ["Inspection", "inspect"]
