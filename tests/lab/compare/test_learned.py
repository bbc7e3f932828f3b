"""What gates have learned, from records by hand: each verdict can go either way."""

import math
from dataclasses import replace

import pytest

from tests.lab.compare.test_training import results
from unsoft.lab.compare.sections import learned
from unsoft.lab.study.record import Record

CLAIMS = {claim.name: claim for claim in learned.SECTION.claims}
STRICT, PLAIN = (6.0, -5.5), (1.0, 0.0)
"""beta and gamma of a gate that makes one unit of a crowd, and as they start."""


def runs(task, radii, gate=STRICT, gain=0.2, rates=("lr=0.01", "lr=0.003"), seeds=4, **more):
    """A gate whose t is ``radii`` in turn, at the first rate for every seed and at the others once."""
    places = [(rates[0], seed) for seed in range(seeds)] + [(rate, 0) for rate in rates[1:]]
    common = {"study": "mine", "group": task, "task": task, "status": "done", "sweep": "tuned"} | more
    found = []
    for number, (point, seed) in enumerate(places):
        swept = seed == 0
        for name, score in (("softmax", 0.7), ("a gate", 0.7 + gain)):
            gated = {"t": radii[number % len(radii)], "beta": gate[0], "gamma": gate[1]}
            mine = {} if name == "softmax" else {f"layers.0.{key}": [x] for key, x in gated.items()}
            found.append(
                Record(
                    **common,
                    mechanism=name,
                    seed=seed,
                    lr=float(point[3:]),
                    point=point,
                    swept=swept,
                    score=score + 0.001 * seed,
                    validation=score + (0.001 if point == rates[0] else 0.0),
                    learned=mine,
                    key=f"{task}{name}{number}",
                )
            )
    return found


def verdict(name, tmp_path, *records):
    return CLAIMS[name].judge(results(tmp_path, [run for some in records for run in some]))


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([8.0, 9.0], [1.0, 1.5], "supported"),
        ([8.0, 9.0], [1.0, 3.0], "partly supported"),
        ([8.0, 20.0], [1.0, 3.0], "not supported"),
    ],
)
def test_equally_good_runs_must_agree_on_the_radius(tmp_path, first, second, wanted):
    found, why = verdict("learned-radius", tmp_path, runs("census", first), runs("needle", second))
    assert found == wanted and f"t from {first[0]:g} to {first[1]:g} in 5 runs" in why


def test_a_radius_is_not_decided_by_one_rate_or_two_seeds(tmp_path):
    assert verdict("learned-radius", tmp_path, runs("census", [8.0], rates=("lr=0.01",)))[0] == "undecided"
    assert verdict("learned-radius", tmp_path, runs("census", [8.0], seeds=2))[0] == "undecided"
    *others, last = runs("census", [8.0])
    worse = replace(last, validation=0.1, learned={"t": [1e3], "beta": [1.0], "gamma": [1.0]})
    found = verdict("learned-radius", tmp_path, [*others, worse])
    assert found[0] == "undecided", "a rate that is worse says nothing"


@pytest.mark.parametrize(
    ("with_copies", "without", "wanted"),
    [
        (STRICT, PLAIN, "supported"),
        (STRICT, STRICT, "partly supported"),
        (PLAIN, PLAIN, "partly supported"),
        (PLAIN, STRICT, "not supported"),
    ],
)
def test_trust_must_follow_what_helps(tmp_path, with_copies, without, wanted):
    found, why = verdict(
        "learned-trust", tmp_path, runs("a", [1.0], with_copies, 0.2), runs("b", [1.0], without, 0.0)
    )
    assert found == wanted and "gain over softmax +0.200" in why and "+0.000" in why


@pytest.mark.parametrize("gain", [0.2, 0.0])
def test_trust_needs_tasks_of_both_kinds(tmp_path, gain):
    found, why = verdict("learned-trust", tmp_path, runs("a", [1.0], gain=gain))
    assert found == "undecided" and ("does not help" in why) == (gain > 0)


def test_tasks_that_softmax_solves_do_not_count(tmp_path):
    """There no gate can help, whether or not it trusts geometry."""
    solved = [replace(run, score=1.0, metric="accuracy") for run in runs("b", [1.0], STRICT, 0.0)]
    found, why = verdict("learned-trust", tmp_path, runs("a", [1.0], STRICT, 0.2), solved)
    assert found == "partly supported" and "b: 50 clones" in why and "at ceiling" in why
    assert verdict("learned-trust", tmp_path, runs("a", [1.0], PLAIN, 0.2), solved)[0] == "undecided"
    assert verdict("learned-trust", tmp_path, solved)[0] == "at ceiling"


def test_nothing_on_record_is_not_run(tmp_path):
    for name in CLAIMS:
        assert verdict(name, tmp_path, [run for run in runs("a", [1.0]) if not run.learned])[0] == "not run"


def test_the_table_shows_what_was_learned(tmp_path):
    (table,) = learned.SECTION.tables
    (part,) = table(results(tmp_path, runs("census", [8.0, 2.0])))
    assert [row["task"] for row in part.rows] == ["census"] and "5 (2 to 8)" in part.rows[0]["t"]
    assert not list(table(results(tmp_path, runs("census", [8.0])[::2])))


def test_a_crowd_counts_as_its_gates_say():
    """By the definition: fifty gates of weight 1/(50 + eps) over one of weight 1/(1 + eps)."""
    gate = [1 / (1 + math.exp(-(6.0 * w - 5.5))) for w in (1 / 50.1, 1 / 1.1)]
    assert learned.counted(6.0, -5.5) == pytest.approx(50 * gate[0] / gate[1])
