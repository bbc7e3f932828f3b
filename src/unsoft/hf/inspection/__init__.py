"""What do the heads of a transformers model do? Nothing of the model is changed to find out."""

from unsoft.hf.inspection.inspection import Inspection
from unsoft.hf.inspection.walk import inspect

__all__ = ["Inspection", "inspect"]
