"""Find the neurons of a language model that regulate its confidence (Stolfo et al. 2024).

``scan`` examines one layer: entropy neurons act through the scale of the final norm, token-frequency neurons
along the logarithm of word frequency. Effects are measured by ablation and compared with similar neurons.
"""

from unsoft.lab.interpret.neurons.result import Scan
from unsoft.lab.interpret.neurons.scan import scan

__all__ = ["Scan", "scan"]
