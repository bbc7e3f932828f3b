"""Rows that see nothing, tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from unsoft.testing.case import Case, Inputs
from unsoft.testing.check import Check, Property
from unsoft.testing.matrices import visible_entries
from unsoft.testing.measure import Measure, equal, fact

DEAD = [
    Case(8, 6, mask="dead rows"),
    Case(9, 4, causal="lower_right"),
    Case(70, 66, 8, 8, 1, 4, 2, mask="dead rows"),
    Case(9, 6, mask="additive with -inf", causal=True),
]
EMPTY = [
    Case(4, 0),
    Case(0, 5),
    Case(4, 5, batch=0),
    Case(0, 5, causal=True),
    Case(4, 0, mask="additive"),
    Case(4, 5, batch=0, mask="additive"),
]


def dead_rows(check: Check) -> Iterator[Measure]:
    """A row without a visible key outputs exact zeros, gets a zero gradient, and gives none to anything."""
    yield from check.over(DEAD[::2] if check.quick else DEAD, lambda case: _dead(check, case))


def _dead(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    seen = visible_entries(inputs).any(-1, keepdim=True)
    results = check.run(inputs, torch.float32)
    yield fact(f"{case}: the case has dead rows", not bool(seen.all()))
    yield equal(f"{case}: output of dead rows", results["output"][(~seen).expand_as(results["output"])], 0.0)
    yield equal(
        f"{case}: query gradient of dead rows", results["query"][(~seen).expand_as(results["query"])], 0.0
    )
    yield fact(f"{case}: everything is finite", all(bool(x.isfinite().all()) for x in results.values()))
    if "mask" in results:
        # Finite entries of a dead row exist where causality hid what the mask did not.
        dead = (~seen).expand(inputs.case.shape).all(0).all(0)
        yield equal(
            f"{case}: mask gradient of dead rows", results["mask"].expand(case.length, case.keys)[dead], 0.0
        )
    other = inputs.grad_out + torch.where(seen, 0.0, 5.0)
    moved = check.run(replace(inputs, grad_out=other), torch.float32)
    for name in inputs.leaves:
        yield equal(f"{case}: gradient of {name} by dead rows", moved[name], results[name])


def nothing_visible(check: Check) -> Iterator[Measure]:
    """If no row sees anything, the output and every gradient are exact zeros."""
    case = Case(5, 6, mask="bool")
    inputs = check.draw(case)
    nothing = replace(inputs, visible=torch.zeros(case.shape, dtype=torch.bool))
    yield from check.over([case], lambda case: _zeros(check, nothing, "all masked"))


def empty_tensors(check: Check) -> Iterator[Measure]:
    """No keys: zeros. No queries or no batch: an empty output of the right shape. The backward pass works."""
    yield from check.over(EMPTY, lambda case: _zeros(check, check.draw(case), str(case)))


def _zeros(check: Check, inputs: Inputs, label: str) -> Iterator[Measure]:
    results = check.run(inputs, torch.float32)
    shape = (*inputs.case.shape[:3], inputs.case.value_width)
    yield fact(f"{label}: output has shape {shape}", results["output"].shape == shape)
    for name, result in results.items():
        yield equal(f"{label}: {name if name == 'output' else f'gradient of {name}'}", result, 0.0)


PROPERTIES = [
    Property("dead rows", dead_rows),
    Property("nothing visible", nothing_visible),
    Property("empty tensors", empty_tensors),
]
