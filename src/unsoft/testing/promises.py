"""The weights keep what the formula's properties say, with its default parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case, Inputs
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.measure import Measure, fact

CASES = [Case(20, 30, mask="bool"), Case(66, 66, causal=True, spread=4.0)]
_SUMS = {
    "1": (1.0, 1.0),
    "<= 1": (-torch.inf, 1.0),
    "< 1": (-torch.inf, 1.0),
    "in [-1, 1]": (-1.0, 1.0),
    "in (-1, 1)": (-1.0, 1.0),
}
"""What a text about a sum says: the least and the largest it may be."""


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
    checked = {name: _SUMS[text] for name, text in promised.items() if text in _SUMS}
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


def bounds_of(text: str, module: Any, shape: Sequence[int]) -> tuple[float | Tensor, float | Tensor]:
    """Low and high end of what a promise about sums says of rows (batch, heads, length) of a module.

    Besides the texts of formulas there are "in (a, b)", "< a", "<= a",
    and gpam's in terms of its own l+ and l-.

    >>> bounds_of("in (0, 1)", None, ()), bounds_of("< 2", None, ())
    ((0.0, 1.0), (-inf, 2.0))
    """
    if "l+" in text:
        plus, minus = (x.detach()[None, :, None].expand(shape) for x in module.strengths())
        return (1 + plus - minus,) * 2 if "<=" not in text else (-torch.inf, 1 + plus + minus)
    if text in _SUMS:
        return _SUMS[text]
    if match := re.fullmatch(r"in [(\[](\S+), (\S+)[)\]]", text):
        return float(match[1]), float(match[2])
    if match := re.fullmatch(r"<=? (\S+)", text):
        return -torch.inf, float(match[1])
    if text == "free":
        return -torch.inf, torch.inf
    raise ValueError(f"promises: {text!r} is not understood; say 'free', '1', '< 1', 'in [-1, 1]' or similar")


def _with_defaults(check: Check, case: Case) -> Inputs:
    inputs = check.draw(case)
    leaves = {name: x for name, x in inputs.leaves.items() if not name.startswith("params.")}
    return replace(inputs, leaves=leaves, params=())


PROPERTIES = [Property("signs", signs), Property("row sums", sums)]
