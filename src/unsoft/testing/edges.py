"""Themes edges and nonfinite: rows that see nothing, empty tensors, NaN and Inf."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.testing.case import Case, CaseInputs
from unsoft.testing.check import Check, require, titled
from unsoft.testing.reference import visible_entries
from unsoft.testing.report import Measure, equal, fact

_DEAD = [
    Case(8, 6, mask="dead rows"),
    Case(9, 4, causal="lower_right"),
    Case(70, 66, 8, 8, 1, 4, 2, mask="dead rows"),
    Case(9, 6, mask="additive with -inf", causal=True),
]
_EMPTY = [
    Case(4, 0),
    Case(0, 5),
    Case(4, 5, batch=0),
    Case(0, 5, causal=True),
    Case(4, 0, mask="additive"),
    Case(4, 5, batch=0, mask="additive"),
]


@require("edges", "dead rows", _DEAD, slice(None, None, 2))
def _dead_rows(check: Check, case: Case) -> Iterator[Measure]:
    """A row without a visible key outputs exact zeros, gets a zero gradient, and gives none to anything."""
    inputs = check.draw(case)
    seen = visible_entries(inputs).any(-1, keepdim=True)
    results = check.run(inputs, torch.float32)
    yield fact(f"{case}: the case has dead rows", not bool(seen.all()))
    for name, label in (("output", "output"), ("query", "query gradient")):
        yield equal(f"{case}: {label} of dead rows", results[name][(~seen).expand_as(results[name])], 0.0)
    yield fact(f"{case}: everything is finite", all(bool(x.isfinite().all()) for x in results.values()))
    if "mask" in results:
        # Finite entries of a dead row exist where causality hid what the mask did not.
        dead = (~seen).expand(case.shape).all(0).all(0)
        mask_gradient = results["mask"].expand(case.length, case.keys)[dead]
        yield equal(f"{case}: mask gradient of dead rows", mask_gradient, 0.0)
    other = inputs.grad_out + torch.where(seen, 0.0, 5.0)
    moved = check.run(replace(inputs, grad_out=other), torch.float32)
    for name in inputs.leaves:
        yield equal(f"{case}: gradient of {name} by dead rows", moved[name], results[name])


@require("edges", "nothing visible", [Case(5, 6, mask="bool")])
def _nothing_visible(check: Check, case: Case) -> Iterator[Measure]:
    """If no row sees anything, the output and every gradient are exact zeros."""
    nothing = replace(check.draw(case), visible=torch.zeros(case.shape, dtype=torch.bool))
    yield from _zeros(check, nothing, "all masked")


@require("edges", "empty tensors", _EMPTY)
def _empty_tensors(check: Check, case: Case) -> Iterator[Measure]:
    """No keys: zeros. No queries or no batch: an empty output of the right shape. The backward pass works."""
    yield from _zeros(check, check.draw(case), str(case))


def _zeros(check: Check, inputs: CaseInputs, label: str) -> Iterator[Measure]:
    results = check.run(inputs, torch.float32)
    shape = (*inputs.case.shape[:3], inputs.case.value_width)
    yield fact(f"{label}: output has shape {shape}", results["output"].shape == shape)
    for name, result in results.items():
        yield equal(f"{label}: {titled(name)}", result, 0.0)


_BAD = {"NaN": torch.nan, "Inf": torch.inf, "-Inf": -torch.inf}
_SEEN = [Case(6, 9, 8, 5, 2, 4, 2, mask="bool"), Case(70, 70, 8, 8, 1, 2, 1, causal=True)]


@require("nonfinite", "masked NaN is inert", _SEEN, slice(1))
def _masked_is_inert(check: Check, case: Case) -> Iterator[Measure]:
    """Keys and values that no row sees may contain NaN or Inf: nothing else changes (float32 gate).

    The gradients of those keys and values are exactly 0.
    """
    inputs = check.draw(case)
    hidden = torch.arange(case.keys) % 4 == 2
    visible = ~hidden if inputs.visible is None else inputs.visible & ~hidden
    inputs = replace(inputs, visible=visible)
    clean, sizes = check.run(inputs, torch.float32), check.sizes(inputs, (case, "inert"))
    for name, number in _BAD.items():
        leaves = {
            leaf: torch.where(hidden[:, None], number, inputs.leaves[leaf]) for leaf in ("key", "value")
        }
        results = check.run(inputs.with_leaves(**leaves), torch.float32)
        yield from check.compare(f"{case}, masked {name}", results, clean, sizes, torch.float32)
        for leaf in ("key", "value"):
            yield equal(f"{case}, gradient of {leaf} at masked {name}", results[leaf][:, :, hidden], 0.0)


@require("nonfinite", "visible NaN has a footprint", _SEEN, slice(1))
def _visible_has_a_footprint(check: Check, case: Case) -> Iterator[Measure]:
    """One bad entry of q spoils its row, of k the rows that see the key, of v those rows in its column.

    NaN gives NaN, Inf gives NaN or Inf; every other output is what it is without (float32 gate).
    """
    inputs = check.draw(case)
    clean, sizes = check.output(inputs, torch.float32), check.sizes(inputs, (case, torch.float32))["output"]
    for number_name, number in _BAD.items():
        for leaf, count in {"query": case.length, "key": case.keys, "value": case.keys}.items():
            entry = (case.batch - 1, 0, count // 2, 1 if leaf == "value" else 0)
            changed = inputs.leaves[leaf].clone()
            changed[entry] = number
            results = check.output(inputs.with_leaves(**{leaf: changed}), torch.float32)
            reached = _reached(inputs, leaf, entry)
            label = f"{case}, {number_name} in {leaf}{list(entry)}"
            gone = results.isnan() if number_name == "NaN" else ~results.isfinite()
            yield fact(f"{label}: reaches exactly the rows that see it", torch.equal(gone, reached))
            result, reference, size = (x[~reached] for x in (results, clean, sizes))
            yield from check.compare_output(
                f"{label}: the other rows", result, reference, size, torch.float32
            )


def _reached(inputs: CaseInputs, leaf: str, entry: tuple[int, ...]) -> Tensor:
    """Bool (B, H, L, Dv): the outputs that see an entry of q, k or v."""
    case, visible = inputs.case, visible_entries(inputs)
    batch, head, position, column = entry
    group = 1 if leaf == "query" else case.heads // case.kv_heads
    seen = torch.zeros(*case.shape[:3], case.value_width, dtype=torch.bool)
    heads = slice(head * group, (head + 1) * group)
    if leaf == "query":
        seen[batch, heads, position] = visible[batch, heads, position].any()
    else:
        columns = slice(column, column + 1) if leaf == "value" else slice(None)
        seen[batch, heads, :, columns] = visible[batch, heads, :, position, None]
    return seen
