"""The studies that come with the package: each can be run as it stands, and its verdict can go either way."""

import pytest

from tests.lab.study.made_up import runs
from unsoft.lab.evidence import NOT_SUPPORTED, SUPPORTED
from unsoft.lab.study import default_study, verdict
from unsoft.lab.study.read import default_studies
from unsoft.lab.study.rule import SCORE

NAMES = list(default_studies())
ATTENTION = ("head_diversity", "first_token_at_rest")
ERRORS = ("trigger", "sink")
"""Studies of a task whose score is an error: less is better."""


def test_every_task_that_a_claim_is_about_has_a_study():
    assert {"census", "deletion", "focus", "needle", "opposition", "recall", "trigger"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_default_study_is_complete(name):
    study = default_study(name).with_sizes()
    assert study.source and study.claim.endswith(".") and study.rules
    assert len(study.seeds) == 5 and len(study.points) >= 3 and study.sweep != "none"
    for group in study.groups:
        labels = {variant.label for variant in group.variants}
        assert {"softmax", "softmax1", "gated+softmax", "softmax ×2 heads", "softmax ×2 layers"} <= labels
        made = next(study.runs()).spec.make_task()
        tests = [f"{made.difficulty}={value}" for value in made.difficulties()]
        assert all(rule.on in (SCORE, *ATTENTION, *tests) for rule in study.rules)


@pytest.mark.parametrize("name, rule", [(name, rule) for name in NAMES for rule in default_study(name).rules])
@pytest.mark.parametrize("better, wanted", [(0.6, SUPPORTED), (-0.6, NOT_SUPPORTED)])
def test_its_verdict_can_go_either_way(name, rule, better, wanted):
    """Attention is what it is, also where the score is an error; the score alone must not decide about it."""
    sign = -1 if name in ERRORS and rule.on not in ATTENTION else 1
    more = {"group": rule.group, "higher_is_better": name not in ERRORS}
    records = []
    for label, level in [*((label, 0.5) for label in rule.over), (rule.mechanism, 0.5 + sign * better)]:
        score = level if rule.on == SCORE else 0.5
        measured = {"attention": {rule.on: [level]}} if rule.on in ATTENTION else {"harder": {rule.on: level}}
        records += runs(label, [score] * 5, **more, **measured)
    found, why = verdict([rule], records)
    assert found == wanted, why


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_chosen_where_the_rule_judges(name):
    """A rate that is as good as others in training's difficulty may be much worse at the one that counts."""
    study = default_study(name)
    for rule in study.rules:
        group = next(group for group in study.groups if group.name == rule.group)
        assert group.choose_on == (rule.on if "=" in rule.on else "")
