"""Output projections that are fitted to the original's output."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import unsoft
from unsoft.hf.recipe import Recipe
from unsoft.lab.training.conversion import fitting
from unsoft.lab.training.conversion.matching import Pair

TEXTS = torch.randint(0, 256, (24, 32), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(0, 256, (6, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def original(source):
    return unsoft.hf.load_model(source)[0]


def projections(model):
    return [layer.self_attn.o_proj.weight.detach().clone() for layer in model.model.layers]


def apart(pair):
    """Return the difference of attention outputs, on texts that were not fitted; one pass for each model."""
    seen = []
    for model in (pair.student, pair.teacher):
        hooks = [
            layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0]))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(OTHERS)
        for hook in hooks:
            hook.remove()
    ours, theirs = torch.stack(seen[:2]), torch.stack(seen[2:])
    return ((ours - theirs).square().flatten(1).sum(1) / theirs.square().flatten(1).sum(1)).tolist()


@pytest.mark.parametrize("mechanism", ["relu2", "sigmoid", "cog", "linear-relu"])
def test_attention_comes_closer_on_texts_that_were_not_fitted(original, mechanism):
    pair = Pair(original, Recipe(mechanism))
    before, weights = apart(pair), projections(pair.teacher)
    assert fitting.fit(pair, TEXTS) == 2
    after = apart(pair)
    assert all(b < min(a, 1) for a, b in zip(before, after, strict=True)), (before, after)
    for ours, theirs in zip(projections(pair.teacher), weights, strict=True):
        assert torch.equal(ours, theirs)


def test_a_change_of_size_is_undone(original):
    """Weights of softmax times a number for each head: the fit divides by it."""
    pair = Pair(original, Recipe("relu2"))
    wanted = projections(pair.student)
    unsoft.hf.swap(pair.student, "softmax")
    sizes = torch.tensor([3.0, 0.5, 20.0, 1.0]).repeat_interleave(8)
    for layer in pair.student.model.layers:
        layer.self_attn.o_proj.weight.data *= sizes
    assert fitting.fit(pair, TEXTS) == 2
    for fitted, weight in zip(projections(pair.student), wanted, strict=True):
        torch.testing.assert_close(fitted, weight, rtol=1e-3, atol=1e-4)


def test_the_ridge_is_that_of_another_library():
    """Around the scaled matrix, with the same penalty."""
    generator = torch.Generator().manual_seed(2)
    x, matrix = (torch.randn(*shape, generator=generator).double() for shape in ((200, 8), (8, 5)))
    y = x @ torch.randn(8, 5, generator=generator).double()
    sums = fitting._Sums(x, y)
    assert sums.error(matrix) == pytest.approx(float((x @ matrix - y).norm() ** 2 / y.norm() ** 2))
    scaled = fitting._scaled(matrix, 2, sums)
    parts = torch.stack([x[:, :4] @ matrix[:4], x[:, 4:] @ matrix[4:]], -1).reshape(-1, 2).numpy()
    factors = np.linalg.lstsq(parts, y.numpy().reshape(-1), rcond=None)[0]
    by_hand = matrix * torch.from_numpy(factors).repeat_interleave(4)[:, None]
    torch.testing.assert_close(scaled, by_hand, rtol=1e-6, atol=1e-9)
    penalty = 0.01 * float(x.square().sum(0).mean())
    ridge = Ridge(alpha=penalty, fit_intercept=False, tol=1e-12).fit(x.numpy(), (y - x @ scaled).numpy())
    best = fitting._best(matrix, 2, sums, sums)
    torch.testing.assert_close(best, scaled + torch.from_numpy(ridge.coef_).mT, rtol=1e-6, atol=1e-9)


def test_nothing_is_changed_where_it_would_not_help(original):
    """The last quarter of the texts selects the candidate: noise is not fitted."""
    generator = torch.Generator().manual_seed(3)
    x, noise = (torch.randn(24, width, generator=generator).double() for width in (8, 5))
    matrix = torch.randn(8, 5, generator=generator).double()
    assert fitting._best(matrix, 2, fitting._Sums(x, noise), fitting._Sums(x, x @ matrix)) is None
