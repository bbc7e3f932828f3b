"""The weights keep what the formula's properties say, with its default parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case, Inputs
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.measure import Measure, fact

CASES = [Case(20, 30, mask="bool"), Case(66, 66, causal=True, spread=4.0)]
_EXACT = {-1.0, 1.0, -torch.inf}
"""Ends that the analysis knows exactly; it rounds others to three digits."""


def signs(check: Check) -> Iterator[Measure]:
    """Without ``signed`` no weight is negative."""
    if check.formula.properties.signed:
        raise NotApplicable("the formula is signed")
    yield from check.over(CASES, lambda case: _non_negative(check, case))


def _non_negative(check: Check, case: Case) -> Iterator[Measure]:
    weights = check.weights(_with_defaults(check, case), torch.float32)
    yield fact(f"{case}: no negative weight", bool((weights >= 0).all()))


def sums(check: Check) -> Iterator[Measure]:
    """Row sums, plain and of absolute values, lie where ``row_sum`` and ``l1`` say,
    to 4 sqrt(S) roundings."""
    promised = {
        "sum": check.formula.properties.row_sum,
        "sum of absolute values": check.formula.properties.l1,
    }
    checked = {
        name: interval.ends()
        for name, interval in promised.items()
        if not interval.power and _EXACT.issuperset(interval.ends())
    }
    if not checked:
        raise NotApplicable("the formula promises nothing about sums")
    yield from check.over(CASES, lambda case: _in_range(check, case, checked))


def _in_range(check: Check, case: Case, checked: dict[str, tuple[float, float]]) -> Iterator[Measure]:
    weights = check.weights(_with_defaults(check, case))
    alive = weights.abs().sum(-1) > 0
    for name, (low, high) in checked.items():
        total = (weights if name == "sum" else weights.abs()).sum(-1)[alive]
        yield Measure(
            f"{case}: {name} of a row",
            outside(total, low, high),
            4 * torch.finfo(DOUBLE).eps * case.keys**0.5,
        )


def outside(x: Tensor, low: float | Tensor, high: float | Tensor) -> float:
    """How far the furthest of some numbers lies outside of its range."""
    return float(torch.maximum(x - high, low - x).clamp(min=0.0).max()) if x.numel() else 0.0


def _with_defaults(check: Check, case: Case) -> Inputs:
    inputs = check.draw(case)
    leaves = {name: x for name, x in inputs.leaves.items() if not name.startswith("params.")}
    return replace(inputs, leaves=leaves, params=())


PROPERTIES = [Property("signs", signs), Property("row sums", sums)]
