"""Readings against softmax, and the sentences and cards made from them."""

import re

import pytest

from unsoft.lab.compare.conclusion import best_for, sentences, verdict
from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import TEXTS
from unsoft.lab.compare.plan import sections
from unsoft.lab.compare.section import KINDS, ScoreColumn
from unsoft.lab.evidence import VERDICTS, t_interval
from unsoft.lab.report.page import translator


def column(**more):
    def draws(results, label):
        return results.get("draws", label)

    def answer(results, label):
        known = [x for x in draws(results, label) if x is not None]
        return t_interval(known) if known else None

    return ScoreColumn("skill", "skill", "help", answer, unit="points", **{"draws": draws} | more)


def versus(own, softmax, **more):
    answers = [{"name": "draws", "mechanism": k, "rows": v} for k, v in (("cog", own), ("softmax", softmax))]
    subjects = [{"label": "cog", "own": False}]
    return column(**more).cell(Results({"subjects": subjects, "answers": answers}), "cog")["versus"]


@pytest.mark.parametrize(
    "own, softmax, more, reading",
    [
        (
            [3.0, 13.0, 23.0],
            [1.0, 11.1, 20.9],
            {},
            "better",
        ),  # paired: the draws differ far more than the two
        ([3.0, 13.0, 23.0], [1.0, 11.1, 20.9], {"low_is_good": True}, "worse"),
        ([3.0, 13.0, 23.0], [1.0, 11.1, 20.9], {"margin": 5.0}, "same"),  # clear, but too small to matter
        ([3.0, 13.0, 23.0], [23.0, 1.0, 11.0], {}, "same"),
        ([9.0], [1.0], {}, "same"),  # one random draw decides nothing
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], {"is_ratio": True, "noise": 0.1}, "better"),
        ([1.05, 1.06, 1.05], [1.0, 1.0, 1.0], {"is_ratio": True, "noise": 0.1}, "same"),
    ],
)
def test_cells_are_compared_by_paired_draws(own, softmax, more, reading):
    assert versus(own, softmax, **more)["reading"] == reading


def test_a_draw_that_ended_at_the_limit_makes_a_bound():
    found = versus([None, 50.0], [10.0, 11.0], limit=64.0, low_is_good=True)
    assert found["bound"] and found["value"] == pytest.approx((54 + 39) / 2)


def record(*names):
    columns = [
        {"name": "skill", "title": "skill", "unit": "points", "group": "Capability", "need": "do it"},
        {"name": "time", "title": "time", "unit": "× SDPA", "group": "Cost", "need": ""},
    ]
    same = {"section": "s", "aim": "higher", "low_is_good": False, "reference": None}
    columns = [same | one | {"is_ratio": one["name"] == "time"} for one in columns]

    def cells(k):
        skill = {"value": k, "reading": "better" if k > 1 else "worse", "bound": False}
        time = {"value": 1.0, "reading": "same", "bound": False, "low": 0.9, "high": 1.1}
        return {"skill": {"value": k, "versus": skill | {"low": k - 0.5, "high": k + 0.5}}} | {
            "time": {"value": 1.0, "versus": time}
        }

    board = [{"mechanism": name, "cells": cells(float(k))} for k, name in enumerate(names)]
    base = {"mechanism": "softmax", "cells": {"skill": {"value": 0.5}, "time": {"value": 1.0}}}
    return {"columns": columns, "scoreboard": board, "baseline": base, "claims": [], "verdicts": {}}


def test_few_mechanisms_get_a_sentence_each():
    said = sentences(record("a", "b", "c"))
    assert len(said) == 3
    assert said[2] == verdict("c", record("a", "b", "c"))
    assert "better in skill (+2 points, 95 % CI +1.5 to +2.5)" in said[2]
    assert "no clear difference in time" in said[2]


def test_of_many_the_one_that_wins_most_is_named():
    said = sentences(record("a", "b", "c", "d"))
    assert said[0].startswith("c beats softmax most often: better in 1 of 1 quantities")
    assert said[1] == "No mechanism here is clearly better than softmax in time."


def test_costs_of_a_busy_machine_are_no_conclusion():
    busy = record("a", "b", "c", "d") | {"answers": [{"disturbed": True}]}
    for column in busy["columns"]:
        column["need"] = "a need"
    assert [card["column"] for card in best_for(busy)] == ["skill"]
    assert not any("in time" in sentence for sentence in sentences(busy))
    assert "Costs were measured on a busy machine and are left out of this summary." in sentences(busy)


def test_cards_name_the_best_and_who_else_is_better():
    (card,) = best_for(record("a", "b", "c", "d"))
    assert card["mechanism"] == "d" and card["also"] == ["c"] and card["effect"] == "+3 points"
    (card,) = best_for(record("a", "b"))
    assert card["mechanism"] == "" and card["compared"] == 2


def test_the_page_is_translated():
    """Questions, columns, verdicts and claims of every section are in the Chinese file."""
    say = translator(TEXTS["zh"])
    every = sections()
    texts = {text for one in every if one.is_shown for text in (one.title, one.question, one.group)}
    for column in (column for one in every for column in one.columns):
        texts |= {column.title, column.need, column.group, column.help, column.thresholds, column.why}
    texts |= {claim.text for one in every for claim in one.claims} | {*VERDICTS, *KINDS, *KINDS.values()}
    left = [text for text in texts if text and not any("\u4e00" <= c <= "\u9fff" for c in say(text))]
    assert left == []


def test_conclusions_are_translated_with_their_numbers():
    say = translator(TEXTS["zh"])
    for sentence in (*sentences(record("a", "b", "c", "d")), *sentences(record("a"))):
        assert "softmax" not in sentence or say(sentence) != sentence
    said = say("72 falsifiable claims: 34 supported, 24 partly supported and 5 not supported.")
    assert re.findall(r"\d+", said) == ["72", "34", "24", "5"] and "supported" not in said
