"""The studies that come with the package: each can be run as it stands, and its verdict can go either way."""

from dataclasses import replace

import pytest

from tests.lab.study.made_up import runs
from unsoft.lab.evidence import AT_CEILING, NOT_SUPPORTED, SUPPORTED
from unsoft.lab.records import PACKAGED
from unsoft.lab.study import default_study, read_records, summarise, verdict
from unsoft.lab.study.read import default_studies
from unsoft.lab.study.summary import SCORE, STATISTICS, value_of

NAMES = list(default_studies())
RULES = [(name, rule) for name in NAMES for rule in default_study(name).rules]
RECORDS = read_records(PACKAGED)
RECORDED = {run.study for run in RECORDS}
ERRORS = ("trigger", "sink", *(name for name in NAMES if name.startswith("language")))
"""Studies of a task whose score is an error: less is better."""


def test_every_task_that_a_claim_is_about_has_a_study():
    assert {"census", "deletion", "focus", "needle", "opposition", "recall", "trigger"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_default_study_is_complete(name):
    study = default_study(name).with_sizes()
    assert study.source and study.claim.endswith(".") and study.rules
    seeds = len(study.seeds) - study.tuning_seeds if study.sweep == "short" else len(study.seeds)
    assert seeds >= (3 if name.startswith("language") else 5)
    assert len(study.points) >= 3 and study.sweep != "none"
    for group in study.groups:
        labels = {variant.label for variant in group.variants}
        assert "softmax" in labels
        made = next(study.runs()).spec.make_task()
        tests = [*(f"{made.difficulty}={value}" for value in made.difficulties()), *made.further()]
        assert all(rule.on in (SCORE, *STATISTICS, *tests) for rule in study.rules)


@pytest.mark.parametrize("name, rule", RULES)
@pytest.mark.parametrize("better, wanted", [(0.6, SUPPORTED), (-0.6, NOT_SUPPORTED)])
def test_its_verdict_can_go_either_way(name, rule, better, wanted):
    """Attention is what it is, also where the score is an error; the score alone must not decide about it."""
    less = rule.at_most is not None or (name in ERRORS and rule.on not in STATISTICS)
    sign = -1 if less else 1
    more = {"group": rule.group, "higher_is_better": name not in ERRORS, "metric": "accuracy"}
    more |= {"metric": "relative error"} if name in ERRORS else {}
    records = []
    for label, level in [
        *((label, 0.5) for label in rule.over),
        (rule.mechanism, 0.5 + sign * better),
    ]:
        score = level if rule.on == SCORE else 0.5
        measured = (
            {"attention": {rule.on: [level]}} if rule.on in STATISTICS else {"harder": {rule.on: level}}
        )
        records += runs(label, [score] * 5, **more, **measured)
    found, why = verdict([rule], records)
    assert found == wanted, why


def at_recorded_baseline(name, rule, wanted):
    """Outcome if the mechanism of a rule had ``wanted`` on every seed (None: what the first baseline has)."""
    records = [run for run in RECORDS if run.study == name]
    made = [run for one in summarise(records) if one.mechanism in rule.over for run in one.runs]
    for run in [run for run in made if run.mechanism == rule.over[0]]:
        level = value_of(run, rule.on) if wanted is None else wanted
        values = {
            "score": level if rule.on == SCORE else run.score,
            "harder": {rule.on: level},
            "attention": {rule.on: [level]} if rule.on in STATISTICS else {},
        }
        made.append(replace(run, mechanism=rule.mechanism, key=f"{rule.mechanism} {run.key}", **values))
    assert all(value_of(run, rule.on) is not None for run in made)
    return verdict([rule], made)[0]


@pytest.mark.parametrize("name, rule", [(name, rule) for name, rule in RULES if name in RECORDED])
def test_at_the_recorded_baseline_a_rule_can_pass_and_fail_or_is_at_ceiling(name, rule):
    """A perfect mechanism passes and the worst one fails, unless the recorded verdict says that it cannot.

    To be not worse, it is enough to be as good as the baseline.
    """
    higher = name not in ERRORS or rule.on in STATISTICS
    best, worst = (1.0, 0.0) if higher else (0.0, 1.0)
    passes = at_recorded_baseline(name, rule, best if rule.margin > 0 else None)
    fails = at_recorded_baseline(name, rule, worst)
    records = [run for run in RECORDS if run.study == name]
    if verdict([rule], records)[0] == AT_CEILING:
        assert passes == AT_CEILING and default_study(name).limits
    else:
        assert (passes, fails) == (SUPPORTED, NOT_SUPPORTED)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("language")])
def test_rates_are_chosen_where_the_rule_judges(name):
    """A rate that is as good as others in training's difficulty may be much worse at the one that counts."""
    study = default_study(name)
    for rule in study.rules:
        group = next(group for group in study.groups if group.name == rule.group)
        assert group.choose_on == (rule.on if "=" in rule.on else "")
