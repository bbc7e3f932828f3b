"""A call is a function: same bits every time, inputs untouched, results in memory of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unsoft.testing.case import Case
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure, equal, fact

CASES = [
    Case(1, 1, 4, 4, 1, 1, 1),
    Case(70, 66, 8, 8, 2, 3, 1, mask="additive"),
    Case(9, 9, 8, 8, 2, 2, 2, mask="bool", layout="heads last"),
]


def deterministic(check: Check) -> Iterator[Measure]:
    """Two identical calls give identical bits, output and gradients."""
    yield from check.over(CASES, lambda case: _twice(check, case))


def _twice(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    first, second = check.run(inputs, torch.float32), check.run(inputs, torch.float32)
    for name in first:
        yield equal(f"{case}: {name}", second[name], first[name])


def inputs_stay(check: Check) -> Iterator[Measure]:
    """No input is written to, and neither output nor gradients share memory with an input or each other."""
    yield from check.over(CASES, lambda case: _untouched(check, case))


def _untouched(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    check.require(inputs, torch.float32, check.engine)
    leaves = inputs.copies(torch.float32)
    given = [*leaves.values(), *([] if inputs.visible is None else [inputs.visible])]
    before = [x.detach().clone() for x in given]
    output = check.call(inputs, inputs.arguments(leaves))
    grads = torch.autograd.grad(output, list(leaves.values()), inputs.grad_out.float())
    for x, copy in zip(given, before, strict=True):
        yield equal(
            f"{case}: an input of shape {tuple(x.shape)} after the call", x.detach().double(), copy.double()
        )
    memory = [x.untyped_storage().data_ptr() for x in given]
    # Autograd may cut the gradients of parameters out of one tensor.
    results = [
        output,
        *(grad for name, grad in zip(leaves, grads, strict=True) if not name.startswith("params.")),
    ]
    mine = [x.untyped_storage().data_ptr() for x in results]
    yield fact(f"{case}: no result shares memory with an input", not set(memory) & set(mine))
    yield fact(f"{case}: no result shares memory with another", len(set(mine)) == len(mine))


PROPERTIES = [Property("deterministic", deterministic), Property("inputs stay as they are", inputs_stay)]
