"""From a formula to a paragraph; the measurements themselves are tested with the comparison."""

import json

import pytest

import unsoft
from unsoft.errors import FormulaError
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.study.record import Record
from unsoft.lab.study.summary import Summaries, summarise
from unsoft.lab.trial import Trial, closest_to, read_subject
from unsoft.modules.registry import resolve


@pytest.mark.parametrize(
    ("text", "normalise", "row_sum"),
    [
        ("tanh(s)*exp(abs(s))", "abs", "in [-1, 1]"),
        ("exp(2*s)", "sum", "1"),
        ("tanh(s)", "count", "in [-1, 1]"),
        ("sigmoid(s)**2", "count", "<= 1"),
        ("max(s, 0)/n", "not normalised", "free"),
        ("exp(tau*s); tau=2", "sum", "1"),
        ("name=mine; weight=tanh(s)", "count", "in [-1, 1]"),
    ],
)
def test_a_normaliser_is_chosen_and_reported(text, normalise, row_sum):
    subject = read_subject(text)
    assert normalise in subject.note and str(subject.candidate.formula.properties.row_sum) == row_sum
    # Worker processes and files get the mechanism as text.
    assert resolve(subject.candidate.mechanism) == subject.candidate.formula


def test_names_formulas_and_objects_are_told_apart():
    assert read_subject("magnitude+cog").candidate.mechanism == "magnitude+cog"
    assert read_subject("polynomial(3)").candidate.formula.weight == resolve("polynomial(3)").weight
    own = unsoft.Formula("tanh(s)/n", name="mine")
    assert read_subject(own).candidate.label == "mine"
    assert read_subject("s", normalise="abs").candidate.formula.mass is not None
    with pytest.raises(ValueError, match="did you mean 'cog'"):
        read_subject("cogg")
    with pytest.raises(ValueError, match="softmax is the baseline"):
        read_subject("softmax")
    with pytest.raises(FormulaError, match="the text is empty"):
        read_subject("  ")


def test_the_closest_relative_has_the_most_similar_weights():
    assert closest_to(read_subject("sign(s)*exp(abs(s))*1.01").candidate) == "cog"
    assert closest_to(Candidate("cog", "cog")) == "sinh"


def column(name, *, low_is_good=False, unit="d′"):
    return {"name": name, "title": f"{name}?", "unit": unit, "noise": 0.01, "low_is_good": low_is_good}


def trial(scores=None, spread=0.001, **changes):
    """A trial of "mine" with three columns and, with ``scores``, training runs of five seeds, each
    ``spread`` better than the one before."""
    cells = {
        "softmax": {"opposed": (0.1, 0.2), "needle": (7.0, 7.4), "training": (1.0, 1.0)},
        "mine": {"opposed": (1.2, 1.4), "needle": (7.1, 7.3), "training": (1.04, 1.04)},
    }
    board = [
        {
            "mechanism": name,
            "cells": {
                c: {"value": sum(ends) / 2, "low": ends[0], "high": ends[1]} for c, ends in own.items()
            },
        }
        for name, own in cells.items()
    ]
    for name, reading in (("opposed", "better"), ("needle", "same")):
        board[1]["cells"][name]["versus"] = {"reading": reading, "text": "+1.2 d′, 95 % CI +1.1 to +1.3"}
    columns = [column("opposed"), column("needle", low_is_good=True), column("training", low_is_good=True)]
    checks = {"name": "checks", "mechanism": "mine", "rows": [{"comparisons": 9, "failed": []}]}
    record = {"subjects": [{"label": name, "own": False} for name in cells], "answers": [checks]}
    checks |= {"disturbed": False, "problem": ""}
    runs = [
        Record(
            **{"study": "try", "group": task, "task": task, "mechanism": name, "key": f"{task}{name}{seed}"},
            **{"seed": seed, "lr": 0.1, "point": "lr=0.1", "status": "done", "metric": "accuracy"},
            score=score + spread * seed * (name == "mine"),
            validation=score,
        )
        for task, both in (scores or {}).items()
        for name, score in zip(("softmax", "mine"), both, strict=True)
        for seed in range(5)
    ]
    subject = read_subject("tanh(s)*exp(abs(s))", name="mine")
    record |= {"scoreboard": board, "columns": columns}
    return Trial(subject, "cog", record, summarise(runs) if runs else Summaries(), **changes)


def test_the_paragraph_without_training_names_the_command():
    text = trial().verdict
    assert text == (
        "mine vs softmax: better at opposed (+1.2 d′, 95 % CI +1.1 to +1.3); equal at needle; 4 % slower in"
        " training; closest relative: cog. Not trained yet: unsoft try 'tanh(s)*exp(abs(s))' --train."
    )
    assert trial().checks == "checks: 9 comparisons, all pass"


def test_the_paragraph_with_training_gives_differences_and_what_is_undecided():
    text = trial(
        {"opposition": (0.6, 0.93), "recall": (0.5, 0.5), "focus": (0.995, 0.99), "census": (0.8, 0.6)}
    ).verdict
    assert "trained, better at opposition (+0.33, 95 % CI +0.33 to +0.33)" in text
    assert "equal at recall" in text and "worse at census (−0.20" in text
    assert "undecided: focus (at ceiling)" in text and "--train" not in text
    stopped = trial({"recall": (0.5, 0.5)}, finished=False, runs=(4, 63)).verdict
    assert stopped.endswith("Interrupted: 4 of 63 training runs are done.")


def test_failed_checks_are_listed_once_and_mentioned_in_the_paragraph():
    failed = trial()
    failed.record["answers"][0]["rows"][0]["failed"] = ["sizes: same (auto, tiled): error 2"]
    assert failed.checks == "checks: 9 comparisons, 1 failed\nsizes: same (auto, tiled): error 2"
    assert failed.verdict.startswith("Numerical checks failed")


def test_a_difference_whose_interval_contains_0_is_undecided():
    """The five seeds gain -0.1, 0, 0.1, 0.2 and 0.3, or lose as much."""
    gains = trial({"recall": (0.5, 0.4)}, spread=0.1).verdict
    assert "undecided: recall (+0.10, 95 % CI −0.10 to +0.30)" in gains and "trained" not in gains
    losses = trial({"recall": (0.5, 0.6)}, spread=-0.1).verdict
    assert "undecided: recall (−0.10, 95 % CI −0.30 to +0.10)" in losses and "trained" not in losses


def test_results_have_tables_for_notebooks():
    result = trial({"recall": (0.5, 0.5)})
    assert [row["mechanism"] for row in result.rows()] == ["softmax", "mine"]
    assert result.rows()[0]["trained recall"] == 0.5 and "<td>mine</td>" in result._repr_html_()
    chart = json.loads(result.plot().to_json())
    assert {row["mechanism"] for row in chart["data"]["values"]} == {"mine", "softmax", "cog"}
    assert result.trained.rows()[0]["task"] == "recall" and "facet" in result.trained.plot().to_json()


@pytest.mark.slow
def test_an_idea_becomes_a_page_and_a_verdict(tmp_path):
    result = unsoft.lab.try_formula(
        "tanh(s)*exp(abs(s))",
        name="gentle",
        train=True,
        tasks=["focus"],
        seeds=3,
        settings={"steps": 10},
        out=tmp_path,
    )
    assert "opposed" in result.verdict and result.finished and "all pass" in result.checks
    assert result.verdict.split(":")[0] in (tmp_path / "index.html").read_text()
