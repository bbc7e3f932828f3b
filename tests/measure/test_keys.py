"""The strongest key of a row and the attention that keys receive, against their definitions."""

import pytest
import torch

from unsoft import measure
from unsoft.measure import keys as keys_module

WEIGHTS = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[0, 1, 2] = False


def test_definitions():
    keys, weights = measure.top_key(WEIGHTS, MASK), measure.top_weight(WEIGHTS, MASK)
    expected = torch.zeros(2, 3, 7, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            for i in range(9):
                seen = MASK[b, h, i].nonzero()[:, 0].tolist()
                sizes = {j: abs(WEIGHTS[b, h, i, j].item()) for j in seen}
                top = max(sizes, key=sizes.get, default=-1)
                assert keys[b, h, i] == top
                assert weights[b, h, i] == (WEIGHTS[b, h, i, top] if seen else 0)
                for j, size in sizes.items():
                    expected[b, h, j] += size / sum(sizes.values())
    torch.testing.assert_close(measure.received(WEIGHTS, MASK), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("block", [1, 40])
def test_blocks_make_no_difference(monkeypatch, block):
    expected = measure.received(WEIGHTS, MASK)
    monkeypatch.setattr(keys_module, "BLOCK", block)
    torch.testing.assert_close(measure.received(WEIGHTS, MASK), expected, rtol=1e-13, atol=1e-13)


def test_rows_without_mass_or_keys():
    for weights in (torch.zeros(2, 3), torch.zeros(2, 0)):
        assert measure.top_key(weights).tolist() == [-1, -1]
        assert measure.top_weight(weights).tolist() == [0, 0]
        assert not measure.received(weights).any()


def test_nan_reaches_the_rows_that_see_it():
    weights = torch.tensor([[0.25, torch.nan], [0.5, -1.0]])
    assert measure.top_key(weights).tolist() == [-1, 1]
    assert measure.top_weight(weights).isnan().tolist() == [True, False]
    hidden = torch.tensor([[True, False], [True, True]])
    assert measure.top_key(weights, hidden).tolist() == [0, 1]
    torch.testing.assert_close(measure.received(weights, hidden), torch.tensor([4 / 3, 2 / 3]))


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match=r"'weights' has shape \(3,\)"):
        measure.received(torch.ones(3))
