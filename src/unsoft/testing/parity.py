"""Every engine gives what the dense engine gives in float64, and that is what the definition says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from unsoft.testing.case import DOUBLE, LAYOUTS, Case
from unsoft.testing.check import Check, Property
from unsoft.testing.matrices import Matrices
from unsoft.testing.measure import Measure

# Lengths around the block sizes of engines, one row, one key, more queries than keys and the reverse; widths
# that are and are not multiples of a vector; one head, shared key heads, odd counts.
SHAPES = [
    Case(1, 1, 8, 8, 2, 2, 2),
    Case(1, 64, 16, 5, 2, 4, 2),
    Case(1, 128, 8, 16, 1, 3, 1),
    Case(2, 7, 7, 12, 1, 1, 1),
    Case(7, 2, 8, 3, 2, 3, 3),
    Case(7, 7, 1, 1, 2, 2, 2),
    Case(63, 65, 16, 9, 1, 2, 1),
    Case(64, 64, 32, 32, 1, 3, 3),
    Case(65, 63, 10, 16, 2, 2, 1),
    Case(128, 1, 8, 8, 1, 1, 1),
    Case(65, 128, 24, 8, 1, 2, 2),
    Case(128, 128, 64, 40, 1, 4, 2),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "lower_right"},
    {"mask": "bool"},
    {"mask": "additive"},
    {"mask": "padding"},
    {"mask": "dead rows"},
    {"mask": "additive per key", "causal": "lower_right"},
    {"mask": "additive with -inf"},
    {"mask": "bool", "causal": True},
    {"mask": "additive per row", "causal": True},
]


def cases(quick: bool) -> list[Case]:
    """Every shape with three masks in turn (quick: every other shape, one mask), every layout,
    wide logits."""
    kinds = cycle(KINDS)
    shapes = SHAPES[1::2] if quick else SHAPES
    pairs = [replace(shape, **next(kinds)) for _ in range(1 if quick else 3) for shape in shapes]
    layouts = [
        Case(9, 11, 8, 8, 3, 4, 2, mask=mask, causal=True, layout=layout)
        for layout, mask in zip(LAYOUTS, cycle(["none", "additive per key", "bool"]), strict=False)
    ]
    wide = [Case(33, 33, mask="additive per row", spread=8.0), Case(1, 40, causal="lower_right", spread=8.0)]
    return pairs + (layouts[1:3] if quick else layouts + wide)


def is_defined(check: Check) -> Iterator[Measure]:
    """The dense engine in float64 gives what a direct reading of the formula gives."""
    for case in cases(check.quick):
        inputs = check.draw(case)
        defined = {"output": Matrices(check.formula, inputs).output}
        results = check.reference(inputs, (case, torch.float32))
        yield from check.compare(str(case), results, defined, check.sizes(inputs, (case, torch.float32)))


def in_float32(check: Check) -> Iterator[Measure]:
    """Output and every gradient in float32."""
    yield from check.over(cases(check.quick), lambda case: check.against_dense(case, torch.float32))


def in_float64(check: Check) -> Iterator[Measure]:
    """Output and every gradient in float64, on every third case."""
    yield from check.over(cases(check.quick)[::3], lambda case: check.against_dense(case, DOUBLE))


PROPERTIES = [
    Property("dense = definition", is_defined, engines=("dense",)),
    Property("float32 = dense float64", in_float32),
    Property("float64 = dense float64", in_float64),
]
