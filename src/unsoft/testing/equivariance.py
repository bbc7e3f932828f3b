"""Reordering the inputs reorders the outputs and changes nothing else; outputs are linear in the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.testing.case import Case, Inputs, side_of
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.measure import Measure

CASES = [Case(7, 9, 8, 5, 3, 4, 2, mask="bool"), Case(66, 70, 8, 8, 1, 3, 3, mask="additive")]

_DIMENSION = {
    "keys": {"key": 2, "value": 2, "mask": 3},
    "queries": {"query": 2, "mask": 2},
    "batch": {"query": 0, "key": 0, "value": 0, "mask": 0},
    "heads": {"query": 1, "key": 1, "value": 1, "mask": 1},
}
"""The dimension of each tensor that a reordering acts on."""


def keys_permute(check: Check) -> Iterator[Measure]:
    """The order of the keys does not matter (for formulas without j)."""
    yield from _reordered(check, "keys", "j")


def queries_permute(check: Check) -> Iterator[Measure]:
    """Rows do not know each other (for formulas without i)."""
    yield from _reordered(check, "queries", "i")


def batch_permutes(check: Check) -> Iterator[Measure]:
    """Batch entries do not know each other."""
    yield from _reordered(check, "batch")


def heads_permute(check: Check) -> Iterator[Measure]:
    """Groups of query heads move together with the key head that they share, and with their parameters."""
    yield from _reordered(check, "heads")


def values_are_linear(check: Check) -> Iterator[Measure]:
    """attention(2 v + 3 w) = 2 attention(v) + 3 attention(w)."""
    yield from check.over(CASES[:1] if check.quick else CASES, lambda case: _linear(check, case))


def _linear(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    v = inputs.leaves["value"]
    w = v.roll(1, 2).flip(-1)
    both, first, second = (check.output(inputs.with_leaves(value=x)) for x in (2 * v + 3 * w, v, w))
    sizes = [
        check.sizes(inputs.with_leaves(value=x), (case, name))["output"] for name, x in (("v", v), ("w", w))
    ]
    size = {"output": 2 * sizes[0] + 3 * sizes[1]}
    yield from check.compare(str(case), {"output": both}, {"output": 2 * first + 3 * second}, size)


def _reordered(check: Check, what: str, position: str = "") -> Iterator[Measure]:
    if position in check.formula.uses:
        raise NotApplicable(f"the formula uses the position {position}")
    yield from check.over(CASES[:1] if check.quick else CASES, lambda case: _one_order(check, case, what))


def _one_order(check: Check, case: Case, what: str) -> Iterator[Measure]:
    inputs = check.draw(case)
    count = {"keys": case.keys, "queries": case.length, "batch": case.batch, "heads": case.kv_heads}[what]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(inputs.seed))
    order = order.roll(1) if torch.equal(order, torch.arange(count)) else order
    results = check.run(_permuted(inputs, order, what))
    expected = {name: _moved(name, x, order, what, case) for name, x in check.run(inputs).items()}
    sizes = check.sizes(inputs, (case, torch.float32))
    sizes = {name: _moved(name, x, order, what, case) for name, x in sizes.items()}
    yield from check.compare(f"{case}, {what} reordered", results, expected, sizes)


def _permuted(inputs: Inputs, order: Tensor, what: str) -> Inputs:
    leaves = {name: _moved(name, x, order, what, inputs.case) for name, x in inputs.leaves.items()}
    grad_out = _moved("output", inputs.grad_out, order, what, inputs.case)
    visible = None if inputs.visible is None else _moved("mask", inputs.visible, order, what, inputs.case)
    return replace(inputs, leaves=leaves, grad_out=grad_out, visible=visible)


def _moved(name: str, x: Tensor, order: Tensor, what: str, case: Case) -> Tensor:
    """A leaf, its gradient or the output in the new order."""
    if name.startswith("params."):
        return x[_query_heads(order, case)] if what == "heads" else x
    dimension = _DIMENSION[what].get("query" if name == "output" else side_of(name))
    if dimension is None:
        return x
    if what == "heads" and name not in ("key", "value"):
        order = _query_heads(order, case)
    return x.index_select(dimension, order)


def _query_heads(order: Tensor, case: Case) -> Tensor:
    group = case.heads // case.kv_heads
    return (order[:, None] * group + torch.arange(group)).flatten()


PROPERTIES = [
    Property("keys permute", keys_permute),
    Property("queries permute", queries_permute),
    Property("batch permutes", batch_permutes),
    Property("heads permute", heads_permute),
    Property("linear in the values", values_are_linear),
]
