"""Changes of logits and the probe, against values worked out by hand."""

import pytest
import torch

from experiments.signed_logits import CHANGES, Attention, auc, flattened

LOGITS = torch.tensor([[2.0, -1.0, -3.0, 0.5], [-1.0, -2.0, 5.0, 5.0]])
VISIBLE = torch.tensor([[True, True, True, True], [True, True, False, False]])


def test_making_logits_equal_keeps_their_weight_and_hidden_keys():
    flat = flattened(LOGITS, VISIBLE & (LOGITS < 0))
    assert flat[0, 1] == flat[0, 2] and flat[1, 0] == flat[1, 1]
    torch.testing.assert_close(flat[0].exp().sum(), LOGITS[0].exp().sum())
    assert flat[0, 0] == 2.0 and flat[1, 2] == 5.0


def test_removal_leaves_rows_that_see_only_negative_logits():
    removed = CHANGES["keys with negative logits removed"](LOGITS, VISIBLE)
    assert removed[0].tolist() == [2.0, -torch.inf, -torch.inf, 0.5]
    assert torch.equal(removed[1], LOGITS[1])


def test_random_control_chooses_as_many_keys_as_are_negative():
    logits = torch.randn(3, 50, 40)
    visible = torch.ones(50, 40, dtype=torch.bool).tril().expand(3, -1, -1)
    changed = CHANGES["as many random logits made equal"](logits, visible)
    negative = (visible & (logits < 0)).sum(-1)
    differs = (changed != logits).sum(-1)
    assert ((differs == negative) | (negative == 1)).all()  # one logit made equal to itself does not change


def test_unchanged_logits_are_stock_attention():
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.full((9, 9), -1e9).triu(1)
    out, _ = Attention()(torch.nn.Identity(), query, key, value, mask, 8**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-5, atol=1e-6)


def test_auc_counts_pairs():
    scores, positive = torch.rand(40), torch.rand(40) < 0.4
    pairs = [a > b for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(sum(map(float, pairs)) / len(pairs))
