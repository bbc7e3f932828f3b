"""Collapse against loops over tokens and known matrices, decodability against least squares of numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from unsoft import measure

NAN = math.nan
NUMBERS = ["residual", "composite_residual", "mean_cosine", "effective_rank", "stable_rank"]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def cosine(x, y):
    lengths = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(a * a for a in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / lengths if lengths else 0.0


def without_mean(states):
    mean = [math.fsum(column) / len(states) for column in zip(*states, strict=True)]
    return [[x - m for x, m in zip(row, mean, strict=True)] for row in states]


def by_hand(name, states):
    """``states``: a list of the tokens that exist."""
    left = without_mean(states)
    if name == "residual":
        return math.sqrt(sum(x * x for row in left for x in row))
    if name == "composite_residual":
        columns = max(sum(map(abs, column)) for column in zip(*left, strict=True))
        return math.sqrt(columns * max(sum(map(abs, row)) for row in left))
    if name == "mean_cosine":
        pairs = list(itertools.permutations(states, 2))
        return sum(cosine(x, y) for x, y in pairs) / len(pairs) if pairs else 0.0
    # Squared singular values are the eigenvalues of the Gram matrix.
    x = torch.tensor(states, dtype=torch.float64)
    squares = torch.linalg.eigvalsh(x @ x.T).clamp(min=0).tolist()
    if name == "stable_rank":
        return sum(squares) / max(squares)
    sizes = [math.sqrt(s) for s in squares if s > 1e-12 * max(squares)]
    return math.exp(-sum(s / sum(sizes) * math.log(s / sum(sizes)) for s in sizes))


def recovery_by_hand(states, inputs, names):
    states, inputs, right = without_mean(states), without_mean(inputs), 0.0
    for x, name in zip(states, names, strict=True):
        cosines = [cosine(x, e) for e in inputs]
        best = [j for j, c in enumerate(cosines) if c > max(cosines) - 1e-12]
        right += sum(names[j] == name for j in best) / len(best)
    return right / len(states)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (6, 3), (1, 3)])
@pytest.mark.parametrize("name", NUMBERS)
def test_definition(name, shape, masked):
    states = normal(*shape) + 3
    mask = torch.arange(shape[-2]) != 1 if masked else None
    result = getattr(measure, name)(states, mask)
    assert result.shape == shape[:-2]
    for at in itertools.product(*map(range, shape[:-2])):
        visible = states[at] if mask is None else states[at][mask]
        assert result[at].item() == pytest.approx(by_hand(name, visible.tolist()), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1.0, 5.0])
def test_recovery(noise, named):
    inputs, tokens = normal(2, 8, 3), torch.tensor([0, 1, 2, 0, 3, 4, 1, 0])
    inputs[:, [3, 7, 6]] = inputs[:, [0, 0, 1]]  # repeated tokens
    states = 2 * inputs + noise * normal(2, 8, 3, seed=1) + 10
    exists = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    result = measure.recovery(states, inputs, exists, tokens if named else None)
    for b, count in enumerate((8, 6)):
        names = tokens.tolist()[:count] if named else list(range(count))
        expected = recovery_by_hand(states[b, :count].tolist(), inputs[b, :count].tolist(), names)
        assert result[b].item() == pytest.approx(expected, rel=1e-12)


def test_ties_up_to_rounding():
    """Shifted copies of a vector all have the cosine 0 to (1, 1, ...), but in floating point not exactly."""
    vector = normal(9)
    inputs = torch.stack([vector.roll(shift) for shift in range(9)])
    states = torch.tensor([1.0, -1.0] * 4 + [0.0]).double()[:, None].expand(9, 9)
    assert measure.recovery(states, inputs).item() == pytest.approx(1 / 9)


def test_evolution_noise_and_collapse_are_distinguished():
    inputs = normal(64, 32)
    layers = torch.stack(
        [
            3 * inputs + 0.1 * normal(64, 32, seed=1),
            normal(64, 32, seed=2),
            torch.full((64, 32), 0.1).double(),
        ]
    )
    seen = measure.collapse(layers, inputs)
    evolution, noise, collapsed = seen.recovery.tolist()
    assert evolution == 1 and noise < 0.1 and collapsed == pytest.approx(1 / 64)
    assert seen.residual[1] > 40 and seen.residual[2] < 1e-12
    assert seen.effective_rank[1] > 20 and seen.effective_rank[2].item() == pytest.approx(1)
    assert seen.mean_cosine[2].item() == pytest.approx(1)


def test_collapse_is_all_of_them():
    states, inputs, mask = (
        normal(2, 5, 4),
        normal(2, 5, 4, seed=1),
        torch.tensor([True, True, False, True, True]),
    )
    seen = measure.collapse(states, inputs, mask)
    for name in NUMBERS:
        assert torch.equal(getattr(seen, name), getattr(measure, name)(states, mask))
    assert torch.equal(seen.recovery, measure.recovery(states, inputs, mask))
    assert measure.collapse(states).recovery is None


def test_known_ranks():
    rotation, _ = torch.linalg.qr(normal(6, 6))
    states = rotation[:, :4] @ torch.diag(torch.tensor([4.0, 4.0, 4.0, 4.0]).double())
    assert measure.effective_rank(states).item() == pytest.approx(4)
    assert measure.stable_rank(states).item() == pytest.approx(4)
    assert measure.stable_rank(
        rotation @ torch.diag(torch.tensor([2.0, 1, 1, 0, 0, 0]).double())
    ).item() == pytest.approx(1.5)


@pytest.mark.parametrize("value", [0.1, 12345.678])
def test_equal_tokens_have_almost_no_residual(value):
    """The mean of equal float32 numbers is not exactly that number."""
    states = torch.full((1000, 3), value)
    assert measure.residual(states) < 1e-9 * value
    assert measure.composite_residual(states) < 1e-9 * value


@pytest.mark.parametrize("name", NUMBERS)
def test_no_tokens_one_token_zeros(name):
    call = getattr(measure, name)
    rank = name.endswith("rank")
    assert call(torch.zeros(2, 0, 3)).tolist() == [0, 0]
    assert call(torch.zeros(2, 4, 3)).tolist() == [0, 0]
    assert call(torch.ones(1, 3)).item() == pytest.approx(1 if rank else 0)
    assert call(torch.ones(4, 3), torch.zeros(4, dtype=torch.bool)) == 0
    assert measure.recovery(torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4, dtype=torch.bool)) == 0


@pytest.mark.parametrize("name", NUMBERS)
def test_nan_shows_if_visible(name):
    states = normal(2, 4, 3)
    with_nan = states.clone()
    with_nan[0, 1] = NAN
    result = getattr(measure, name)(with_nan)
    assert result.isnan().tolist() == [True, False]
    mask = torch.tensor([True, False, True, True])
    assert torch.equal(getattr(measure, name)(with_nan, mask), getattr(measure, name)(states, mask))


def test_nan_is_never_recovered():
    inputs = normal(4, 3)
    states = inputs.clone()
    states[0] = NAN  # spoils the mean, and so every token
    assert measure.recovery(states, inputs) == 0


@pytest.mark.parametrize("name", NUMBERS)
def test_gradient(name):
    mask = torch.tensor([True, True, True, False, True])
    states = normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: getattr(measure, name)(x, mask), states)
    zeros = torch.zeros(4, 3, requires_grad=True)
    getattr(measure, name)(zeros).backward()
    assert zeros.grad.isfinite().all()


@pytest.mark.parametrize("name", NUMBERS)
def test_half_precision(name):
    states = normal(6, 4).bfloat16()
    result = getattr(measure, name)(states)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(by_hand(name, states.tolist()), rel=1e-5)


@pytest.mark.parametrize("name", NUMBERS)
def test_invalid_states_raise(name):
    call = getattr(measure, name)
    with pytest.raises(TypeError, match="'states' has dtype torch.int64"):
        call(torch.ones(3, 2).long())
    with pytest.raises(ValueError, match=r"'states' has shape \(3,\)"):
        call(torch.ones(3))
    with pytest.raises(ValueError, match=r"'mask' has shape \(3, 2\), .* \(3,\)"):
        call(torch.ones(3, 2), torch.ones(3, 2).bool())


def test_invalid_inputs_of_recovery_raise():
    states = torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match=r"'inputs' has shape \(4, 2\)"):
        measure.recovery(states, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"'inputs' has shape \(5, 4, 3\)"):
        measure.recovery(states, torch.ones(5, 4, 3))
    with pytest.raises(TypeError, match="'tokens' must be an integer tensor"):
        measure.recovery(states, states, tokens=torch.ones(4))
    with pytest.raises(ValueError, match=r"'tokens' has shape \(3,\)"):
        measure.recovery(states, states, tokens=torch.ones(3).long())


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


def test_invalid_arguments_of_decodability_raise():
    with pytest.raises(ValueError, match="'train'"):
        measure.decodability(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), train=2)
    with pytest.raises(ValueError, match="'inputs'"):
        measure.decodability(torch.zeros(2, 3, 4), torch.zeros(2, 2, 4), train=1)


def test_repeated_tokens_add_no_rank_in_float32():
    """Squares of small singular values drown in float32 beside that of a large one."""
    states = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))[torch.arange(160) % 40]
    states[:, 3] *= 100
    expected = measure.effective_rank(states.double())
    torch.testing.assert_close(measure.effective_rank(states).double(), expected, rtol=1e-5, atol=0)
