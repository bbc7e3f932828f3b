"""A pretrained model moved to another mechanism: swap, match every layer to the original, fine-tune."""

from unsoft.training.conversion.result import Converted
from unsoft.training.conversion.run import convert
from unsoft.training.conversion.spec import Conversion

__all__ = ["Conversion", "Converted", "convert"]
