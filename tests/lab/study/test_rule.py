"""Verdicts: records that flip each of them."""

from dataclasses import replace

import pytest

from tests.lab.study.made_up import runs
from unsoft.lab.evidence import AT_CEILING, NOT_SUPPORTED, PARTLY, SUPPORTED, UNDECIDED
from unsoft.lab.study import Rule, verdict

RULE = Rule(group="g", mechanism="cog", over=["softmax"], margin=0.1)
SOFTMAX = [0.5, 0.52, 0.48, 0.5, 0.51]


def judged(gains, rule=RULE, base=0.0, **more):
    control = [score + base for score in SOFTMAX]
    scores = [one + gain for one, gain in zip(control, gains, strict=True)]
    return verdict([rule], [*runs("softmax", control, **more), *runs("cog", scores, **more)])


@pytest.mark.parametrize(
    "gains, wanted",
    [
        ([0.2, 0.21, 0.19, 0.2, 0.22], SUPPORTED),
        ([0.1, 0.1, 0.1, 0.1, 0.11], SUPPORTED),
        ([0.02, 0.01, 0.03, 0.02, 0.02], NOT_SUPPORTED),  # surely better, but not by the margin
        ([-0.2, -0.21, -0.19, -0.2, -0.22], NOT_SUPPORTED),
        ([0.8, 0.4, -0.3, -0.2, 0.0], UNDECIDED),  # more than the margin on average, by one seed
        ([0.09, 0.12, 0.05, 0.11, 0.08], UNDECIDED),  # the interval has the margin in it
    ],
)
def test_margin_and_interval_decide(gains, wanted):
    found, why = judged(gains)
    assert found == wanted
    assert f"{sum(gains) / 5:+.3f}" in why and "5 seeds" in why and "no learning-rate sweep" in why


def test_a_negative_margin_asks_not_to_be_worse():
    rule = Rule(group="g", mechanism="cog", over=["softmax"], margin=-0.02)
    assert judged([0.0, -0.01, 0.01, 0.0, 0.0], rule)[0] == SUPPORTED
    assert judged([-0.1, -0.11, -0.1, -0.09, -0.1], rule)[0] == NOT_SUPPORTED
    assert judged([-0.1, 0.1, 0.0, -0.05, 0.06], rule)[0] == UNDECIDED
    assert rule.text == "g: cog must be at most 0.02 worse than softmax on the test"


def test_lower_is_better_turns_the_sign():
    assert judged([-0.2, -0.21, -0.19, -0.2, -0.22], higher_is_better=False)[0] == SUPPORTED
    assert judged([0.2, 0.21, 0.19, 0.2, 0.22], higher_is_better=False)[0] == NOT_SUPPORTED


@pytest.mark.parametrize("gains", [[0.04] * 5, [-0.3, -0.31, -0.3, -0.29, -0.3]])
def test_a_margin_above_what_the_baseline_leaves_decides_nothing(gains):
    """Softmax has 0.952: even a perfect mechanism would not be 0.1 better."""
    outcome, why = judged(gains, base=0.45)
    assert outcome == AT_CEILING and "leaves 0.048" in why
    assert judged(gains, base=0.2)[0] != AT_CEILING


def test_an_error_that_is_nearly_zero_is_a_ceiling():
    more = {"higher_is_better": False, "metric": "relative error", "known": 1e-15}
    assert judged([0.01] * 5, base=-0.45, **more)[0] == AT_CEILING
    assert judged([0.01] * 5, **more)[0] == NOT_SUPPORTED


def test_a_language_model_better_than_trigrams_is_not_at_ceiling():
    more = {"higher_is_better": False, "metric": "bits per byte", "known": 1.8}
    assert judged([-0.2, -0.21, -0.19, -0.2, -0.22], base=1.2, **more)[0] == SUPPORTED
    assert judged([0.01] * 5, base=1.2, **more)[0] == NOT_SUPPORTED


def test_not_being_worse_where_the_baseline_is_perfect_shows_nothing():
    rule = Rule(group="g", mechanism="cog", over=["softmax"], margin=-0.02)
    perfect = runs("softmax", [1.0] * 5)
    assert verdict([rule], [*perfect, *runs("cog", [1.0] * 5)])[0] == AT_CEILING
    assert verdict([rule], [*perfect, *runs("cog", [0.99, 1.0, 1.0, 0.99, 1.0])])[0] == AT_CEILING
    assert verdict([rule], [*perfect, *runs("cog", [0.9] * 5)])[0] == NOT_SUPPORTED, "harm is seen"
    assert verdict([rule], [*runs("softmax", [0.9] * 5), *runs("cog", [0.9] * 5)])[0] == SUPPORTED


