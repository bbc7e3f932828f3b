"""The rules that turn figures into roles and verdicts decide both ways."""

from dataclasses import replace

import pytest

from unsoft.lab.interpret.neurons.result import ENTROPY, ROLES, Scan

GOOD = {"share": 0.6, "low": 0.4, "q": 0.001}


def record(number, size, **changed):
    figures = GOOD | changed
    result = {"layer": 3, "neuron": number}
    for role in ROLES:
        result |= {
            role.static: 1 - number / size,
            f"{role.static}_place": number / size,
            role.q: figures["q"],
            role.share: figures["share"],
            f"{role.share}_low": figures["low"],
            f"{role.share}_high": figures["share"] + 0.1,
        }
    return result


def made(surviving, size=300):
    """A scan in which the first so many neurons survive; neurons are numbered by their weights' figure."""
    weak = {"share": 0.0, "low": -0.1, "q": 0.9}
    records = [record(number, size, **({} if number < surviving else weak)) for number in range(size)]
    return Scan("model", 3, 4, {"tokens": 99}, records, [], [], {})


@pytest.mark.parametrize(
    ("change", "survives"),
    [({}, True), ({"q": 0.06}, False), ({"q": 0.04}, True), ({"low": 0.09}, False), ({"low": 0.11}, True)],
)
def test_a_neuron_survives_by_chance_and_size(change, survives):
    assert ENTROPY.survives(record(0, 300, **change)) is survives


@pytest.mark.parametrize(
    ("surviving", "verdict"),
    [(3, "supported"), (2, "supported"), (1, "partly supported"), (0, "not supported")],
)
def test_the_verdict_counts_those_that_weights_name(surviving, verdict):
    for judged in made(surviving).verdicts:
        assert judged["verdict"] == verdict
        assert len(judged["named"]) == 3 and len(judged["survive"]) == surviving
        assert f"{surviving} " in judged["found"]


def test_no_verdict_from_few_neurons():
    assert {judged["verdict"] for judged in made(3, size=100).verdicts} == {"not testable here"}


def test_measured_share_ranks_not_weights():
    scan = made(5)
    records = [dict(one) for one in scan.neurons]
    records[4]["mediated_share"] = 0.9
    records[200] |= {"mediated_share": 0.95, "mediated_share_low": 0.9, "mediated_q": 1e-6}
    scan = replace(scan, neurons=records)
    assert [one["neuron"] for one in scan.ranked("entropy")] == [
        4,
        0,
        1,
        2,
        3,
    ]  # 200 does not write into the null space
    assert [one["neuron"] for one in ENTROPY.ranked(records)][:6] == [4, 0, 1, 2, 3, 200]
    with pytest.raises(ValueError, match="'role' must be 'entropy' or 'frequency', not 'other'"):
        scan.ranked("other")
