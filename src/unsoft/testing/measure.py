"""One comparison: an error and what is tolerated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype

GATES = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""c in RMS(y - r) <= c eps RMS(size), for every mechanism, with the sizes of :mod:`unsoft.testing.natural`.

The largest c measured in float32 was 0.93 over the battery (13 built-ins, 11 other formulas, 4 seeds, every
engine) and 2.7 over 5,000 generated calls, some of which have a single number as their result. In half
precision 1 is a bound and not an estimate; 0.59 was measured."""


@dataclass(frozen=True)
class Measure:
    """What was compared, how far apart it is, and how far it may be (0 = must be equal)."""

    label: str
    error: float
    tolerance: float = 0.0
    case: str = ""
    """The point of the grid it was taken at, if it was."""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def ratio(self) -> float:
        """Error over tolerance; 0 for no error at all."""
        if self.error == 0:
            return 0.0
        return math.inf if self.tolerance == 0 or math.isnan(self.error) else self.error / self.tolerance

    def __str__(self) -> str:
        if self.error == math.inf and self.tolerance == 0:
            return f"{self.label}: this does not hold"
        limit = "must be equal" if self.tolerance == 0 else f"tolerance {self.tolerance:.3g}"
        return f"{self.label}: error {self.error:.3g}, {limit}"


def close(label: str, result: Tensor, reference: Tensor, size: Tensor, dtype: torch.dtype) -> Measure:
    """RMS(result - reference) against c eps RMS(size), with c and eps of ``dtype``."""
    if result.shape != reference.shape:
        return Measure(f"{label} has shape {tuple(reference.shape)}, found {tuple(result.shape)}", math.inf)
    underflow = torch.finfo(compute_dtype(dtype)).smallest_normal
    tolerance = GATES[dtype] * torch.finfo(dtype).eps * rms(size) + underflow
    return Measure(label, rms(result.double() - reference.double()), tolerance)


def equal(label: str, result: Tensor, expected: Tensor | float) -> Measure:
    """The largest difference, which must be 0; NaN equals only NaN.

    >>> equal("zeros", torch.zeros(2), 0.0).ok, equal("nan", torch.tensor([torch.nan]), 0.0).ok
    (True, False)
    """
    expected = torch.as_tensor(expected, dtype=result.dtype).expand(result.shape)
    if not torch.equal(result.isnan(), expected.isnan()):
        return Measure(f"{label}: NaN only where expected", math.inf)
    difference = torch.where(result == expected, 0.0, result.double() - expected.double()).abs()
    return Measure(label, float(difference[~result.isnan()].max()) if (~result.isnan()).any() else 0.0)


def fact(label: str, holds: bool) -> Measure:
    """Something that is either true or not; the label says what should be."""
    return Measure(label, 0.0 if holds else math.inf)


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 for an empty tensor."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0
