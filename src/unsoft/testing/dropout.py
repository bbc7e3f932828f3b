"""Dropout comes from torch's generator and is the same in every engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from unsoft.testing.case import Case
from unsoft.testing.check import Check, Property
from unsoft.testing.measure import Measure, close, equal, fact

CASES = [
    Case(7, 9, 8, 5, 2, 4, 2, dropout=0.3),
    Case(66, 70, 8, 8, 1, 3, 1, mask="bool", dropout=0.5),
    Case(1, 70, 8, 8, 2, 2, 2, dropout=0.1),
    Case(65, 65, 8, 8, 1, 2, 2, mask="additive", causal=True, dropout=0.9),
]


def engines_agree(check: Check) -> Iterator[Measure]:
    """From one torch.manual_seed every engine drops what the dense engine drops: output and gradients."""
    yield from check.over(
        CASES[:2] if check.quick else CASES, lambda case: check.against_dense(case, torch.float32)
    )


def comes_from_the_seed(check: Check) -> Iterator[Measure]:
    """The same seed gives the same bits, another seed gives other ones."""
    yield from check.over(CASES[:1], lambda case: _seeded(check, case))


def _seeded(check: Check, case: Case) -> Iterator[Measure]:
    inputs = check.draw(case)
    first, again, other = (check.output(replace(inputs, seed=seed), torch.float32) for seed in (1, 1, 2))
    yield equal(f"{case}, same seed", again, first)
    yield fact(f"{case}, another seed drops other weights", not torch.equal(other, first))


def share_and_factor(check: Check) -> Iterator[Measure]:
    """A share p of the weights is dropped (to five standard deviations), the others are divided by 1 - p."""
    yield from check.over([Case(40, 50, dropout=0.25)], lambda case: _dropped(check, case))


def _dropped(check: Check, case: Case) -> Iterator[Measure]:
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


PROPERTIES = [
    Property("engines agree", engines_agree),
    Property("comes from the seed", comes_from_the_seed),
    Property("share and factor", share_and_factor),
]
