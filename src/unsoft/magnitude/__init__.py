"""Magnitude: how many different points a set holds, and how much of it each point stands for.

    Z_jl = exp(-t |k_j - k_l|^2 / d)        (Z + eps 1) w = 1        magnitude = sum of w

>>> import torch
>>> from unsoft.magnitude import weighting
>>> crowd_and_one = torch.cat([torch.zeros(50, 4), torch.full((1, 4), 5.0)])
>>> weighting(crowd_and_one, t=1.0, eps=1e-3).magnitude                            # 51 points that count as 2
tensor(1.9990)
"""

from unsoft.magnitude.prefix import PrefixWeighting, prefix_weighting
from unsoft.magnitude.solve import Weighting, effective_count, median_t, shares, spread, weighting
from unsoft.magnitude.solver import Status

__all__ = [
    "PrefixWeighting",
    "Status",
    "Weighting",
    "effective_count",
    "median_t",
    "prefix_weighting",
    "shares",
    "spread",
    "weighting",
]
