"""Causal means causal: nothing after a row reaches it, and a longer sequence changes nothing before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from unsoft.testing.case import Case, Inputs, side_of
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure, equal

CASES = [
    Case(7, 7, causal=True),
    Case(70, 70, 16, 8, 1, 2, 1, causal=True),
    Case(9, 70, 8, 8, 1, 4, 2, causal="lower_right"),
    Case(70, 40, 8, 8, 1, 1, 1, causal="lower_right", mask="additive per key"),
    Case(1, 20, causal=True),
    Case(66, 66, causal=True, mask="bool"),
]


def future_is_inert(check: Check) -> Iterator[Measure]:
    """Changing every query after row t, and all keys and values it cannot see, changes no bit up to row t.

    The gradients of those keys and values, taken from the rows up to t, are exactly 0.
    """
    yield from check.over(CASES[::2] if check.quick else CASES, lambda case: _perturbed(check, case))


def _perturbed(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    for row in {0, case.length // 2, case.length - 1}:
        seen = max(0, min(case.keys, row + 1 + (case.offset or 0)))
        until = replace(inputs, grad_out=_first_rows(inputs.grad_out, row + 1))
        before = check.run(until, torch.float32)
        after = check.run(_with_other_future(until, row, seen), torch.float32)
        label = f"{case}, everything after row {row} changed"
        yield equal(f"{label}: outputs", after["output"][:, :, : row + 1], before["output"][:, :, : row + 1])
        for name in ("key", "value"):
            yield equal(f"{label}: gradient of future {name}", before[name][:, :, seen:], 0.0)


def _first_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.where(torch.arange(x.shape[2])[:, None] < count, x, 0.0)


def _with_other_future(inputs: Inputs, row: int, seen: int) -> Inputs:
    source = torch.Generator().manual_seed(row)
    changed = {}
    starts = {"query": row + 1, "key": seen, "value": seen}
    for name, leaf in inputs.leaves.items():
        if side_of(name) not in starts:
            continue
        start, leaf = starts[side_of(name)], leaf.clone()
        leaf[:, :, start:] = 3 * torch.randn(leaf[:, :, start:].shape, generator=source).double()
        changed[name] = leaf
    return inputs.with_leaves(**changed)


def prefix_is_stable(check: Check) -> Iterator[Measure]:
    """The first rows of a longer sequence are those of the shorter one (within the float64 gate).

    This is where constants that depend on the length would show: n counts what a row can see.
    """
    cases = [Case(75, 75, causal=True), Case(9, 9, causal=True, mask="padding")]
    yield from check.over(cases, lambda case: _grown(check, case))


def _grown(check: Check, case: Case) -> Iterator[Measure]:
    whole, shorter = check.draw(case), case.length // 2 + 1
    leaves = {
        name: x[:, :, :shorter] if x.dim() == 4 or name.startswith("fields.") else x
        for name, x in whole.leaves.items()
    }
    visible = None if whole.visible is None else whole.visible[..., :shorter]
    small = replace(case, length=shorter, keys=shorter)
    prefix = replace(
        whole, case=small, leaves=leaves, grad_out=whole.grad_out[:, :, :shorter], visible=visible
    )
    results, references = check.output(whole)[:, :, :shorter], check.output(prefix)
    sizes = check.sizes(prefix, (small, "prefix"))
    label = f"{case}, first {shorter} rows"
    yield from check.compare(label, {"output": results}, {"output": references}, sizes)


PROPERTIES = [
    Property("the future is inert", future_is_inert),
    Property("a prefix is stable", prefix_is_stable),
]
