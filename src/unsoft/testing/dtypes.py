"""Half precision is computed in float32 and returned in its own dtype; large logits do not overflow."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unsoft.testing.case import Case
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure, fact

CASES = [
    Case(7, 9, 8, 5, 2, 4, 2),
    Case(64, 65, 16, 16, 1, 2, 2, mask="additive", causal=True),
    Case(8, 10, mask="padding", spread=8.0),  # where logits of half precision would show
    Case(66, 66, 24, 8, 1, 2, 2, causal=True),
    Case(1, 70, 32, 8, 2, 3, 1, mask="bool"),
    Case(9, 12, mask="additive with -inf", layout="heads last"),
]
EXTREME = [
    Case(5, 6, spread=1e4),
    Case(70, 70, 8, 8, 1, 2, 1, causal=True, spread=1e4),
    Case(1, 66, spread=1e4),
]


def in_bfloat16(check: Check) -> Iterator[Measure]:
    """Output and every gradient in bfloat16, against float64 on the same rounded inputs."""
    yield from _in(check, torch.bfloat16)


def in_float16(check: Check) -> Iterator[Measure]:
    """Output and every gradient in float16, against float64 on the same rounded inputs."""
    yield from _in(check, torch.float16)


def _in(check: Check, dtype: torch.dtype) -> Iterator[Measure]:
    yield from check.over(CASES[::2] if check.quick else CASES, lambda case: check.against_dense(case, dtype))


def large_logits(check: Check) -> Iterator[Measure]:
    """Logits of +-10,000 to +-100,000, in float32 and in float16, whose largest number is 65,504.

    Results are finite wherever the exact ones fit into the dtype.
    """

    def measures(case: Case) -> Iterator[Measure]:
        yield from _finite(check, case, torch.float32)
        yield from _finite(check, case, torch.float16)

    yield from check.over(EXTREME[:2] if check.quick else EXTREME, measures)


def _finite(check: Check, case: Case, dtype: torch.dtype) -> Iterator[Measure]:
    inputs = check.draw(case, dtype)
    check.require_range(inputs, (case, dtype), dtype)
    for name, result in check.run(inputs, dtype).items():
        what = name if name == "output" else f"gradient of {name}"
        yield fact(f"{dtype}, {case}: {what} is finite", bool(result.isfinite().all()))


PROPERTIES = [
    Property("bfloat16 = dense float64", in_bfloat16),
    Property("float16 = dense float64", in_float16),
    Property("large logits are finite", large_logits),
]
