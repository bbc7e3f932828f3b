"""Cases print as text that parses, and inputs are a function of case and seed."""

import pytest
import torch

from unsoft.formula import Formula
from unsoft.testing.case import MASKS, Case, draw
from unsoft.testing.grid import COMBINED, draw_exact, sample

CASES = [Case(), Case(3, 4, mask="left padding", dropout=0.25, spread=8.0, layout="heads last"), *COMBINED]


@pytest.mark.parametrize("case", [*CASES, *sample("0 cog")], ids=str)
def test_cases_print_as_text_that_parses(case):
    assert Case.parse(str(case)) == case


def test_missing_sizes_are_those_of_a_short_causal_call():
    case = Case.parse("length=129 width=96 dtype=float32")
    assert case == Case(129, 129, 96, 96, 1, 2, 2, causal=True, dtype=torch.float32)


@pytest.mark.parametrize("mask", MASKS)
def test_inputs_depend_on_case_and_seed_only(mask):
    case, formula = Case(mask=mask), Formula("tanh(b*s)", params={"b": 1.0})
    first, again, other = (draw(case, formula, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first.leaves[name], again.leaves[name]) for name in first.leaves)
    assert not torch.equal(first.leaves["query"], other.leaves["query"])


@pytest.mark.parametrize("case", COMBINED[:8], ids=str)
def test_logits_of_the_grid_are_exact(case):
    """Sums of products of quarters need no rounding in float32."""
    leaves = draw_exact(case, "0", case.heads).leaves
    group = case.heads // case.kv_heads
    query, key = leaves["query"], leaves["key"].repeat_interleave(group, 1)
    assert torch.equal((query.float() @ key.float().mT).double(), query @ key.mT)
