"""Dynamic deletion and decodability against loops and least squares of numpy."""

import numpy as np
import pytest
import torch

from unsoft import measure


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(x, y):
    scores = []
    for j in range(x.shape[1]):
        wrote = removed = mixed = 0.0
        for i in range(x.shape[0]):
            size = min(abs(x[i, j].item()), abs(y[i, j].item()))
            if x[i, j] * y[i, j] < 0:
                mixed += size
            elif x[i, j] > 0:
                wrote += size
            else:
                removed += size
        if wrote + removed + mixed:
            scores.append((2 * min(wrote, removed) - mixed) / (wrote + removed + mixed))
    return max(0.0, sum(scores) / len(scores)) if scores else 0.0


def test_definition():
    x = normal(6, 5)
    y = x + 0.3 * normal(6, 5, seed=1)
    assert measure.dynamic_deletion(x, y).item() == pytest.approx(by_hand(x, y)) and by_hand(x, y) > 0.1


def test_static_random_and_dead_are_nothing():
    static = normal(40, 8).abs() * normal(1, 8, seed=1).sign()
    assert measure.dynamic_deletion(static, static) == 0
    assert measure.dynamic_deletion(normal(400, 50), normal(400, 50, seed=2)) < 0.02
    assert measure.dynamic_deletion(torch.zeros(4, 3), torch.zeros(4, 3)) == 0


def test_shapes_must_match():
    with pytest.raises(ValueError, match="'again'"):
        measure.dynamic_deletion(torch.zeros(2, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="'train'"):
        measure.decodability(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), train=2)
    with pytest.raises(ValueError, match="'inputs'"):
        measure.decodability(torch.zeros(2, 3, 4), torch.zeros(2, 2, 4), train=1)


def test_decodability_is_that_of_numpy():
    inputs = normal(6, 20, 3)
    states = inputs @ normal(3, 5, seed=1) + 0.5 * normal(6, 20, 5, seed=2)
    unit = (states / states.norm(dim=-1, keepdim=True)).numpy()
    x, e = unit[:4].reshape(-1, 5), inputs[:4].numpy().reshape(-1, 3)
    middle, mean = x.mean(0), e.mean(0)
    ridge = 1e-3 * np.mean(np.diag((x - middle).T @ (x - middle)))
    stacked = np.vstack([x - middle, np.sqrt(ridge) * np.eye(5)])
    fitted = np.linalg.lstsq(stacked, np.vstack([e - mean, np.zeros((5, 3))]), rcond=None)[0]
    left = inputs[4:].numpy() - ((unit[4:] - middle) @ fitted + mean)
    expected = 1 - (left**2).sum() / ((inputs[4:].numpy() - mean) ** 2).sum()
    assert measure.decodability(states, inputs, train=4).item() == pytest.approx(expected, rel=1e-9)


def test_noise_cannot_be_decoded():
    assert measure.decodability(normal(12, 48, 16, seed=3), normal(12, 48, 16), train=9) < 0.02
