"""Which neurons of a language model regulate its confidence (Stolfo et al. 2024)?

``scan`` looks at one layer: entropy neurons act through the scale of the final norm, token-frequency neurons
along the logarithm of word frequency. Effects are measured by ablation and compared with neurons like them.
"""

from unsoft.lab.interpret.neurons.result import Scan
from unsoft.lab.interpret.neurons.scan import scan

__all__ = ["Scan", "scan"]
