"""A pretrained model moved to another mechanism: swap, match every layer to the original, fine-tune."""

from unsoft.lab.training.conversion.result import Converted
from unsoft.lab.training.conversion.run import convert
from unsoft.lab.training.conversion.spec import Conversion

__all__ = ["Conversion", "Converted", "convert"]
