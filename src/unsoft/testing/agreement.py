"""Themes parity, gradients, dtypes and dropout: every engine agrees with the dense engine in float64, and
that agrees with the definition."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from unsoft.testing.case import DOUBLE, LAYOUTS, Case
from unsoft.testing.check import Check, require, titled
from unsoft.testing.reference import Matrices
from unsoft.testing.report import GATES, Measure, close, equal, fact

# Lengths around the block sizes of engines, one row, one key, more queries than keys and the reverse; widths
# that are and are not multiples of a vector; one head, shared key heads, odd counts.
_SHAPES = [
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
_VISIBILITIES: list[dict[str, Any]] = [
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


def _parity_cases(quick: bool) -> list[Case]:
    """Return every shape with three masks (quick: half of them, one mask), every layout, wide logits."""
    visibilities = cycle(_VISIBILITIES)
    shapes = _SHAPES[1::2] if quick else _SHAPES
    pairs = [replace(shape, **next(visibilities)) for _ in range(1 if quick else 3) for shape in shapes]
    layouts = [
        Case(9, 11, 8, 8, 3, 4, 2, mask=mask, causal=True, layout=layout)
        for layout, mask in zip(LAYOUTS, cycle(["none", "additive per key", "bool"]), strict=False)
    ]
    wide = [Case(33, 33, mask="additive per row", spread=8.0), Case(1, 40, causal="lower_right", spread=8.0)]
    return pairs + (layouts[1:3] if quick else layouts + wide)


@require("parity", "dense = definition", _parity_cases(False), _parity_cases(True), engines=("dense",))
def _is_defined(check: Check, case: Case) -> Iterator[Measure]:
    """The dense engine in float64 agrees with a direct evaluation of the formula."""
    inputs, key = check.draw(case), (case, torch.float32)
    defined = {"output": Matrices(check.formula, inputs).output}
    yield from check.compare(str(case), check.reference(inputs, key), defined, check.sizes(inputs, key))


_IN = {dtype: partial(Check.against_dense, dtype=dtype) for dtype in GATES}
"""Output and every gradient in a dtype, against float64 on the same rounded inputs."""
require("parity", "float32 = dense float64", _parity_cases(False), _parity_cases(True))(_IN[torch.float32])
require("parity", "float64 = dense float64", _parity_cases(False)[::3], _parity_cases(True)[::3])(_IN[DOUBLE])


_SMALL = [
    Case(3, 4, 2, 2, 1, 2, 1, mask="additive"),
    Case(4, 4, 2, 3, 1, 1, 1, causal=True),
    Case(3, 5, 3, 1, 1, 1, 1, mask="dead rows", causal="lower_right"),
    Case(2, 3, 2, 2, 2, 2, 2, mask="additive per key", dropout=0.3),
]
_AWAY = 1e-4
"""Finite differences step 1e-6, so corners of the formula must be well away from the logits."""


def _passes(check: Check, case: Case, test: Callable[..., bool], **options: Any) -> Iterator[Measure]:
    """Run one of torch's tests of the call as a function of its leaves."""
    inputs = check.draw(case, near=_AWAY)
    leaves = inputs.copies(DOUBLE)

    def function(*tensors: Tensor) -> Tensor:
        return check.call(inputs, inputs.arguments(dict(zip(leaves, tensors, strict=True))))

    with torch.random.fork_rng(devices=[]):  # torch draws its directions from the global generator
        torch.manual_seed(inputs.seed)
        passed = test(function, list(leaves.values()), raise_exception=False, **options)
    yield fact(f"{test.__name__}, {case}", passed)


# Every derivative of every output, to 1e-5 absolute or 0.1% relative; the others along random directions.
_FIRST = partial(_passes, test=torch.autograd.gradcheck, eps=1e-6, atol=1e-5, rtol=1e-3)
_FORWARD_MODE: Any = {"check_forward_ad": True, "check_backward_ad": False, "check_undefined_grad": False}
_FORWARD = partial(_passes, test=torch.autograd.gradcheck, fast_mode=True, **_FORWARD_MODE)
_SECOND = partial(_passes, test=torch.autograd.gradgradcheck, fast_mode=True)
require("gradients", "first derivatives", _SMALL, slice(2), engines=("dense",))(_FIRST)
require("gradients", "forward mode", _SMALL, slice(1), engines=("dense",))(_FORWARD)
require("gradients", "second derivatives", _SMALL[:2], slice(1), engines=("dense",))(_SECOND)


