"""The page of a store: what it says, and that it works in a real browser."""

import csv
import json
import re
from dataclasses import replace

import pytest

from tests.lab.study.made_up import runs
from unsoft.lab.report.figure import vega_script
from unsoft.lab.study import make_study
from unsoft.lab.study import page as study_pages
from unsoft.lab.study.page import figures_of, study_page, write_report
from unsoft.lab.study.summary import summarise

GROUP = {"name": "g", "task": "copy", "mechanisms": ["softmax", "cog", "sinh"]}
RULE = {"mechanism": "cog", "over": "softmax", "margin": 0.1}


def made(**changes):
    return make_study({"name": "s", "source": "Su 2023", "claim": "It helps.", "group": [GROUP], **changes})


def records(cog=0.9):
    more = {
        "known": 1.0,
        "chance": 0.25,
        "harder": {"length=3": 0.9, "length=6": 0.8},
        "curve": [[5, 0.3], [10, 0.5]],
        "seconds_per_step": 0.01,
        "swept": True,
        "sweep": "full",
    }
    more["attention"] = {"first_token": [0.25, 0.75]}
    learned = {"a.log_t": [0.0], "a.beta": [2.5]}
    return [
        *runs("softmax", [0.5, 0.6, 0.55], **more),
        *runs("softmax", [0.3, 0.3, 0.3], lr=0.3, **more),
        *runs("cog", [cog, cog + 0.01, cog - 0.01], learned=learned, **more),
        *runs("sinh", [0.1], status="failed", error="<b>DivergenceError</b>: nan"),
    ]


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("<main ")[2].partition("</main>")[0]))


def test_the_page_says_what_was_found():
    page = study_page([made(rule=[RULE])], records(), "")
    text = text_of(page)
    assert "g: cog must beat softmax by 0.1 on the test" in text and "supported" in text
    assert (
        "Supported: It helps." in text
        and "over softmax +0.350" in text
        and "every seed at every rate" in text
    )
    assert "t 1 (1 to 1), beta 2.5 (2.5 to 2.5)" in text
    assert "first token 0.500" in text
    assert "Not finished: sinh" in text and "&lt;b&gt;DivergenceError" in page
    assert "0.1 (smallest tried)" in text and "The smallest rate tried was the best for softmax" in text
    for kind in ("curves", "rates", "difficulty", "cost"):
        assert f'data-figure="s-g-{kind}"' in page
    other = text_of(study_page([made(rule=[RULE])], records(cog=0.5), ""))
    assert "not supported over softmax" not in other and "not supported" in other


def test_without_a_sweep_every_table_says_so():
    page = study_page([made(sweep="none")], runs("softmax", [0.5, 0.6]), "")
    assert "g (no learning-rate sweep)" in text_of(page)


def test_nothing_finished_is_said():
    page = text_of(study_page([made()], [], ""))
    assert "No sweep of this part is over yet." in page
    assert "Mechanisms in the charts" not in page and "machine" not in page and "test. ." not in page


def test_the_time_of_parallel_workers_is_called_what_it_is():
    page = text_of(study_page([made()], runs("softmax", [0.5, 0.6], wall=5400.0), ""))
    assert "2 of 2 runs are done, 3 hours of wall time, summed over all workers." in page


def test_all_failed_is_said_with_the_whole_error():
    error = "DivergenceError: train: the loss is nan at step 3; a smaller learning rate than 1e+30 may help"
    page = text_of(study_page([made()], runs("softmax", [0.1], status="failed", error=error), ""))
    assert "All runs of this part failed" in page and error in page and "No sweep" not in page


def test_scores_that_are_all_the_same_have_an_axis():
    one = runs("softmax", [0.5], seconds_per_step=0.01, curve=[[5, 0.5]])
    page = study_page([made(sweep="none")], one, "")
    assert page.count('"domain":[0.45,0.55]') + page.count('"domain": [0.45, 0.55]') >= 2


def test_what_a_rule_is_about_is_among_what_is_shown_at_first():
    labels = ["softmax", "cog", "relu2", "sigmoid", "tanh", "identity", "softpick", "swishmax", "relu"]
    labels += ["softmax1", "polynomial", "cosformer", "retention", "sinh", "l2"]
    several = made(group=[GROUP | {"mechanisms": labels}], rule=[RULE | {"mechanism": "l2"}])
    page = study_page([several], [run for label in labels for run in runs(label, [0.5])], "")
    shown = json.loads(re.search(r'"shown": ?(\[.*?\])', page)[1])
    assert "l2" in shown and "sinh" not in shown and len(shown) < len(labels)


def test_learning_rates_have_ticks_where_they_are():
    there = summarise(records())
    (chart,) = (one for one in figures_of(there, ["softmax", "cog"]) if one.name.endswith("-rates"))
    ticks = {tuple(layer["encoding"]["x"]["axis"]["values"]) for layer in chart.for_file()["layer"]}
    assert ticks == {tuple(sorted({run.lr for run in records() if run.mechanism == "softmax"}))}


def test_files_of_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(study_pages, "vega_script", lambda: "")
    monkeypatch.setattr(study_pages, "svg_and_png", lambda spec: {"svg": b"<svg/>"})
    assert write_report([made()], records(), tmp_path) == {"figures": 4}
    with (tmp_path / "data" / "s-g.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mechanism"] for row in rows] == ["softmax", "cog"] and float(
        rows[1]["gain"]
    ) == pytest.approx(0.35)
    assert (tmp_path / "figures" / "s-g-cost.svg").exists() and (tmp_path / "index.html").exists()


def test_names_that_no_file_can_have(tmp_path, monkeypatch):
    monkeypatch.setattr(study_pages, "vega_script", lambda: "")
    monkeypatch.setattr(study_pages, "svg_and_png", lambda spec: {})
    mine = [replace(record, group="no copies / 1") for record in records()]
    write_report([made(group=[GROUP | {"name": "no copies / 1"}], rule=[RULE])], mine, tmp_path)
    assert (tmp_path / "data" / "s-no-copies-1.csv").exists()
    page = (tmp_path / "index.html").read_text()
    assert page.count('href="#s-no-copies-1"') == 2 and page.count('id="s-no-copies-1"') == 1


def test_the_page_works_in_a_browser(tmp_path, browser):
    path = tmp_path / "page.html"
    path.write_text(study_page([made(rule=[RULE])], records(), vega_script()))
    browser.open(path, width=420, scheme="dark")
    assert browser.run("unsoftDrawAll()")
    assert browser.run("document.documentElement.scrollWidth") == 420
    lines = "document.querySelectorAll('[data-figure=s-g-curves] .mark-line path').length"
    assert browser.run("document.querySelectorAll('.vega svg').length") == 4 and browser.run(lines) == 2
    browser.click("#chips button")  # softmax, away
    assert browser.run("unsoftDrawAll()") and browser.run(lines) == 1
    assert browser.complaints == [] and browser.requests == [path.as_uri()]
