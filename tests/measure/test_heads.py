"""Similarity of heads against loops over pairs of heads and rows."""

import itertools
import math

import pytest
import torch

from unsoft import measure
from unsoft.measure import heads as heads_module


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(
        sum(a * a for a in x) * sum(b * b for b in y)
    )


def by_hand(weights, visible):
    """(H, L, S) -> (H, H)."""
    out = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for g, h in itertools.product(range(len(weights)), repeat=2):
        result = []
        for i in range(weights.shape[1]):
            pair = [torch.where(visible[head, i], weights[head, i], 0.0).tolist() for head in (g, h)]
            if any(pair[0]) and any(pair[1]):
                result.append(cosine(*pair))
        out[g, h] = sum(result) / len(result) if result else 0.0
    return out


@pytest.mark.parametrize("block", [1, 60, 10_000])
@pytest.mark.parametrize("masked", [False, True])
def test_definition(monkeypatch, masked, block):
    monkeypatch.setattr(heads_module, "_BLOCK", block)
    weights = normal(2, 3, 5, 6)
    weights[0, 1, 2] = 0  # a row without mass
    weights[1, 2] = 0  # a head without mass
    mask = torch.ones(5, 6, dtype=torch.bool).tril(-1) if masked else None  # the first row sees nothing
    result = measure.head_similarity(weights, mask)
    visible = torch.ones(3, 5, 6, dtype=torch.bool) if mask is None else mask.expand(3, 5, 6)
    for b in range(2):
        torch.testing.assert_close(result[b], by_hand(weights[b], visible), rtol=1e-12, atol=1e-12)


def test_copies_and_scale():
    head = normal(1, 4, 5)
    result = measure.head_similarity(torch.cat([head, 1e-200 * head, -3 * head]))
    torch.testing.assert_close(result, torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]]).double())


def test_edges():
    assert torch.equal(measure.head_similarity(torch.zeros(2, 3, 4)), torch.zeros(2, 2))
    assert torch.equal(measure.head_similarity(torch.ones(2, 0, 4)), torch.zeros(2, 2))
    assert torch.equal(
        measure.head_similarity(torch.ones(2, 3, 4), torch.zeros(1, dtype=torch.bool)), torch.zeros(2, 2)
    )
    assert torch.equal(measure.parameter_similarity(torch.zeros(2, 3)), torch.zeros(2, 2))


def test_nan_stays_with_its_head():
    weights = torch.rand(3, 2, 4)
    weights[1, 0, 0] = math.nan
    assert measure.head_similarity(weights).isnan().tolist() == [
        [False, True, False],
        [True, True, True],
        [False, True, False],
    ]
    hidden = torch.tensor([False, True, True, True])
    assert measure.head_similarity(weights, hidden).isfinite().all()


def test_parameters():
    parameters = normal(4, 3, 5)
    result = measure.parameter_similarity(parameters)
    for g, h in itertools.product(range(4), repeat=2):
        pair = parameters[g].flatten().tolist(), parameters[h].flatten().tolist()
        assert result[g, h].item() == pytest.approx(cosine(*pair), rel=1e-12)
    assert measure.parameter_similarity(parameters.half()).dtype == torch.float32


def test_gradients():
    weights = normal(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(measure.head_similarity, weights)
    assert torch.autograd.gradcheck(measure.parameter_similarity, weights)
    zeros = torch.zeros(2, 3, 4, requires_grad=True)
    measure.head_similarity(zeros).sum().backward()
    assert zeros.grad.eq(0).all()


def test_invalid_arguments_raise():
    with pytest.raises(
        ValueError, match=r"'weights' has shape \(2, 3\); expected \(..., heads, queries, keys\)"
    ):
        measure.head_similarity(torch.ones(2, 3))
    with pytest.raises(TypeError, match="'weights' has dtype torch.int64"):
        measure.head_similarity(torch.ones(2, 3, 4).long())
    with pytest.raises(TypeError, match="'parameters' has dtype torch.int64"):
        measure.parameter_similarity(torch.ones(2, 3).long())
    with pytest.raises(ValueError, match=r"'mask' has shape \(2, 2, 4\)"):
        measure.head_similarity(torch.ones(2, 3, 4), torch.ones(2, 2, 4).bool())
