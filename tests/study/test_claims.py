"""The studies that come with the package: each can be run as it stands, and its verdict can go either way."""

import pytest

from tests.study.made_up import runs
from unsoft.study import default_study, verdict
from unsoft.study.read import default_studies
from unsoft.study.rule import DOES_NOT_HOLD, HOLDS, SCORE

NAMES = list(default_studies())


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
        assert all(rule.on in (SCORE, "head_diversity", *tests) for rule in study.rules)


@pytest.mark.parametrize("name", NAMES)
def test_its_verdict_can_go_either_way(name):
    study = default_study(name)
    for better, wanted in ((0.3, HOLDS), (-0.3, DOES_NOT_HOLD)):
        records = []
        for rule in study.rules:
            sign = 1 if name != "trigger" else -1  # an error: less is better
            more = {"group": rule.group, "higher_is_better": sign > 0}
            score = 0.5 + sign * better
            for label, level in [*((label, 0.5) for label in rule.over), (rule.mechanism, score)]:
                attention = {"head_diversity": [level]}
                records += runs(label, [level] * 5, harder={rule.on: level}, attention=attention, **more)
        found, why = verdict(study.rules, records)
        assert found == wanted, why
