"""Gradients are the derivatives of the outputs, by finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure, fact

CASES = [
    Case(3, 4, 2, 2, 1, 2, 1, mask="additive"),
    Case(4, 4, 2, 3, 1, 1, 1, causal=True),
    Case(3, 5, 3, 1, 1, 1, 1, mask="dead rows", causal="lower_right"),
    Case(2, 3, 2, 2, 2, 2, 2, mask="additive per key", dropout=0.3),
]
_AWAY = 1e-4
"""Finite differences step 1e-6, so corners of the formula must be well away from the logits."""


def first_order(check: Check) -> Iterator[Measure]:
    """torch's gradcheck: every derivative of every output, to 1e-5 absolute or 0.1% relative."""
    for case in CASES[:2] if check.quick else CASES:
        options = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}
        yield fact(f"gradcheck, {case}", _tested(check, case, torch.autograd.gradcheck, options))


def forward_mode(check: Check) -> Iterator[Measure]:
    """torch's gradcheck of the forward-mode derivative, in fast mode: along random directions."""
    for case in CASES[:1] if check.quick else CASES:
        options = {
            "fast_mode": True,
            "check_forward_ad": True,
            "check_backward_ad": False,
            "check_undefined_grad": False,
        }
        yield fact(f"forward-mode gradcheck, {case}", _tested(check, case, torch.autograd.gradcheck, options))


def second_order(check: Check) -> Iterator[Measure]:
    """torch's gradgradcheck in fast mode: gradients of gradients along random directions."""
    for case in CASES[:1] if check.quick else CASES[:2]:
        yield fact(
            f"gradgradcheck, {case}", _tested(check, case, torch.autograd.gradgradcheck, {"fast_mode": True})
        )


def _tested(check: Check, case: Case, test: Callable[..., bool], options: dict[str, Any]) -> bool:
    """One of torch's tests of the call as a function of its leaves."""
    inputs = check.draw(case, near=_AWAY)
    leaves = inputs.copies(DOUBLE)

    def function(*given: Tensor) -> Tensor:
        return check.call(inputs, inputs.arguments(dict(zip(leaves, given, strict=True))))

    with torch.random.fork_rng(devices=[]):  # torch draws its directions from the global generator
        torch.manual_seed(inputs.seed)
        return test(function, list(leaves.values()), raise_exception=False, **options)


PROPERTIES = [
    Property("first derivatives", first_order, engines=("dense",)),
    Property("forward mode", forward_mode, engines=("dense",)),
    Property("second derivatives", second_order, engines=("dense",)),
]
