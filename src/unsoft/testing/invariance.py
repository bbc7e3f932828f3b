"""Themes equivariance, purity and promises: reordering inputs reorders outputs, a call is a pure function,
and weights have the signs and sums that the formula's properties state."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, Case, CaseInputs, side_of
from unsoft.testing.check import Check, require
from unsoft.testing.report import Measure, NotApplicable, equal, fact

_ORDERED = [Case(7, 9, 8, 5, 3, 4, 2, mask="bool"), Case(66, 70, 8, 8, 1, 3, 3, mask="additive")]
_DIMENSION = {
    "keys": {"key": 2, "value": 2, "mask": 3},
    "queries": {"query": 2, "mask": 2},
    "batch": {"query": 0, "key": 0, "value": 0, "mask": 0},
    "heads": {"query": 1, "key": 1, "value": 1, "mask": 1},
}
"""The dimension of each tensor that a reordering acts on."""


@require("equivariance", "linear in the values", _ORDERED, slice(1))
def _values_are_linear(check: Check, case: Case) -> Iterator[Measure]:
    """attention(2 v + 3 w) = 2 attention(v) + 3 attention(w)."""
    inputs = check.draw(case)
    v = inputs.leaves["value"]
    w = v.roll(1, 2).flip(-1)
    both, first, second = (check.output(inputs.with_leaves(value=x)) for x in (2 * v + 3 * w, v, w))
    size_v, size_w = (
        check.sizes(inputs.with_leaves(value=x), (case, name))["output"] for name, x in (("v", v), ("w", w))
    )
    yield from check.compare_output(str(case), both, 2 * first + 3 * second, 2 * size_v + 3 * size_w)


def _reordered(check: Check, case: Case, axis: str, position: str) -> Iterator[Measure]:
    if position in check.formula.uses:
        raise NotApplicable(f"the formula uses the position {position}")
    inputs = check.draw(case)
    count = {"keys": case.keys, "queries": case.length, "batch": case.batch, "heads": case.kv_heads}[axis]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(inputs.seed))
    order = order.roll(1) if torch.equal(order, torch.arange(count)) else order

    def moved(results: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _moved(name, x, order, axis, case) for name, x in results.items()}

    permuted = replace(
        inputs,
        leaves=moved(inputs.leaves),
        grad_out=_moved("output", inputs.grad_out, order, axis, case),
        visible=None if inputs.visible is None else _moved("mask", inputs.visible, order, axis, case),
    )
    sizes = moved(check.sizes(inputs, (case, torch.float32)))
    yield from check.compare(
        f"{case}, {axis} reordered", check.run(permuted), moved(check.run(inputs)), sizes
    )


def _moved(name: str, x: Tensor, order: Tensor, axis: str, case: Case) -> Tensor:
    """Return a leaf, its gradient or the output in the new order."""
    group = case.heads // case.kv_heads
    query_heads = (order[:, None] * group + torch.arange(group)).flatten()
    if name.startswith("params."):
        return x[query_heads] if axis == "heads" else x
    dimension = _DIMENSION[axis].get("query" if name == "output" else side_of(name))
    if dimension is None:
        return x
    return x.index_select(
        dimension, query_heads if axis == "heads" and name not in ("key", "value") else order
    )


# Keys and rows are exchangeable unless the formula uses their positions, batch entries always are. Query
# heads move together with the key head that they share, and with their parameters.
for _name, _axis, _position in (
    ("keys permute", "keys", "j"),
    ("queries permute", "queries", "i"),
    ("batch permutes", "batch", ""),
    ("heads permute", "heads", ""),
):
    require("equivariance", _name, _ORDERED, slice(1))(partial(_reordered, axis=_axis, position=_position))


_PURE = [
    Case(1, 1, 4, 4, 1, 1, 1),
    Case(70, 66, 8, 8, 2, 3, 1, mask="additive"),
    Case(9, 9, 8, 8, 2, 2, 2, mask="bool", layout="heads last"),
]


@require("purity", "deterministic", _PURE)
def _deterministic(check: Check, case: Case) -> Iterator[Measure]:
    """Two identical calls give identical bits, output and gradients."""
    inputs = check.draw(case)
    first, second = check.run(inputs, torch.float32), check.run(inputs, torch.float32)
    for name in first:
        yield equal(f"{case}: {name}", second[name], first[name])


@require("purity", "inputs stay as they are", _PURE)
def _inputs_stay(check: Check, case: Case) -> Iterator[Measure]:
    """No input is written to, and neither output nor gradients share memory with an input or each other."""
    inputs = check.draw(case)
    check.require(inputs, torch.float32, check.engine)
    leaves = inputs.copies(torch.float32)
    tensors = [*leaves.values(), *([] if inputs.visible is None else [inputs.visible])]
    before = [x.detach().clone() for x in tensors]
    output = check.call(inputs, inputs.arguments(leaves))
    grads = torch.autograd.grad(output, list(leaves.values()), inputs.grad_out.float())
    for x, copy in zip(tensors, before, strict=True):
        label = f"{case}: an input of shape {tuple(x.shape)} after the call"
        yield equal(label, x.detach().double(), copy.double())
    memory = {x.untyped_storage().data_ptr() for x in tensors}
    # Autograd may cut the gradients of parameters out of one tensor.
    own = [grad for name, grad in zip(leaves, grads, strict=True) if not name.startswith("params.")]
    results = [x.untyped_storage().data_ptr() for x in (output, *own)]
    yield fact(f"{case}: no result shares memory with an input", not memory & set(results))
    yield fact(f"{case}: no result shares memory with another", len(set(results)) == len(results))


_WEIGHTS = [Case(20, 30, mask="bool"), Case(66, 66, causal=True, spread=4.0)]
_EXACT = {-1.0, 1.0, -torch.inf}
"""Ends that the analysis gives exactly; it rounds others to three digits."""


@require("promises", "signs", _WEIGHTS)
def _signs(check: Check, case: Case) -> Iterator[Measure]:
    """Without ``signed`` no weight is negative."""
    if check.formula.properties.signed:
        raise NotApplicable("the formula is signed")
    weights = check.weights(_with_defaults(check, case), torch.float32)
    yield fact(f"{case}: no negative weight", bool((weights >= 0).all()))


@require("promises", "row sums", _WEIGHTS)
def _sums(check: Check, case: Case) -> Iterator[Measure]:
    """Row sums, plain and of absolute values, are within ``row_sum`` and ``l1``, to 4 sqrt(S) roundings."""
    promised = {
        "sum": check.formula.properties.row_sum,
        "sum of absolute values": check.formula.properties.l1,
    }
    bounds = {
        name: interval.ends()
        for name, interval in promised.items()
        if not interval.power and _EXACT.issuperset(interval.ends())
    }
    if not bounds:
        raise NotApplicable("the formula promises nothing about sums")
    weights = check.weights(_with_defaults(check, case))
    alive = weights.abs().sum(-1) > 0
    allowed = 4 * torch.finfo(DOUBLE).eps * case.keys**0.5
    for name, (low, high) in bounds.items():
        total = (weights if name == "sum" else weights.abs()).sum(-1)[alive]
        yield Measure(f"{case}: {name} of a row", outside(total, low, high), allowed)


def outside(x: Tensor, low: float | Tensor, high: float | Tensor) -> float:
    """Return the largest distance of a number to its range."""
    return float(torch.maximum(x - high, low - x).clamp(min=0.0).max()) if x.numel() else 0.0


def _with_defaults(check: Check, case: Case) -> CaseInputs:
    """Return inputs without parameters, so that the formula uses its defaults."""
    inputs = check.draw(case)
    leaves = {name: x for name, x in inputs.leaves.items() if not name.startswith("params.")}
    return replace(inputs, leaves=leaves)
