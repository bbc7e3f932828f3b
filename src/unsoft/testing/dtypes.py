"""Half precision is computed in float32 and returned in its own dtype; large logits do not overflow."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unsoft.testing.case import Case
from unsoft.testing.check import Check, NotApplicable, Property
from unsoft.testing.measure import Measure, fact

CASES = [
    Case(7, 9, 8, 5, 2, 4, 2),
    Case(64, 65, 16, 16, 1, 2, 2, mask="additive", causal=True),
    Case(8, 10, mask="padding", spread=8.0),  # where logits of half precision would show
    Case(66, 66, 24, 8, 1, 2, 2, causal=True),
    Case(1, 70, 32, 8, 2, 3, 1, mask="bool"),
    Case(9, 12, mask="additive with -inf", layout="heads last"),
]
EXTREME = [Case(5, 6, spread=1e4), Case(70, 70, 8, 8, 1, 2, 1, causal=True, spread=1e4), Case(1, 66, spread=1e4)]
_HEADROOM = 0.1
"""Where the exact result comes closer than this to the largest number of the dtype, nothing can be said."""


def in_bfloat16(check: Check) -> Iterator[Measure]:
    """Output and every gradient in bfloat16, against float64 on the same rounded inputs."""
    yield from _in(check, torch.bfloat16)


def in_float16(check: Check) -> Iterator[Measure]:
    """Output and every gradient in float16, against float64 on the same rounded inputs."""
    yield from _in(check, torch.float16)


def _in(check: Check, dtype: torch.dtype) -> Iterator[Measure]:
    def measures(case: Case) -> Iterator[Measure]:
        _require_range(check, case, dtype)
        yield from check.against_dense(case, dtype)

    yield from check.over(CASES[::2] if check.quick else CASES, measures)


def large_logits(check: Check) -> Iterator[Measure]:
    """Logits of +-10,000 to +-100,000, in float32 and in float16, whose largest number is 65,504.

    Results are finite wherever the exact ones fit into the dtype.
    """

    def measures(case: Case) -> Iterator[Measure]:
        yield from _finite(check, case, torch.float32)
        yield from _finite(check, case, torch.float16)

    yield from check.over(EXTREME[:2] if check.quick else EXTREME, measures)


def _finite(check: Check, case: Case, dtype: torch.dtype) -> Iterator[Measure]:
    _require_range(check, case, dtype)
    for name, result in check.run(check.draw(case, dtype), dtype).items():
        what = name if name == "output" else f"gradient of {name}"
        yield fact(f"{dtype}, {case}: {what} is finite", bool(result.isfinite().all()))


def _require_range(check: Check, case: Case, dtype: torch.dtype) -> None:
    grid = torch.float32 if dtype == torch.float64 else dtype
    references = check.reference(check.draw(case, grid), (case, grid))
    limit = _HEADROOM * torch.finfo(dtype).max
    if not all(bool((x.abs() < limit).all()) for x in references.values()):
        raise NotApplicable(f"the exact result of logits of spread {case.spread:g} does not fit into {dtype}")


PROPERTIES = [
    Property("bfloat16 = dense float64", in_bfloat16),
    Property("float16 = dense float64", in_float16),
    Property("large logits are finite", large_logits),
]
