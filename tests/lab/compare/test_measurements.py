"""Measurements against what they must be: closed forms, torch's own softmax, brute force."""

import itertools
import math

import pytest
import torch

from tests.lab.compare.tiny import TINY
from unsoft.formula import Formula
from unsoft.lab.compare.candidate import Candidate, candidates_of, keys_of, normals
from unsoft.lab.compare.sections import (
    approximations,
    collapse,
    cost,
    features,
    focus,
    gating,
    geometry,
    hijack,
    learning,
    linear,
    sign,
    solver,
)


def subject(name):
    return Candidate(name, name)


def test_weights_are_those_of_softmax():
    q, k = torch.randn(2, 3, 5, 8, dtype=torch.float64).unbind()
    expected = torch.softmax(q @ k.mT / math.sqrt(8), -1)
    torch.testing.assert_close(subject("softmax").weights(q, k), expected)


def test_the_second_map_of_an_affine_pair_is_another_one():
    q, k = torch.randn(2, 2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    for name in ("differential", "differential2", "gpam"):
        assert (subject(name).weights(q, k) < 0).any(), name


def test_a_family_as_a_function_of_logits_sees_these_logits():
    logits = torch.randn(3, 7, dtype=torch.float64)
    q, k = keys_of(logits)
    torch.testing.assert_close((k @ q[0]) / 8, logits)
    expected = (
        logits / logits.shape[-1]
    )  # the plain logit over the number of keys, which linear-identity computes in linear time
    torch.testing.assert_close(subject("linear-identity").row()(logits), expected)


@pytest.mark.parametrize(("name", "made_for"), [("cosformer", 40), ("cosformer(128)", 128)])
def test_cosformer_is_made_for_the_length_it_is_measured_at(name, made_for):
    q, k = torch.randn(2, 1, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    distance = torch.arange(40)[:, None] - torch.arange(40)
    likeness = (q.relu() @ k.relu().mT) * torch.cos(math.pi / 2 * distance / made_for)
    expected = likeness.tril() / likeness.tril().sum(-1, keepdim=True)
    torch.testing.assert_close(subject(name).weights(q, k, is_causal=True), expected.nan_to_num())


def test_the_plain_logit_has_its_floor():
    found = focus.measured_sparsity(subject("identity"), 0.0, 2.0, 4096, 8, 16)
    assert abs(float(found.mean()) - math.sqrt(2 / math.pi)) < 0.01


def test_softmax_has_its_closed_form_and_rows_without_weight_are_left_out():
    found = focus.measured_sparsity(subject("softmax"), 1.0, 0.5, 4096, 8, 16)
    assert abs(float(found.mean()) - math.exp(-0.125)) < 0.01
    assert len(focus.measured_sparsity(subject("relu2"), -40.0, 0.5, 64, 4, 16)) == 0


def test_clones():
    rows = {(row["kind"], row["clones"]): row["share"] for row in hijack.hijack(subject("softmax"))}
    assert rows["measured", 50] == pytest.approx(20 / 70) and rows["theory", 50] == pytest.approx(20 / 70)
    # the gate of Rosić 2026: (Z + 0.1) mu = 1 gives 1/1.1 and 1/50.1
    unique, clone = (1 / (1 + math.exp(-mu)) for mu in (1 / 1.1, 1 / 50.1))
    assert hijack.measured_share(subject("magnitude"), 50) == pytest.approx(
        20 * unique / (20 * unique + 50 * clone), rel=1e-3
    )


def test_curves_of_the_plain_logit_are_a_line():
    for row in sign.curves(subject("identity")):
        assert row["weight"] == pytest.approx(row["logit"] / 16) and row["gradient"] == pytest.approx(1 / 16)


def test_sums():
    cog, softmax = sign.sums(subject("cog"))[0], sign.sums(subject("softmax"))[0]
    assert cog["l1_low"] == pytest.approx(1) == cog["l1_high"] and cog["sum_low"] < 0 < cog["sum_high"]
    assert softmax["negative"] == 0 == softmax["deletion"] and 0.4 < cog["deletion"] < 0.6


def test_the_largest_diversity_against_a_search_by_brute_force():
    """Multiplicative updates on the simplex, an independent way to the least p'Zp."""
    keys = 0.5 * torch.randn(8, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = torch.exp(-(keys[:, None] - keys).square().sum(-1) / 2)
    p = torch.full((8,), 1 / 8, dtype=torch.float64)
    for _ in range(50_000):
        p = p * torch.exp(-0.5 * (z @ p))
        p = p / p.sum()
    assert geometry.largest_diversity(z) == pytest.approx(float(1 / (p @ z @ p)), rel=1e-4)
    weights = torch.linalg.solve(z, torch.ones(8, dtype=torch.float64))
    assert (weights < 0).any() and geometry.largest_diversity(z) < float(weights.sum())


def test_rows_of_the_features_are_what_they_are_called():
    s = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, ((signed, free, _, _), weigh) in features.FORMULAS.items():
        row = weigh(s)
        assert bool((row < 0).any()) == bool(signed), name
        assert torch.allclose(row.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-6) != bool(free), name


def test_conjugate_gradients_arrive():
    rows = solver.solver(solver.KINDS[0])
    last = [row for row in rows if row["steps"] == 50 and row["eps"] == 0.1][0]
    first = [row for row in rows if row["steps"] == 1 and row["eps"] == 0.1][0]
    assert last["weights"] < 1e-6 < 1e-2 < first["weights"]


def test_no_query_has_a_larger_ratio_of_norms_than_one():
    for row in linear.norm_ratios():
        assert row["largest"] == pytest.approx(1.0)


def test_sets_whose_magnitude_is_known():
    for row in geometry.sets():
        assert row["found"] == pytest.approx(row["expected"], rel=1e-6)


def test_pivots_are_those_of_a_factorisation_and_0_for_clones():
    keys = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.exp(-torch.cdist(keys, keys).square() / 3)
    expected = torch.linalg.cholesky(z).diagonal().square().min()
    assert float(geometry.smallest_pivot(keys)) == pytest.approx(float(expected), rel=1e-9)
    assert abs(geometry.smallest_pivot(keys[[0, 1, 0]])) < 1e-40


def test_taylor_features_written_out():
    """The features of degree up to 2: 1, x, and all products of two over sqrt(2)."""
    query, key = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1300), dtype=torch.float64)

    def features(x):
        pairs = (x[:, :, None] * x[:, None, :]).flatten(1) / math.sqrt(2)
        return torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x, pairs], 1)

    weights = features(query / 2) @ features(key / 2).mT
    exact = torch.softmax(query @ key.mT / 4, -1)
    error = float((weights / weights.sum(-1, keepdim=True) - exact).norm() / exact.norm())
    assert approximations.taylor_features()[0]["error"] == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("base", [None, 1e4])
