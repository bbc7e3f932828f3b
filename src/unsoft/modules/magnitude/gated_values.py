"""Values times the gates of their keys (``where="values"``)."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.gaussian import kernels_for


def gated_values(value: Tensor, gate: Tensor, engine: str) -> Tensor:
    """Values (..., keys, width) times gates (..., keys), in the dtype of the values.

    A value that is not finite, as a masked key's may be, gives the gate no gradient.
    """
    tracing = torch.compiler.is_compiling()
    kernels = None if tracing else kernels_for(gate.flatten(0, -2)[..., None], engine)
    if kernels is not None and kernels.gated is not None:
        return kernels.gated(value, gate)
    gate = gate[..., None].to(value.dtype)
    if not gate.requires_grad:
        return value * gate
    finite = value.isfinite()
    if not tracing and bool(finite.all()):
        return value * gate
    return torch.where(finite, value, 0.0) * gate + torch.where(finite, 0.0, value)