_HALF = [
    Case(7, 9, 8, 5, 2, 4, 2),
    Case(64, 65, 16, 16, 1, 2, 2, mask="additive", causal=True),
    Case(8, 10, mask="padding", spread=8.0),  # where logits of half precision would show
    Case(66, 66, 24, 8, 1, 2, 2, causal=True),
    Case(1, 70, 32, 8, 2, 3, 1, mask="bool"),
    Case(9, 12, mask="additive with -inf", layout="heads last"),
]
_EXTREME = [
    Case(5, 6, spread=1e4),
    Case(70, 70, 8, 8, 1, 2, 1, causal=True, spread=1e4),
    Case(1, 66, spread=1e4),
]


require("dtypes", "bfloat16 = dense float64", _HALF, slice(None, None, 2))(_IN[torch.bfloat16])
require("dtypes", "float16 = dense float64", _HALF, slice(None, None, 2))(_IN[torch.float16])


@require("dtypes", "large logits are finite", _EXTREME, slice(2))
def _large_logits(check: Check, case: Case) -> Iterator[Measure]:
    """Logits of +-10,000 to +-100,000, in float32 and in float16, whose largest number is 65,504.

    Results are finite wherever the exact ones fit into the dtype.
    """
    for dtype in (torch.float32, torch.float16):
        inputs = check.draw(case, dtype)
        check.require_range(inputs, (case, dtype), dtype)
        for name, result in check.run(inputs, dtype).items():
            yield fact(f"{dtype}, {case}: {titled(name)} is finite", bool(result.isfinite().all()))


_DROPPED = [
    Case(7, 9, 8, 5, 2, 4, 2, dropout=0.3),
    Case(66, 70, 8, 8, 1, 3, 1, mask="bool", dropout=0.5),
    Case(1, 70, 8, 8, 2, 2, 2, dropout=0.1),
    Case(65, 65, 8, 8, 1, 2, 2, mask="additive", causal=True, dropout=0.9),
]


# From one torch.manual_seed every engine drops what the dense engine drops: output and gradients.
require("dropout", "engines agree", _DROPPED, slice(2))(_IN[torch.float32])


@require("dropout", "comes from the seed", _DROPPED[:1])
def _seeded(check: Check, case: Case) -> Iterator[Measure]:
    """The same seed gives the same bits, another seed gives other ones."""
    inputs = check.draw(case)
    first, again, other = (check.output(replace(inputs, seed=seed), torch.float32) for seed in (1, 1, 2))
    yield equal(f"{case}, same seed", again, first)
    yield fact(f"{case}, another seed drops other weights", not torch.equal(other, first))


@require("dropout", "share and factor", [Case(40, 50, dropout=0.25)])
def _share_and_factor(check: Check, case: Case) -> Iterator[Measure]:
    """A share p of the weights is dropped (to five standard deviations), the others are divided by 1 - p."""
    inputs = check.draw(case)
    plain = check.weights(replace(inputs, case=replace(case, dropout=0.0)), torch.float32)
    dropped = check.weights(inputs, torch.float32)
    gone = (dropped == 0) & (plain != 0)
    count = int((plain != 0).sum())
    expected, deviation = case.dropout * count, math.sqrt(count * case.dropout * (1 - case.dropout))
    yield Measure(f"{case}: number of dropped weights", abs(float(gone.sum()) - expected), 5 * deviation)
    kept = torch.where(gone, 0.0, plain / (1 - case.dropout))
    size = 2 * check.weight_sizes(inputs)
    yield close(f"{case}: the weights that are kept", dropped, kept, size, torch.float32)