def test_gates_of_clones_are_those_of_the_dense_system(base):
    """Rotated keys by an independent rotation, weights by a dense solve."""
    gate, clone = gating.Gate(2.0, -1.0, 3.0), normals(1703)(64)
    key = clone.repeat(6, 1)
    key[0] += 40
    if base is not None:
        for position, pair in itertools.product(range(6), range(32)):
            angle = position * base ** (-pair / 32)
            turn = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
            key[position, 2 * pair : 2 * pair + 2] @= torch.tensor(turn, dtype=torch.float64)
    z = torch.exp(-3 * torch.cdist(key, key).square() / 64) + 0.1 * torch.eye(6, dtype=torch.float64)
    expected = torch.sigmoid(2 * torch.linalg.solve(z, torch.ones(6, dtype=torch.float64)) - 1)
    candidate = hijack.GatedCandidate("magnitude", "magnitude", gate=gate)
    found = gating.factors(candidate, 5, causal=False, base=base, draw=3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    last = gating.factors(candidate, 5, causal=True, base=base, draw=3)
    assert float(last[1]) > float(last[-1]), "the first of the crowd arrived when there was no other"


def test_a_causal_gate_is_fitted_to_weights_on_arrival():
    """The j-th of equal keys arrives with the weight 1 / (j + eps)."""
    gate = hijack.fitted_gate(causal=True)
    candidate = hijack.GatedCandidate("magnitude", "magnitude", gate=gate)
    crowd = gating.factors(candidate, 50, causal=True, base=1e4, draw=0, rotated=False)
    expected = [gate.of(1 / (j + 0.1)) for j in range(1, 51)]
    assert crowd[1:].tolist() == pytest.approx(expected, abs=1e-4)
    assert sum(expected) / expected[0] < 1.1 and expected[0] >= 0.5
    density = hijack.GatedCandidate("density", "density")
    crowd = gating.factors(density, 50, causal=True, base=1e4, draw=0, rotated=False)
    assert float(crowd[1:].sum() / crowd[0]) == pytest.approx(50**0.01, rel=1e-6)


def test_the_share_of_a_crowd_in_the_hidden_state():
    rows = {(row["gate"], row["where"], row["crowd"]): row for row in gating.hidden_state()}
    crowd, unique = (1 / (1 + math.exp(-mu)) for mu in (1 / 50.1, 1 / 1.1))  # gates at initialisation
    alone = rows["at initialisation", "values", "alone"]["share"]
    assert alone == pytest.approx(crowd / math.sqrt(1 + crowd**2), rel=1e-3)
    # On the mass the weights still sum to 1: alone, a crowd keeps everything, however small its gates.
    assert rows["fitted", "mass", "alone"]["share"] == pytest.approx(1 / math.sqrt(2), rel=1e-6)
    c, u = (x / (20 * unique + 50 * crowd) for x in (50 * crowd, 20 * unique))
    relevant = rows["at initialisation", "mass", "with a key 20 times as relevant"]
    assert relevant["share"] == pytest.approx(c / math.sqrt(1 + c**2 + u**2), rel=1e-3)


def test_smaller_strides_need_more_steps():
    steps = [
        sum(row["steps"] for row in learning.learning(subject("cog"), stride, limit=200))
        for stride in (8.0, 2.0)
    ]
    assert steps[0] < steps[1]


def test_heads_start_alike_only_if_queries_and_keys_share_a_map():
    shared, independent = (
        collapse.stack(subject("softmax"), 1, False, 0, shared=x)[1]["alike"] for x in (True, False)
    )
    assert shared > independent + 0.2


def test_the_record_of_heads_has_trained_models_and_their_controls():
    rows = collapse.model_heads()
    assert {(row["model"], row["trained"]) for row in rows} == set(
        itertools.product(("smollm2", "minilm"), (True, False))
    )
    for row in rows:
        assert row["layers"][-1] == pytest.approx(sum(row["last"]) / len(row["last"]), abs=1e-3)


def test_a_step_of_decoding_leaves_the_cache_as_it_was():
    for name in ("softmax", "linear-relu", "magnitude"):
        call = cost.cached_step(subject(name), 16)
        first, again = call(), call()
        torch.testing.assert_close(first, again)


def test_the_peer_has_the_ratio_one():
    rows = cost.training([subject("cog")], 64, TINY)
    assert (
        [row["mechanism"] for row in rows] == [cost.PEER, "cog"]
        and rows[0]["ratio"] == 1
        and rows[1]["seconds"] > 0
    )


def test_labels_are_unique_and_unknown_names_are_refused():
    twice = [Formula("s/n"), Formula("s/n")]
    assert [s.label for s in candidates_of(["cog", "cog"], twice)] == ["cog", "s/n", "s/n (2)"]
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        candidates_of(["sofmax"], [])
