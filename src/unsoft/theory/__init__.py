"""Closed forms and quadrature: an oracle that shares no numerics with the engines that it checks.

>>> from unsoft import theory
>>> theory.sparsity("relu2", beta=-1.0, gamma=[0.5, 1.0, 2.0])
tensor([0.0720, 0.2053, 0.3015], dtype=torch.float64)
"""

from unsoft.theory.finite import Empirical, empirical_sparsity, length_correction, widest_spread
from unsoft.theory.hijack import MagnitudeHijack, density_hijack, hijack_share, magnitude_hijack
from unsoft.theory.infinite import Limits, Minimum, can_focus, limits, minimum, sparsity
from unsoft.theory.linear import (
    Ranks,
    decay_bound,
    decay_sparsity,
    iid_linear_floor,
    iid_linear_sparsity,
    linear_sparsity,
    performer_sparsity,
    ranks,
)

__all__ = [
    "Empirical",
    "MagnitudeHijack",
    "Limits",
    "Minimum",
    "Ranks",
    "can_focus",
    "decay_bound",
    "decay_sparsity",
    "density_hijack",
    "empirical_sparsity",
    "hijack_share",
    "iid_linear_floor",
    "iid_linear_sparsity",
    "length_correction",
    "limits",
    "linear_sparsity",
    "magnitude_hijack",
    "minimum",
    "performer_sparsity",
    "ranks",
    "sparsity",
    "widest_spread",
]
