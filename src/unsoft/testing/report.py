"""Results of the test suite: comparisons with their tolerance, and the table of all of them."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.errors import CompilerWarning

GATES = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""c in RMS(y - r) <= c eps RMS(size), for every mechanism, with the sizes of :mod:`unsoft.testing.rounding`.

The largest c measured in float32 was 0.93 over the battery (13 built-ins, 11 other formulas, 4 seeds, every
engine) and 2.7 over 5,000 generated calls, some of which have a single number as their result. In half
precision 1 is a bound and not an estimate; 0.59 was measured."""


class NotApplicable(Exception):
    """Raised when a property or a case does not apply to a mechanism or engine; the message is the reason."""


@dataclass(frozen=True)
class Measure:
    """One comparison: its label, the error and the tolerance (0 = must be equal)."""

    label: str
    error: float
    tolerance: float = 0.0
    case: str = ""
    """The text of the grid case, for the theme "sizes"."""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def ratio(self) -> float:
        """Error over tolerance; 0 if there is no error."""
        if self.error == 0:
            return 0.0
        return math.inf if self.tolerance == 0 or math.isnan(self.error) else self.error / self.tolerance

    def __str__(self) -> str:
        if self.error == math.inf and self.tolerance == 0:
            return f"{self.label}: this does not hold"
        limit = "must be equal" if self.tolerance == 0 else f"tolerance {self.tolerance:.3g}"
        return f"{self.label}: error {self.error:.3g}, {limit}"


def close(label: str, result: Tensor, reference: Tensor, size: Tensor, dtype: torch.dtype) -> Measure:
    """Compare RMS(result - reference) with c eps RMS(size), with c and eps of ``dtype``."""
    if result.shape != reference.shape:
        return Measure(f"{label} has shape {tuple(reference.shape)}, found {tuple(result.shape)}", math.inf)
    underflow = torch.finfo(compute_dtype(dtype)).smallest_normal
    tolerance = GATES[dtype] * torch.finfo(dtype).eps * rms(size) + underflow
    return Measure(label, rms(result.double() - reference.double()), tolerance)


def equal(label: str, result: Tensor, expected: Tensor | float) -> Measure:
    """Require that all numbers are equal; NaN equals only NaN.

    >>> equal("zeros", torch.zeros(2), 0.0).ok, equal("nan", torch.tensor([torch.nan]), 0.0).ok
    (True, False)
    """
    expected = torch.as_tensor(expected, dtype=result.dtype).expand(result.shape)
    if not torch.equal(result.isnan(), expected.isnan()):
        return Measure(f"{label}: NaN only where expected", math.inf)
    difference = torch.where(result == expected, 0.0, result.double() - expected.double()).abs()
    return Measure(label, float(difference[~result.isnan()].max()) if (~result.isnan()).any() else 0.0)


def fact(label: str, holds: bool) -> Measure:
    """Require that something is true; the label says what."""
    return Measure(label, 0.0 if holds else math.inf)


def rms(x: Tensor) -> float:
    """Return the root of the mean square; 0 for an empty tensor."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


@dataclass(frozen=True)
class Row:
    """One property on one engine."""

    theme: str
    promise: str
    engine: str
    cases: int = 0
    worst: Measure | None = None
    """The measure closest to its tolerance, or furthest beyond it."""
    skipped: str = ""
    """Why the property does not apply."""
    error: str = ""
    """The exception that stopped it."""

    @property
    def ok(self) -> bool:
        return not self.error and (self.worst is None or self.worst.ok)

    @property
    def finding(self) -> str:
        """The last column of the table: the share of the tolerance that was used, or the failure."""
        if self.error:
            return f"FAILED: raised {self.error}"
        if self.worst is None:
            return f"skipped: {self.skipped}"
        if not self.worst.ok:
            return f"FAILED: {self.worst}"
        return f"ok, {self.worst.ratio:.0%} of the tolerance" if self.worst.tolerance else "ok, exact"


@dataclass(frozen=True)
class Report:
    """The rows of a run of :func:`unsoft.testing.check_mechanism`; prints as a table."""

    mechanism: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """True if every property holds on every engine."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        """Rows of properties that do not hold."""
        return [row for row in self.rows if not row.ok]

    @property
    def cases(self) -> int:
        """Number of comparisons."""
        return sum(row.cases for row in self.rows)

    def __str__(self) -> str:
        head = ("property", "engine", "cases", "finding")
        table = [head, *((f"{r.theme}: {r.promise}", r.engine, str(r.cases), r.finding) for r in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        verdict = "all hold" if self.ok else f"{len(self.failures)} of {len(self.rows)} fail"
        lines = [
            f"{name:<{widths[0]}}  {engine:<{widths[1]}}  {cases:>{widths[2]}}  {finding}".rstrip()
            for name, engine, cases, finding in table
        ]
        return "\n".join([f"{self.mechanism}: {self.cases} comparisons, {verdict}", *lines])


def tested(theme: str, promise: str, engine: str, measures: Iterable[Measure]) -> Row:
    """Return the row of a property from its measures, which are computed here.

    An exception is a failed property and not the end of the run, except :class:`NotApplicable`.
    """
    done: list[Measure] = []
    skipped = failure = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompilerWarning)  # "auto" is checked without a compiler, too
        try:
            done.extend(measures)
        except NotApplicable as reason:
            skipped = str(reason)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    worst = max(done, key=lambda m: m.ratio if m.ok else math.inf, default=None)
    return Row(theme, promise, engine, len(done), worst, skipped, failure)
