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
    Case(1, 70, 32, 8, 2, 3, 1, mask="bool"),
    Case(66, 66, 24, 8, 1, 2, 2, causal=True),
    Case(9, 12, mask="additive with -inf", layout="heads last"),
    Case(8, 8, mask="padding", spread=4.0),
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
    """Logits of about +-10,000 in float32: results are finite wherever the exact ones fit into float32."""

    def measures(case: Case) -> Iterator[Measure]:
        _require_range(check, case, torch.float32)
        results = check.run(check.draw(case), torch.float32)
        for name, result in results.items():
            yield fact(f"{case}: {name if name == 'output' else f'gradient of {name}'} is finite", bool(result.isfinite().all()))

    yield from check.over(EXTREME[:2] if check.quick else EXTREME, measures)


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
