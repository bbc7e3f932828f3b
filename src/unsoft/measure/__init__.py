"""Measures: tensors in, numbers out. Can it focus, does it subtract and delete, is it hijacked, does it collapse?

Weights are (..., queries, keys) of any floating dtype, signed or not, normalised or not; a bool ``mask`` that
broadcasts to them says which keys each row sees (True = visible). Row measures give one number for each row, so that
callers average as they like:

>>> import torch
>>> from unsoft import measure
>>> weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
>>> measure.effective_keys(weights)
tensor([1., 4.])

- Hidden entries change nothing, even if they hold NaN. A visible NaN or infinite weight makes NaN of exactly the rows
  that see it (an infinite one leaves ``row_sum`` infinite).
- Rows without mass (all weights 0, nothing visible, no keys) have values, never NaN, and finite gradients: focus
  measures call them flat, shares of mass are 0. Each measure says which value.
- Half precision is computed and answered in float32.
- Differentiable, except ``recovery``, ``key_groups``, ``discrimination``, ``gradient`` and counting.
- Large tensors are walked through in blocks of rows; no copy of their size is made, unless gradients need it.
"""

from unsoft.measure.collapse import (
    Collapse,
    collapse,
    composite_residual,
    effective_rank,
    mean_cosine,
    recovery,
    residual,
    stable_rank,
)
from unsoft.measure.deletion import Deletion, deletion
from unsoft.measure.discrimination import Discrimination, discrimination
from unsoft.measure.focus import (
    distance_to_uniform,
    effective_keys,
    entropy,
    participation,
    sink_mass,
    sparsity,
    top_mass,
)
from unsoft.measure.gradient import Gradient, gradient
from unsoft.measure.groups import key_groups
from unsoft.measure.heads import head_similarity, parameter_similarity
from unsoft.measure.hijack import Hijack, hijack, unique_share
from unsoft.measure.sign import cancellation, negative_share, row_sum
from unsoft.measure.summary import Summary, summary

__all__ = [
    "Collapse",
    "Deletion",
    "Discrimination",
    "Gradient",
    "Hijack",
    "Summary",
    "cancellation",
    "collapse",
    "composite_residual",
    "deletion",
    "discrimination",
    "distance_to_uniform",
    "effective_keys",
    "effective_rank",
    "entropy",
    "gradient",
    "head_similarity",
    "hijack",
    "key_groups",
    "mean_cosine",
    "negative_share",
    "parameter_similarity",
    "participation",
    "recovery",
    "residual",
    "row_sum",
    "sink_mass",
    "sparsity",
    "stable_rank",
    "summary",
    "top_mass",
    "unique_share",
]
