"""Directions, against numpy, scikit-learn and planted truth; files; wrong arguments."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from unsoft.lab.interpret.steering import Directions, fit
from unsoft.lab.interpret.steering.fit import METHODS, PairedStates, direction, paired_states

PAIRS = (["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w3 w3"], ["w1 w2 w4", "w4 w9", "w6 w7 w8 w10", "w5 w3"])


@pytest.fixture
def planted():
    """States (40, 24) on both sides of a known direction, with noise, and that direction."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.nn.functional.normalize(torch.randn(24, generator=generator), dim=0)
    base = torch.randn(40, 24, generator=generator)
    noise = 0.3 * torch.randn(2, 40, 24, generator=generator)
    return base + truth + noise[0], base - truth + noise[1], truth


@pytest.mark.parametrize("method", METHODS)
def test_the_planted_direction_is_found_and_as_long_as_the_gap(planted, method):
    up, down, truth = planted
    result = direction(up, down, method)
    assert torch.cosine_similarity(result, truth, dim=0) > (0.7 if method == "probe" else 0.95)
    way = torch.nn.functional.normalize(result, dim=0)
    assert torch.isclose(result.norm(), (up - down).mean(0) @ way, rtol=1e-4)
    assert torch.allclose(direction(down, up, method), -result, atol=1e-4)


def test_mean_and_principal_direction_against_numpy(planted):
    up, down, _ = (x.double().numpy() for x in planted)
    gap = up - down
    assert np.allclose(direction(*planted[:2], "mean"), gap.mean(0), atol=1e-6)
    values, vectors = np.linalg.eigh(gap.T @ gap)
    top = vectors[:, values.argmax()]
    assert np.allclose(direction(*planted[:2], "pca"), top * (top @ gap.mean(0)), atol=1e-5)


def test_probe_against_scikit_learn(planted):
    up, down, _ = (x.double().numpy() for x in planted)
    states = np.concatenate([up, down])
    centred = states - states.mean(0)
    centred /= np.sqrt((centred**2).mean())
    probe = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
    weights = probe.fit(centred, [1] * len(up) + [0] * len(down)).coef_[0]
    result = direction(*planted[:2], "probe").numpy()
    assert np.allclose(result / np.linalg.norm(result), weights / np.linalg.norm(weights), atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_shuffled_labels_lose_the_direction(planted, method):
    up, down, truth = planted
    states = PairedStates({3: up}, {3: down}, "block", "0" * 40, {})
    for seed in range(5):
        result = states.shuffled(seed, method).vectors[3]
        assert torch.cosine_similarity(result, truth, dim=0).abs() < 0.7
        assert result.norm() < 0.6 * states.directions(method).vectors[3].norm()


def test_exchanged_sides_do_not_change_a_principal_direction(planted):
    """Why principal directions are shuffled in another way."""
    up, down, _ = planted
    turned = torch.arange(40)[:, None] < 19
    mixed = direction(torch.where(turned, down, up), torch.where(turned, up, down), "pca")
    assert abs(torch.cosine_similarity(mixed, direction(up, down, "pca"), dim=0)) > 0.999


def test_half_of_the_pairs_exchange_their_sides():
    up, down = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), -torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    result = PairedStates({0: up}, {0: down}, "block", "0" * 40, {}).shuffled(0).vectors[0].item()
    signs = [
        (a, b, c, d) for a in (1, -1) for b in (1, -1) for c in (1, -1) for d in (1, -1) if a + b + c + d == 0
    ]
    assert result in [
        pytest.approx((a + 2 * b + 3 * c + 4 * d) / 2) for a, b, c, d in signs if a + 2 * b + 3 * c + 4 * d
    ]


@pytest.mark.parametrize("pool", ["last", "mean"])
@torch.no_grad()
def test_states_of_texts_are_those_that_transformers_tells(tiny, tokenizer, pool):
    model = tiny("llama")
    result = paired_states(model, *PAIRS, tokenizer, layers="0-1", pool=pool)
    for side, texts in zip((result.positive, result.negative), PAIRS, strict=True):
        for number, text in enumerate(texts):
            states = model(tokenizer(text, return_tensors="pt")["input_ids"], output_hidden_states=True)
            layer = states.hidden_states[1][0]  # after block 0; the last is told after the final norm
            assert torch.equal(side[0][number], layer[-1] if pool == "last" else layer.mean(0))


def test_files_keep_everything(tiny, tokenizer, tmp_path):
    result = fit(tiny("llama"), *PAIRS, tokenizer, method="pca", layers=[1], site="mlp")
    result.save(tmp_path / "way.safetensors")
    again = Directions.load(tmp_path / "way.safetensors")
    assert (again.site, again.method, again.model, again.about) == (
        "mlp",
        "pca",
        result.model,
        {"pairs": 4, "pool": "last"},
    )
    assert list(again.vectors) == [1] and torch.equal(again.vectors[1], result.vectors[1])
    again.check_model(tiny("llama"))


def test_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match="there is no file"):
        Directions.load(tmp_path / "none")
    (tmp_path / "text").write_text("words")
    save_file({"a": torch.ones(2)}, tmp_path / "other")
    for name in ("text", "other"):
        with pytest.raises(ValueError, match="does not hold directions that unsoft wrote"):
            Directions.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positive": PAIRS[0][:3]}, "as many positive examples as negative ones, not 3 and 4"),
        ({"positive": ["w1"], "negative": ["w2"]}, "at least 2 pairs are needed, not 1"),
        ({"layers": 7}, "7 is not among the 2 layers 0-1"),
        ({"layers": "x"}, "expected a number"),
        ({"layers": []}, "names no layer"),
        ({"method": "lasso"}, "'method' must be 'mean', 'pca' or 'probe', not 'lasso'"),
        ({"site": "attention"}, "'site' must be 'block' or 'mlp'"),
        ({"pool": "max"}, "'pool' must be 'last' or 'mean'"),
        ({"positive": PAIRS[1]}, "the same states on the mean at layer 0, so there is no direction"),
        ({"positive": ["w1", "", "w2", "w3"]}, "the text '' has no token"),
    ],
)
def test_bad_arguments(tiny, tokenizer, change, message):
    given = {"positive": PAIRS[0], "negative": PAIRS[1]} | change
    with pytest.raises(ValueError, match=message):
        fit(tiny("llama"), tokenizer=tokenizer, **given)


def test_random_directions_are_as_long(tiny, directions):
    result = directions(tiny("llama"))
    drawn = result.random(1)
    assert drawn.norms() == pytest.approx(result.norms(), rel=1e-5)
    assert abs(torch.cosine_similarity(drawn.vectors[0], result.vectors[0], dim=0)) < 0.6
    assert not torch.equal(drawn.vectors[0], result.random(2).vectors[0])
