"""Conversion of a pretrained model to another mechanism: swap, match every layer to the original,
fine-tune.
"""

from unsoft.lab.training.conversion.run import convert
from unsoft.lab.training.conversion.spec import Conversion, Converted

__all__ = ["Conversion", "Converted", "convert"]
