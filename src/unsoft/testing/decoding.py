"""Decoding token by token gives what the whole sequence gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from unsoft.testing.case import DOUBLE, Case, Inputs, side_of
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure

CASES = [
    Case(20, 20, causal=True),
    Case(70, 70, 16, 8, 1, 4, 2, causal=True),
    Case(12, 12, causal=True, mask="padding"),
]


def decode_is_prefill(check: Check) -> Iterator[Measure]:
    """Rows computed alone (L = 1, 3, 8) against the keys so far, lower right, equal those of one call.

    In float64 and in float32, within the gates.
    """
    yield from check.over(CASES[:2] if check.quick else CASES, lambda case: _decoded(check, case))


def _decoded(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    sizes = check.sizes(inputs, (case, torch.float32))["output"]
    for dtype in (DOUBLE,) if check.quick else (DOUBLE, torch.float32):
        whole = check.output(inputs, dtype)
        for stop, rows in (
            (1, 1),
            (case.length // 2, 1),
            (case.length // 2, 3),
            (case.length, 1),
            (case.length, 8),
        ):
            result = check.output(_step(inputs, stop, rows), dtype)
            part = slice(stop - rows, stop)
            yield from check.compare(
                f"{case}, rows {part.start} to {stop} alone in {dtype}",
                {"output": result},
                {"output": whole[:, :, part]},
                {"output": sizes[:, :, part]},
                dtype,
            )


def _step(inputs: Inputs, stop: int, rows: int) -> Inputs:
    """The call that a decoder makes for its newest rows when there are ``stop`` keys."""
    case = replace(inputs.case, length=rows, keys=stop, causal="lower_right")
    leaves = {
        name: x[:, :, :stop]
        if side_of(name) in ("key", "value")
        else x[:, :, stop - rows : stop]
        if side_of(name) == "query"
        else x
        for name, x in inputs.leaves.items()
    }
    visible = None if inputs.visible is None else inputs.visible[..., :stop]
    return replace(inputs, case=case, leaves=leaves, visible=visible)


PROPERTIES = [Property("decode = prefill", decode_is_prefill)]
