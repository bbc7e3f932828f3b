"""Numbers: intervals against scipy, paired differences, room above a baseline, the choice of a rate."""

import math

import numpy
import pytest
from scipy import stats

from tests.lab.study.made_up import runs
from unsoft.lab.study import Rule, summarise, verdict
from unsoft.lab.study.summary import best_point, difference, room_above


def test_differences_are_paired_by_seed():
    scores = [0.5, 0.6, 0.9, 0.2]
    gains = [0.1, 0.2, 0.1, 0.2]
    better = runs("cog", [a + b for a, b in zip(scores, gains, strict=True)])
    one, other = summarise([*runs("softmax", scores), *better])
    assert other.difference.mean == pytest.approx(0.15)
    low, high = stats.t.interval(0.95, 3, numpy.mean(gains), stats.sem(gains))
    assert (other.difference.low, other.difference.high) == pytest.approx((low, high), rel=1e-5)
    assert other.difference.low > 0 > other.low - one.high  # unpaired it could not be told
    (_, fewer) = summarise([*runs("softmax", scores), *better[:2]])
    assert fewer.difference.seeds == 2


def test_intervals_stay_within_what_is_possible():
    """Student's t alone would give an accuracy of 1.3, an error of -0.2 and a difference of 1.3."""
    accuracy, error = [0.2, 0.9, 1.0], [0.0, 0.1, 0.4]
    (found,) = summarise(runs("cog", accuracy))
    assert found.high == 1.0 and 0.0 <= found.low < found.mean
    (found,) = summarise(runs("cog", error, higher_is_better=False, metric="relative error"))
    assert found.low == 0.0 and found.high > 0.5
    zero, one = summarise([*runs("softmax", [0.0] * 3), *runs("cog", accuracy)])
    assert difference(one.runs, zero.runs).high == 1.0


@pytest.mark.parametrize(
    "more, scores, wanted",
    [
        ({}, [0.9, 1.0], 0.05),
        ({"known": 0.9}, [0.9, 1.0], 0.05),  # no solution is known that gets more, but accuracy has a bound
        ({"higher_is_better": False, "metric": "relative error"}, [0.1, 0.3], 0.2),
        # Trigrams are no optimum.
        ({"higher_is_better": False, "metric": "bits per byte", "known": 1.5}, [2.0, 2.0], 2.0),
        ({"metric": "reward", "known": 7.0}, [2.0, 4.0], 4.0),
        ({"metric": "reward"}, [2.0, 4.0], None),
    ],
)
def test_room_is_what_the_baseline_leaves(more, scores, wanted):
    (found,) = summarise(runs("softmax", scores, **more))
    assert room_above(found) == (wanted if wanted is None else pytest.approx(wanted))


def test_room_of_harder_tests_and_of_attention():
    more = {"harder": {"crowd=9": 0.8}, "attention": {"head_diversity": [0.4, 0.6]}}
    (found,) = summarise(runs("softmax", [0.1, 0.1], higher_is_better=False, metric="relative error", **more))
    assert room_above(found, "head_diversity") == pytest.approx(1.5)
    (found,) = summarise(runs("softmax", [0.1, 0.1], **more))
    assert room_above(found, "crowd=9") == pytest.approx(0.2)
    assert room_above(found, "first_token") is None, "not measured"


def test_lower_scores_can_be_the_better_ones():
    one, other = summarise(
        [
            *runs("softmax", [0.4, 0.5], higher_is_better=False),
            *runs("cog", [0.1, 0.2], higher_is_better=False),
        ]
    )
    assert difference(other.runs, one.runs).mean == pytest.approx(0.3)
    swept = [
        *runs("cog", [0.4], lr=0.1, higher_is_better=False),
        *runs("cog", [0.2], lr=0.2, higher_is_better=False),
    ]
    assert best_point(swept) == "lr=0.2"


def test_the_rate_is_chosen_on_the_seeds_of_the_sweep():
    """The chosen rate has more seeds than the others, which must not count in the choice."""
    swept = {"sweep": "tuned", "swept": True}
    low = runs("cog", [0.9], validation=0.6, lr=0.1, **swept)
    high = runs("cog", [0.1], validation=0.7, lr=0.3, **swept)
    more = [run for run in runs("cog", [0, 0.2, 0.3], validation=0.0, lr=0.3, sweep="tuned") if run.seed]
    (found,) = summarise([*low, *high, *more])
    assert (found.point, found.seeds) == ("lr=0.3", 3) and found.mean == pytest.approx(0.2)
    assert found.rates == {"lr=0.1": 0.6, "lr=0.3": 0.7}
    assert "swept on the first seeds" in found.sweep_words