def test_a_claim_with_one_rule_at_ceiling_is_partly_supported():
    perfect = {"over": ["sinh"], "margin": 0.1, "group": "g", "mechanism": "cog"}
    records = [*runs("softmax", SOFTMAX), *runs("cog", [0.9] * 5), *runs("sinh", [0.99] * 5)]
    assert verdict([RULE, Rule(**perfect)], records)[0] == PARTLY
    assert verdict([Rule(**perfect)], records)[0] == AT_CEILING
    both = Rule(group="g", mechanism="cog", over=["softmax", "sinh"], margin=0.1)
    assert verdict([both], records)[0] == AT_CEILING, "a control that is perfect cannot be beaten"


def test_every_control_must_be_beaten():
    rule = Rule(group="g", mechanism="cog", over=["softmax", "softmax ×2 heads"], margin=0.1)
    records = [*runs("softmax", SOFTMAX), *runs("cog", [0.9] * 5)]
    found, why = verdict([rule], records)
    assert found == UNDECIDED and "no result of softmax ×2 heads" in why
    assert verdict([rule], [*records, *runs("softmax ×2 heads", [0.6] * 5)])[0] == SUPPORTED
    assert verdict([rule], [*records, *runs("softmax ×2 heads", [0.85] * 5)])[0] == NOT_SUPPORTED


def test_few_seeds_decide_nothing():
    records = [*runs("softmax", SOFTMAX[:2]), *runs("cog", [0.9, 0.9])]
    assert verdict([RULE], records)[0] == UNDECIDED


def test_a_rule_can_be_about_a_harder_test():
    rule = Rule(group="g", mechanism="cog", over=["softmax"], margin=0.1, on="repeats=64")
    same = {"softmax": 0.5, "cog": 0.9}
    records = [
        run for name, score in same.items() for run in runs(name, SOFTMAX, harder={"repeats=64": score})
    ]
    assert verdict([rule], records)[0] == SUPPORTED and verdict([RULE], records)[0] == NOT_SUPPORTED
    assert verdict([rule], [*runs("softmax", SOFTMAX), *runs("cog", SOFTMAX)])[0] == UNDECIDED


def test_all_rules_of_a_claim_must_hold():
    records = [*runs("softmax", SOFTMAX), *runs("cog", [0.9] * 5), *runs("sinh", [0.5] * 5)]
    other = Rule(group="g", mechanism="sinh", over=["softmax"], margin=0.1)
    assert verdict([RULE], records)[0] == SUPPORTED
    assert verdict([RULE, other], records)[0] == NOT_SUPPORTED


def test_a_rule_can_be_about_what_attention_does():
    """More is more there, also on a task whose score is an error."""
    rule = Rule(group="g", mechanism="cog", over=["softmax"], margin=0.1, on="head_diversity")
    assert rule.text == "g: cog must have at least 0.1 more head_diversity than softmax"
    less = Rule(group="g", mechanism="cog", over=["softmax"], margin=-0.1, on="head_diversity")
    assert less.text == "g: cog must have at most 0.1 less head_diversity than softmax"
    for better in (True, False):
        apart = [
            run
            for name, layers in (("softmax", [0.2, 0.2]), ("cog", [0.3, 0.7]))
            for run in runs(name, SOFTMAX, attention={"head_diversity": layers}, higher_is_better=better)
        ]
        found, why = verdict([rule], apart)
        assert found == SUPPORTED and "+0.300" in why


BOUND = Rule(group="g", mechanism="softpick", over=["softmax"], on="first_token", at_most=0.05)


@pytest.mark.parametrize(
    "softpick, softmax, wanted",
    [
        ([0.01, 0.02, 0.015], [0.2, 0.25, 0.22], SUPPORTED),
        ([0.09, 0.1, 0.11], [0.2, 0.25, 0.22], NOT_SUPPORTED),
        ([0.04, 0.05, 0.07], [0.2, 0.25, 0.22], UNDECIDED),
        ([0.01, 0.02, 0.015], [0.03, 0.04, 0.035], AT_CEILING),  # softmax has no sink either
        ([0.09, 0.1, 0.11], [0.03, 0.04, 0.035], NOT_SUPPORTED),
        ([0.01, 0.02], [0.2, 0.25], UNDECIDED),
    ],
)
def test_a_bound_judges_the_mechanism_itself(softpick, softmax, wanted):
    records = [
        replace(run, attention={"first_token": [share, share]})
        for name, shares in (("softpick", softpick), ("softmax", softmax))
        for run, share in zip(runs(name, [0.5] * len(shares)), shares, strict=True)
    ]
    assert verdict([BOUND], records)[0] == wanted


def test_stored_rules_without_a_bound_stay_as_they_were():
    """A store compares them with those of the study, and was perhaps written before bounds existed."""
    assert set(RULE.to_dict()) == {"group", "mechanism", "over", "margin", "on"}
    assert Rule(**BOUND.to_dict()) == BOUND
