"""Gradients are the derivatives of the outputs, by finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from unsoft.attention import attention
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
        function, leaves = _function(check, case)
        tested = torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-5, rtol=1e-3, raise_exception=False)
        yield fact(f"gradcheck, {case}", tested)


def forward_mode(check: Check) -> Iterator[Measure]:
    """torch's gradcheck of the forward-mode derivative, in fast mode: along random directions."""
    for case in CASES[:1] if check.quick else CASES:
        function, leaves = _function(check, case)
        options = {"check_forward_ad": True, "check_backward_ad": False, "check_undefined_grad": False}
        tested = torch.autograd.gradcheck(function, leaves, fast_mode=True, raise_exception=False, **options)
        yield fact(f"forward-mode gradcheck, {case}", tested)


def second_order(check: Check) -> Iterator[Measure]:
    """torch's gradgradcheck in fast mode: gradients of gradients along random directions."""
    for case in CASES[:1] if check.quick else CASES[:2]:
        function, leaves = _function(check, case)
        tested = torch.autograd.gradgradcheck(function, leaves, fast_mode=True, raise_exception=False)
        yield fact(f"gradgradcheck, {case}", tested)


def _function(check: Check, case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call as a function of its leaves, and those."""
    inputs = check.draw(case, near=_AWAY)
    leaves = inputs.copies(DOUBLE)

    def function(*given: Tensor) -> Tensor:
        arguments = inputs.arguments(dict(zip(leaves, given, strict=True)))
        with torch.random.fork_rng(devices=[], enabled=case.dropout > 0):
            if case.dropout > 0:
                torch.manual_seed(inputs.seed)
            return attention(mechanism=check.formula, engine=check.engine, **arguments)

    return function, list(leaves.values())


PROPERTIES = [
    Property("first derivatives", first_order, engines=("dense",)),
    Property("forward mode", forward_mode, engines=("dense",)),
    Property("second derivatives", second_order, engines=("dense",)),
]
