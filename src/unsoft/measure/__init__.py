"""Measures: functions from tensors to numbers, for focus, sign, deletion, hijacking and collapse.

Weights are (..., queries, keys) of any floating dtype, signed or not, normalised or not; a bool ``mask`` that
broadcasts to them is True for the keys that each row sees. Row measures return one number for each row, so
that callers average as they like:

>>> import torch
>>> from unsoft import measure
>>> weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
>>> measure.effective_keys(weights)
tensor([1., 4.])

- Hidden entries change nothing, even if they are NaN. A visible NaN or infinite weight makes NaN of exactly
  the rows that see it (an infinite one leaves ``row_sum`` infinite).
- Rows without mass (all weights 0, nothing visible, no keys) have values, never NaN, and finite gradients:
  for measures of focus they are flat, shares of mass are 0. Each measure documents its value.
- Half precision is computed and returned in float32.
- Differentiable, except ``recovery``, ``key_groups``, ``top_key``, ``discrimination``, ``gradient`` and
  counting.
- Large tensors are processed in blocks of rows; no copy of their size is made, unless gradients need it.

``out, stats = unsoft.attention(..., return_stats=True)`` gives ``entropy``, ``sparsity``, ``row_sum``,
``negative_share``, ``top_key``, ``top_weight``, ``first_share`` (the ``sink_mass`` of the first key) and
``received`` without the weights, with memory that is linear in the sequence length.

To add a measure, write its function in a file of this folder and import it here. A measure of rows that is
also a field of ``Summary`` is part of ``summary`` and so of ``unsoft inspect``.
"""

from unsoft.measure.erasing import Deletion, deletion, dynamic_deletion
from unsoft.measure.heads import head_similarity, parameter_similarity
from unsoft.measure.keys import received, top_key, top_weight
from unsoft.measure.mechanism import Discrimination, Gradient, discrimination, gradient, unique_share
from unsoft.measure.redundancy import Hijack, hijack, key_groups
from unsoft.measure.row_measures import (
    Summary,
    cancellation,
    distance_to_uniform,
    effective_keys,
    entropy,
    negative_share,
    participation,
    row_sum,
    sink_mass,
    sparsity,
    summary,
    top_mass,
)
from unsoft.measure.states import (
    Collapse,
    collapse,
    composite_residual,
    decodability,
    effective_rank,
    mean_cosine,
    recovery,
    residual,
    stable_rank,
)

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
    "decodability",
    "deletion",
    "discrimination",
    "distance_to_uniform",
    "dynamic_deletion",
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
    "received",
    "recovery",
    "residual",
    "row_sum",
    "sink_mass",
    "sparsity",
    "stable_rank",
    "summary",
    "top_key",
    "top_mass",
    "top_weight",
    "unique_share",
]