def at_two_rates(choose_on):
    """The smaller rate is the better one in training's crowd, the larger one in a crowd of 128."""
    more = {"sweep": "tuned", "swept": True, "choose_on": choose_on}
    return [
        *runs("cog", [0.99], validation=1.0, lr=0.1, validation_by={"crowd=128": 0.1}, **more),
        *runs("cog", [0.98], validation=0.9, lr=0.3, validation_by={"crowd=128": 0.9}, **more),
    ]


def test_a_study_can_choose_rates_where_it_judges():
    (own,) = summarise(at_two_rates(""))
    (judged,) = summarise(at_two_rates("crowd=128"))
    assert (own.point, judged.point) == ("lr=0.1", "lr=0.3")
    assert own.rates == {"lr=0.1": 1.0, "lr=0.3": 0.9} and judged.rates == {"lr=0.1": 0.1, "lr=0.3": 0.9}
    assert judged.sweep_words.endswith("the best by validation with crowd=128 run on all")
    assert "crowd" not in own.sweep_words
    with pytest.raises(ValueError, match="g cog seed 0 lr=0.1 has no validation score with crowd=64"):
        summarise(at_two_rates("crowd=64"))


@pytest.mark.parametrize(
    "best, wanted, words",
    [(0.1, "smallest", "0.1 (smallest tried)"), (0.2, "", "0.2"), (0.3, "largest", "0.3 (largest tried)")],
)
def test_a_best_rate_at_the_edge_of_the_sweep_is_said(best, wanted, words):
    swept = [run for lr in (0.1, 0.2, 0.3) for run in runs("cog", [lr == best], lr=lr, swept=True)]
    (found,) = summarise(swept)
    assert (found.edge, found.rate_words) == (wanted, words)
    _, why = verdict([Rule(group="g", mechanism="cog", over=["softmax"], margin=0)], swept)
    assert (f"the {wanted} rate tried was the best for cog" in why) if wanted else "rate tried" not in why


def test_a_rate_that_failed_was_tried():
    failed = runs("cog", [0.0], lr=0.3, swept=True, status="failed")
    assert summarise([*runs("cog", [1.0], lr=0.2), *runs("cog", [0.5], lr=0.1), *failed])[0].edge == ""
    assert summarise(runs("cog", [1.0, 0.9]))[0].edge == "", "one rate is no sweep"


def test_among_equal_rates_the_one_that_learned_earlier_wins_then_the_smaller():
    early = runs("cog", [1.0], lr=0.3, curve=[[1, 0.9], [2, 1.0]])
    late = runs("cog", [1.0], lr=0.1, curve=[[1, 0.2], [2, 1.0]])
    assert best_point([*late, *early]) == "lr=0.3"
    assert best_point([*runs("cog", [1.0], lr=0.3), *runs("cog", [1.0], lr=0.1)]) == "lr=0.1"


def test_while_a_sweep_is_not_over_nothing_is_reported():
    over = runs("cog", [0.9], lr=0.1, swept=True)
    (found,) = summarise([*over, *runs("cog", [0.1], lr=0.3, swept=True, status="running")])
    assert found.mean is None and found.seeds == 0


def test_harder_tests_and_learned_parameters():
    learned = {"model.layers.0.unsoft.log_t": [math.log(2.0)], "model.layers.0.unsoft.beta": [1.0, 3.0]}
    made = [
        run
        for seed, score in enumerate([0.2, 0.4])
        for run in runs("magnitude", [0.5] * 2, harder={"repeats=64": score}, learned=learned)
        if run.seed == seed
    ]
    (found,) = summarise(made)
    assert found.harder["repeats=64"] == pytest.approx((0.3, 0.0, 1.0)), "two draws say nothing"
    assert found.learned["t"] == pytest.approx((2.0, 2.0, 2.0)) and found.learned["beta"] == (2.0, 1.0, 3.0)


def test_without_a_sweep_it_says_so():
    (found,) = summarise(runs("cog", [0.5, 0.6]))
    assert found.sweep_words == "no learning-rate sweep"
