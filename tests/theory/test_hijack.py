"""Clones against a unique key: the numbers of Rosić 2026, the linear system itself, and the real engines."""

import math

import pytest
import torch

import unsoft
from unsoft import Formula, measure, theory

CLONES = torch.tensor([1, 2, 10, 50, 1000])


def test_the_example_of_the_document():
    assert float(theory.hijack_share("softmax", 50)) == pytest.approx(20 / 70)
    assert float(theory.magnitude_hijack(50, gate="weight", eps=0.0).share) == pytest.approx(20 / 21)


@pytest.mark.parametrize("name", ["cog", "sinh", "identity", "relu", "relu2"])
def test_no_mechanism_looks_immune_by_default(name):
    """Clones of the default logit have a weight; the measure of the same name has the same defaults."""
    share = theory.hijack_share(name, 50)
    assert 0.0 < float(share) < 0.5
    measured = measure.unique_share(unsoft.mechanisms()[name], [50])
    torch.testing.assert_close(share, measured[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["softmax", "cog", "relu2", "sigmoid", "relu", "identity", "sinh"])
@pytest.mark.parametrize(("unique", "clone"), [(3.0, 1.0), (0.5, 0.4), (1.0, -2.0)])
def test_shares_are_those_of_the_engines(name, unique, clone):
    """One query of width 1 and keys that are the logits; the mechanism's own absolute weights."""
    if clone < 0 and name.startswith("relu"):
        pytest.skip("a clone with the weight 0 is an error")
    for m in CLONES.tolist():
        logits = torch.tensor([unique] + [clone] * m, dtype=torch.float64)
        one = torch.ones(1, 1, dtype=torch.float64)
        _, weights = unsoft.attention(
            one, logits[:, None], logits[:, None], name, scale=1.0, return_weights=True
        )
        expected = weights[0, 0].abs() / weights.abs().sum()
        assert float(theory.hijack_share(name, m, unique=unique, clone=clone)) == pytest.approx(
            float(expected), rel=1e-12
        )


def magnitude_weights(m, eps):
    """The linear system, with the unique key so far away that its similarity is 0."""
    z = torch.zeros(m + 1, m + 1, dtype=torch.float64)
    z[0, 0], z[1:, 1:] = 1.0, 1.0
    return torch.linalg.solve(
        z + eps * torch.eye(m + 1, dtype=torch.float64), torch.ones(m + 1, dtype=torch.float64)
    )


@pytest.mark.parametrize("on", ["values", "mass"])
@pytest.mark.parametrize("gate", ["sigmoid", "weight"])
@pytest.mark.parametrize("base", ["softmax", "relu2"])
def test_magnitude_is_the_solution_of_its_system(on, gate, base):
    eps, slope, offset, unique, clone = 0.05, 3.0, -1.5, 1.4, 0.6
    for m in (1, 5, 60):
        w = magnitude_weights(m, eps)
        g = torch.sigmoid(slope * w + offset) if gate == "sigmoid" else w
        logits = torch.tensor([unique] + [clone] * m, dtype=torch.float64)
        f = logits.exp() if base == "softmax" else logits.relu() ** 2
        weights = f / f.sum() * g if on == "values" else f * g / (f * g).sum()
        result = theory.magnitude_hijack(
            m, unique=unique, clone=clone, base=base, on=on, gate=gate, slope=slope, offset=offset, eps=eps
        )
        assert float(result.unique) == pytest.approx(float(weights[0]), rel=1e-12)
        assert float(result.clones) == pytest.approx(float(weights[1:].sum()), rel=1e-12)
        assert float(result.share) == pytest.approx(float(weights[0] / weights.sum()), rel=1e-12)


def test_a_sigmoid_gate_only_delays_the_hijack_and_the_weight_itself_stops_it():
    many = torch.tensor([1e3, 1e6, 1e9])
    delayed = theory.magnitude_hijack(many, slope=4.0, offset=-2.0).share
    factor = 20 * torch.sigmoid(torch.tensor(4.0 / 1.1 - 2.0)) / torch.sigmoid(torch.tensor(-2.0))
    assert torch.allclose(delayed[-1], (factor / (factor + 1e9)).double(), rtol=1e-5)
    stopped = theory.magnitude_hijack(many, gate="weight").share
    assert torch.allclose(stopped, torch.full((3,), 20 / 1.1 / (20 / 1.1 + 1)).double(), atol=1e-4)


def test_a_formula_of_ones_own_and_broadcasting():
    cubed = Formula("s**3/n")
    result = theory.hijack_share(cubed, [[1], [3]], unique=[1.0, 2.0], clone=1.0)
    assert torch.allclose(result, torch.tensor([[1 / 2, 8 / 9], [1 / 4, 8 / 11]]).double(), atol=1e-7)


def test_edge_cases_and_invalid_arguments():
    assert float(theory.hijack_share("relu2", 5, unique=-1.0, clone=2.0)) == 0.0
    hidden = theory.magnitude_hijack(5, unique=-1.0, clone=2.0, base="relu2", on="mass")
    assert [float(x) for x in hidden] == [0.0, 1.0, 0.0]
    assert float(theory.hijack_share("softmax", 3, unique=5000.0, clone=4999.0)) == pytest.approx(
        1 / (1 + 3 / math.e)
    )
    for call, message in (
        (lambda: theory.hijack_share("softmax", 0), "clones: .*1"),
        (lambda: theory.hijack_share("softmax", 1, unique=math.nan), "unique: .*nan"),
        (lambda: theory.magnitude_hijack(1, on="keys"), "'on' .*'keys'"),
        (lambda: theory.magnitude_hijack(1, gate="none"), "'gate' .*'none'"),
        (lambda: theory.magnitude_hijack(1, eps=-1.0), "eps: .*-1"),
        (lambda: theory.hijack_share("sofmax", 1), "did you mean 'softmax'"),
        (lambda: theory.hijack_share("cog", 50, clone=0.0), "clone: .* is 0 at the logit 0, .*clone=1.0"),
        (lambda: theory.hijack_share("relu2", 50, clone=[1.0, -3.0]), "clone: .* is 0 at the logit -3"),
        (lambda: theory.magnitude_hijack(50, base="sinh", clone=0.0), "clone: .* is 0 at the logit 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("base", ["softmax", "cog"])
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_density_is_what_the_layer_does(base, p):
    """Clones in one place, and a unique key far away from them."""
    layer = unsoft.mechanism(f"density+{base}", heads=1, head_dim=2).double()
    layer.set_density(p=p, t=1.0)
    key = torch.tensor([[1 + math.log(20), 50.0]] + [[1.0, -50.0]] * 30, dtype=torch.float64)
    query = torch.tensor([[2**0.5, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        _, weights = layer(query[None, None], key[None, None], key[None, None], return_weights=True)
    expected = theory.density_hijack(30, p=p, base=base)
    torch.testing.assert_close(weights[0, 0, 0, 0] / weights.sum(), expected)


def test_density_takes_powers_between_0_and_1():
    with pytest.raises(ValueError, match="p: expected numbers between 0 and 1, not 2"):
        theory.density_hijack(5, p=[0.5, 2.0])
