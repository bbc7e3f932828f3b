"""Measures by depth distinguish evolution, collapse and noise of random states."""

from statistics import fmean

import pytest
import torch

from docs.generate.model_tables import FIELDS, word
from experiments.real_models import by_depth
from unsoft.lab.evidence import t_interval


@pytest.fixture(scope="module")
def tokens():
    return torch.randn(8, 40, 12, generator=torch.Generator().manual_seed(0))


def word_of(states, inputs):
    before, after = by_depth([inputs, states])
    known = (t_interval(after[field]) for field in FIELDS)
    return word(*known, target_before=fmean(before["target"]))


def test_what_was_done_to_states_is_what_is_said(tokens):
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q
    line = torch.randn(12, generator=generator)
    assert word_of(tokens, tokens) == word_of(3 * tokens, tokens) == "unmoved"
    assert word_of(tokens @ turn, tokens) == "evolution"
    assert word_of(torch.randn(tokens.shape, generator=generator), tokens) == "noise"
    assert word_of(torch.ones_like(tokens), tokens) == "collapse"
    assert word_of((tokens @ line)[..., None] * line + 1e-3 * tokens, tokens) == "collapse"


def test_every_part_is_held_out_once(tokens):
    """A state that lies in its first sequence only is seen by one fold of eight."""
    broken = tokens.clone()
    broken[0] = torch.randn(tokens[0].shape, generator=torch.Generator().manual_seed(2))
    decoded = by_depth([tokens, broken], folds=8)[-1]["decoded"]
    assert sum(x < 0.3 for x in decoded) == 1 and len(decoded) == 8


def test_too_few_sequences_are_refused(tokens):
    with pytest.raises(ValueError, match="3 sequences cannot be cut into 4 parts"):
        by_depth([tokens[:3]])
