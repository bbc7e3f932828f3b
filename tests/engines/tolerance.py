"""When is a result as close to its float64 reference as its dtype allows?

    RMS(y - r) <= c * eps(dtype) * (1 + sigma) * (RMS(r) + natural)

sigma is the standard deviation of the logits, whose rounding error grows with them; ``natural`` is the size
the result would have without cancellation, so that a result that is nearly 0 for good reasons is not measured
against 0. NaN and Inf must stand in the same places, shape and dtype must be right. Measured for softmax
attention: c up to 0.45 in float32 (PyTorch's own fused kernel: 3.1), 0.11 in float16 and bfloat16.

>>> reference = torch.linspace(-1, 1, 100, dtype=torch.float64)
>>> within_tolerance(reference.float(), reference, natural=1.0)
True
>>> within_tolerance(reference.float() * 1.01, reference, natural=1.0)
False
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.testing.report import rms

GATES = {torch.float32: 1.0, torch.float64: 4.0, torch.float16: 0.25, torch.bfloat16: 0.25}
"""The largest c that passes."""
SDPA_GATE = 4.0
"""The same in float32 for PyTorch's fused kernel."""


@dataclass(frozen=True)
class NaturalSizes:
    """Sizes of the results of attention without cancellation, and the spread of its logits."""

    out: float
    query: float
    key: float
    value: float
    bias: float
    sigma: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float) -> "NaturalSizes":
        """From the inputs of one call, of shapes (..., length, dim)."""
        weight = rms(grad_out) * rms(v) * math.sqrt(max(v.shape[-1], 1))
        sigma = scale * math.sqrt(max(q.shape[-1], 1)) * rms(q) * rms(k)
        return cls(rms(v), weight * rms(k) * scale, weight * rms(q) * scale, rms(grad_out), weight, sigma)


def error_ratio(actual: Tensor, reference: Tensor, *, natural: float, sigma: float = 0.0) -> float:
    """The c of the rule above; infinite if shapes or the places of NaN and Inf differ."""
    reference = reference.double()
    if actual.shape != reference.shape or not torch.equal(actual.isfinite(), reference.isfinite()):
        return math.inf
    finite = reference.isfinite()
    y, r = actual[finite].double(), reference[finite]
    allowed = torch.finfo(actual.dtype).eps * (1 + sigma) * (rms(r) + natural)
    error = rms(y - r)
    return error / allowed if allowed else (0.0 if error == 0 else math.inf)


def within_tolerance(
    actual: Tensor, reference: Tensor, *, natural: float, sigma: float = 0.0, gate: float | None = None
) -> bool:
    """Return True if a result meets the rule. ``gate``: the largest c, by default that of its dtype."""
    return error_ratio(actual, reference, natural=natural, sigma=sigma) <= _gate(actual, gate)


def assert_close_to_reference(
    name: str,
    actual: Tensor,
    reference: Tensor,
    *,
    natural: float,
    sigma: float = 0.0,
    gate: float | None = None,
) -> None:
    """AssertionError with the numbers unless :func:`within_tolerance`."""
    ratio, limit = error_ratio(actual, reference, natural=natural, sigma=sigma), _gate(actual, gate)
    if not ratio <= limit:
        raise AssertionError(
            f"{name}: error ratio c = {ratio:.3g} exceeds {limit:g} ({actual.dtype}, shape"
            f" {tuple(actual.shape)}, sigma {sigma:.3g}, natural size {natural:.3g}, reference shape"
            f" {tuple(reference.shape)})"
        )


def _gate(actual: Tensor, gate: float | None) -> float:
    return GATES[actual.dtype] if gate is None else gate
