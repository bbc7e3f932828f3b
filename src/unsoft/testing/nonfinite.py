"""NaN and Inf: inert where they are masked; where they are seen they reach exactly the rows that see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.testing.case import Case, Inputs
from unsoft.testing.check import Check, Property
from unsoft.testing.matrices import visible_entries
from unsoft.testing.measure import Measure, equal, fact

CASES = [Case(6, 9, 8, 5, 2, 4, 2, mask="bool"), Case(70, 70, 8, 8, 1, 2, 1, causal=True)]
BAD = {"NaN": torch.nan, "Inf": torch.inf, "-Inf": -torch.inf}


def masked_is_inert(check: Check) -> Iterator[Measure]:
    """Keys and values that no row sees may hold NaN or Inf: nothing else changes (float32 gate).

    The gradients of those keys and values are exactly 0.
    """
    yield from check.over(CASES[:1] if check.quick else CASES, lambda case: _inert(check, case))


def _inert(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    hidden = torch.arange(case.keys) % 4 == 2
    visible = ~hidden if inputs.visible is None else inputs.visible & ~hidden
    inputs = replace(inputs, visible=visible)
    clean, sizes = check.run(inputs, torch.float32), check.sizes(inputs, (case, "inert"))
    for name, number in BAD.items():
        leaves = {leaf: _filled(inputs.leaves[leaf], hidden, number) for leaf in ("key", "value")}
        results = check.run(inputs.with_leaves(**leaves), torch.float32)
        yield from check.compare(f"{case}, masked {name}", results, clean, sizes, torch.float32)
        for leaf in ("key", "value"):
            yield equal(f"{case}, gradient of {leaf} at masked {name}", results[leaf][:, :, hidden], 0.0)


def _filled(x: Tensor, keys: Tensor, number: float) -> Tensor:
    return torch.where(keys[:, None], number, x)


def visible_has_a_footprint(check: Check) -> Iterator[Measure]:
    """One bad entry of q spoils its row, of k the rows that see the key, of v those rows in its column.

    NaN gives NaN, Inf gives NaN or Inf; every other output is what it is without (float32 gate).
    """
    yield from check.over(CASES[:1] if check.quick else CASES, lambda case: _footprints(check, case))


def _footprints(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    clean, sizes = check.output(inputs, torch.float32), check.sizes(inputs, (case, torch.float32))["output"]
    places = {"query": case.length, "key": case.keys, "value": case.keys}
    for number_name, number in BAD.items():
        for leaf, count in places.items():
            place = (case.batch - 1, 0, count // 2, 1 if leaf == "value" else 0)
            results = check.output(_spoilt(inputs, leaf, place, number), torch.float32)
            reached = _reached(inputs, leaf, place)
            label = f"{case}, {number_name} in {leaf}{list(place)}"
            gone = results.isnan() if number_name == "NaN" else ~results.isfinite()
            yield fact(f"{label}: reaches exactly the rows that see it", torch.equal(gone, reached))
            rest = {"output": results[~reached]}, {"output": clean[~reached]}, {"output": sizes[~reached]}
            yield from check.compare(f"{label}: the other rows", *rest, torch.float32)


def _spoilt(inputs: Inputs, leaf: str, place: tuple[int, ...], number: float) -> Inputs:
    x = inputs.leaves[leaf].clone()
    x[place] = number
    return inputs.with_leaves(**{leaf: x})


def _reached(inputs: Inputs, leaf: str, place: tuple[int, ...]) -> Tensor:
    """Bool (B, H, L, Dv): the outputs that see an entry of q, k or v."""
    case, visible = inputs.case, visible_entries(inputs)
    batch, head, position, column = place
    group = 1 if leaf == "query" else case.heads // case.kv_heads
    seen = torch.zeros(*case.shape[:3], case.value_width, dtype=torch.bool)
    heads = slice(head * group, (head + 1) * group)
    if leaf == "query":
        seen[batch, heads, position] = visible[batch, heads, position].any()
    else:
        columns = slice(column, column + 1) if leaf == "value" else slice(None)
        seen[batch, heads, :, columns] = visible[batch, heads, :, position, None]
    return seen


PROPERTIES = [
    Property("masked NaN is inert", masked_is_inert),
    Property("visible NaN has a footprint", visible_has_a_footprint),
]
