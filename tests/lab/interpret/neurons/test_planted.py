"""Models with planted neurons, whose roles are known."""

import pytest

from tests.lab.interpret.neurons.planted import (
    DECOY,
    FREQUENCY_NEURON,
    NULL,
    NULL_NEURON,
    counts,
    planted_model,
    random_model,
    text,
)
from unsoft.lab.interpret.neurons import scan
from unsoft.lab.interpret.neurons.result import ENTROPY, FREQUENCY


@pytest.fixture(scope="module")
def report():
    return scan(planted_model(), text(), counts=counts(), null=NULL)


def of(report, neuron):
    return next(record for record in report.neurons if record["neuron"] == neuron)


def test_a_neuron_in_the_null_space_is_ranked_first(report):
    assert report.ranked("entropy")[0]["neuron"] == NULL_NEURON
    record = of(report, NULL_NEURON)
    assert record["mediated_share"] > 0.5 and record["mediated_q"] < 1e-3
    assert record["rho"] == pytest.approx(0.95, abs=0.02)
    assert record["entropy_frozen"] < 0.2 * record["entropy_total"]
    assert record["changed_frozen"] <= record["changed"]


def test_one_that_is_as_invisible_but_does_not_act_through_the_norm_is_not(report):
    decoy, true = of(report, DECOY), of(report, NULL_NEURON)
    assert decoy["rho"] == pytest.approx(true["rho"], abs=0.02)
    assert decoy["norm"] == pytest.approx(true["norm"], rel=0.01)
    assert not ENTROPY.survives(decoy) and decoy["mediated_share"] < 0.1
    assert decoy in ENTROPY.candidates(report.neurons)
    assert [record["neuron"] for record in report.ranked("entropy")] == [NULL_NEURON]


def test_a_frequency_neuron_is_ranked_first(report):
    assert report.ranked("frequency")[0]["neuron"] == FREQUENCY_NEURON
    record = of(report, FREQUENCY_NEURON)
    assert record["frequency_q"] < 0.01
    assert abs(record["frequency_cosine"]) > 0.99 and record["frequency_share"] > 0.5
    assert not FREQUENCY.survives(of(report, NULL_NEURON))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_a_random_model_nothing_survives(seed):
    report = scan(random_model(seed), text(seed), counts=counts(), null=NULL, seed=seed)
    assert report.ranked("entropy") == [] == report.ranked("frequency")
    assert {verdict["verdict"] for verdict in report.verdicts} == {"not supported"}


def test_intervals_hold_their_figures(report):
    for record in report.neurons:
        for name in ("total", "mediated_share", "entropy_shift", "frequency_share", "changed"):
            assert (
                record[f"{name}_low"] <= record[name] + 1e-6 and record[name] <= record[f"{name}_high"] + 1e-6
            )


def test_induction_compares_with_controls(report):
    groups = {record["group"] for record in report.induction}
    assert groups == {"entropy", "candidate", "control"}
    entropy = next(record for record in report.induction if record["group"] == "entropy")
    assert entropy["neuron"] == NULL_NEURON
    # What clipping it does goes through the norm as well.
    assert abs(entropy["clipping_frozen"]) < 0.3 * abs(entropy["clipping"])


def test_curves_pass_through_nothing_at_zero_and_the_shift_at_one(report):
    curve = {point["dose"]: point for point in report.details[NULL_NEURON]["curve"]}
    assert curve[0.0]["entropy"] == 0.0
    ends = [curve[dose]["entropy"] for dose in (-1.0, 1.0)]
    assert ends[0] * ends[1] < 0 or max(map(abs, ends)) > 0
    assert len(report.details[NULL_NEURON]["tokens"]) == 8
