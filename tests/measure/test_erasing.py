"""Deletion against loops over every pair of a row and a key."""

import itertools
import math

import pytest
import torch

from unsoft import measure

NAN = math.nan


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(weights, directions, added, visible):
    """One head: weights (L, S), what each source would add (S, E), the sources' directions (S, E)."""
    moved = []
    for i, j in itertools.product(*map(range, weights.shape)):
        length = math.sqrt(sum(x * x for x in directions[j]))
        if visible[i][j] and length:
            contribution = [weights[i, j].item() * x for x in added[j]]
            moved.append(
                sum(x * y for x, y in zip(contribution, directions[j], strict=True)) / length / length
            )
    removed = [-x for x in moved if x < 0]
    total = sum(map(abs, moved))
    return sum(removed) / total if total else 0.0, sum(removed) / len(removed) if removed else 0.0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("arguments", ["values", "residual", "out_proj"])
def test_definition(arguments, masked):
    batch, heads, length, keys, dim = 2, 3, 4, 5, 6
    width = {"values": dim, "residual": dim, "out_proj": 8}[arguments]
    weights, values = normal(batch, heads, length, keys, seed=0), normal(batch, heads, keys, dim, seed=1)
    residual = None if arguments == "values" else normal(batch, 1, keys, width, seed=2)
    out_proj = normal(heads, dim, width, seed=3) if arguments == "out_proj" else None
    values[0, 0, 1] = 0  # a source without a direction
    if residual is not None:
        residual[1, 0, 2] = 0
    mask = torch.ones(length, keys, dtype=torch.bool).tril() if masked else None
    result = measure.deletion(weights, values, residual, out_proj, mask)
    visible = torch.ones(length, keys, dtype=torch.bool) if mask is None else mask
    for b, h in itertools.product(range(batch), range(heads)):
        added = values[b, h] if out_proj is None else values[b, h] @ out_proj[h]
        directions = values[b, h] if residual is None else residual[b, 0]
        share, strength = by_hand(weights[b, h], directions.tolist(), added.tolist(), visible.tolist())
        assert result.share[b, h].item() == pytest.approx(share, rel=1e-12)
        assert result.strength[b, h].item() == pytest.approx(strength, rel=1e-12)


def test_softmax_deletes_only_through_the_projection():
    weights, values = normal(3, 4, seed=0).softmax(-1), normal(4, 2, seed=1)
    assert measure.deletion(weights, values).share == 0
    turned = measure.deletion(weights, values, residual=values, out_proj=-torch.eye(2, dtype=torch.float64))
    assert turned.share == 1
    assert turned.strength.item() == pytest.approx(3 / 12)  # rows sum to 1: the mean of all 12 weights


def test_no_deletion_no_mass_nothing_visible():
    values = torch.ones(3, 2)
    for weights, mask in [
        (torch.ones(2, 3), None),
        (torch.zeros(2, 3), None),
        (-torch.ones(2, 3), torch.zeros(3, dtype=torch.bool)),
        (torch.zeros(0, 3), None),
    ]:
        assert measure.deletion(weights, values, mask=mask) == (0, 0)


def test_hidden_keys_change_nothing_and_visible_nan_shows():
    weights, values = normal(2, 3, seed=0), normal(3, 2, seed=1)
    hidden = torch.tensor([True, True, False])
    with_nan = values.clone()
    with_nan[2] = NAN
    assert measure.deletion(weights, with_nan, values, mask=hidden) == measure.deletion(
        weights, values, values, mask=hidden
    )
    assert measure.deletion(weights, with_nan, values).share.isnan()
    assert measure.deletion(weights, with_nan).share.isnan()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_size_of_the_source_does_not_matter(scale):
    """A source twice as long whose value is twice as long is removed by the same multiple."""
    weights, values, residual = (
        normal(*shape, seed=seed).float() for seed, shape in enumerate([(2, 3), (3, 2), (3, 2)])
    )
    expected, result = (measure.deletion(weights, values * s, residual * s) for s in (1, scale))
    torch.testing.assert_close(result.share, expected.share)
    torch.testing.assert_close(result.strength, expected.strength)


def test_half_precision_and_gradient():
    weights, values, residual = (normal(2, 3, seed=0), normal(3, 2, seed=1), normal(3, 2, seed=2))
    half = measure.deletion(weights.bfloat16(), values.bfloat16(), residual.bfloat16())
    assert half.share.dtype == torch.float32
    assert half.share.item() == pytest.approx(
        measure.deletion(weights, values, residual).share.item(), abs=0.02
    )
    inputs = [x.requires_grad_() for x in (weights, values, residual)]
    assert torch.autograd.gradcheck(lambda *x: tuple(measure.deletion(*x)), inputs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4, 2)), ValueError, r"'values' has shape \(4, 2\), .* 3 keys"),
        (
            (torch.ones(8, 2, 3), torch.ones(2, 3, 2)),
            ValueError,
            r"'values' has shape \(2, 3, 2\); .*\(8, 2, 3\)\. .*values.repeat_interleave",
        ),
        (
            (torch.ones(2, 3), torch.ones(3, 2), torch.ones(5, 3, 2)),
            ValueError,
            r"'residual' has shape \(5, 3, 2\)",
        ),
        ((torch.ones(3), torch.ones(3, 2)), ValueError, r"'weights' has shape \(3,\)"),
        ((torch.ones(2, 3), torch.ones(3, 2).int()), TypeError, "'values' has dtype torch.int32"),
        ((torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 4)), ValueError, "without 'out_proj' their last"),
        (
            (torch.ones(2, 3), torch.ones(3, 2), torch.ones(4, 2)),
            ValueError,
            "'residual' .* one row for each of the 3 keys",
        ),
        (
            (torch.ones(2, 3), torch.ones(3, 2), None, torch.ones(2, 4)),
            ValueError,
            "'out_proj' is given without",
        ),
        (
            (torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 4), torch.ones(4, 2)),
            ValueError,
            r"must end in \(2, 4\)",
        ),
    ],
)
def test_invalid_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        measure.deletion(*arguments)


def dynamic_by_hand(x, y):
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


def test_definition_of_dynamic_deletion():
    x = normal(6, 5, seed=0)
    y = x + 0.3 * normal(6, 5, seed=1)
    expected = dynamic_by_hand(x, y)
    assert measure.dynamic_deletion(x, y).item() == pytest.approx(expected) and expected > 0.1


def test_static_random_and_zero_weights_are_not_dynamic():
    static = normal(40, 8, seed=0).abs() * normal(1, 8, seed=1).sign()
    assert measure.dynamic_deletion(static, static) == 0
    assert measure.dynamic_deletion(normal(400, 50, seed=0), normal(400, 50, seed=2)) < 0.02
    assert measure.dynamic_deletion(torch.zeros(4, 3), torch.zeros(4, 3)) == 0


def test_shapes_of_dynamic_deletion_must_match():
    with pytest.raises(ValueError, match="'again'"):
        measure.dynamic_deletion(torch.zeros(2, 3), torch.zeros(3, 3))
