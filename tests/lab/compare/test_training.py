"""Trained models on the page: records of a study, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from unsoft.files import write_csv
from unsoft.lab.compare.jobs import Results, run
from unsoft.lab.compare.plan import sections
from unsoft.lab.compare.section import QUICK, Request
from unsoft.lab.compare.sections import learned, training
from unsoft.lab.compare.store import AnswerStore
from unsoft.lab.records import PACKAGED, command_for, write_packaged
from unsoft.lab.study import default_study, verdict
from unsoft.lab.study.record import Record, read_records

DOCS = Path(__file__).parents[3] / "docs"


def runs(cog, seeds=4, **more):
    """The study of deletion: softmax and its kin at 0.4, cog at ``cog``."""
    names = dict.fromkeys(("softmax", "softmax1", "gated+softmax", "softmax ×2 heads"), 0.4) | {"cog": cog}
    return [
        Record(
            study="deletion",
            group="deletion",
            task="deletion",
            mechanism=name,
            seed=seed,
            lr=0.003,
            point="lr=0.003",
            status="done",
            score=score + 0.01 * seed,
            validation=score,
            chance=0.1,
            known=1.0,
            metric="accuracy",
            machine="a machine",
            finished="2026-11-16T10:00:00",
            key=f"{name}{seed}",
            **{"base": name} | more,
        )
        for name, score in names.items()
        for seed in range(seeds)
    ]


def results(tmp_path, records):
    path = tmp_path / "runs.csv"
    write_csv(path, [record.to_row() for record in records])
    request = Request([], QUICK, study=str(path))
    answers, _ = run(training.jobs(request), AnswerStore(tmp_path / "store"))
    kept = [vars(answer) for answer in answers]
    return Results({"subjects": [], "answers": kept, "study": str(path)})


CLAIM = next(claim for claim in training.SECTION.claims if claim.name == "trained-deletion")


@pytest.mark.parametrize(
    "cog, verdict", [(0.9, "supported"), (0.3, "not supported"), (0.485, "not supported")]
)
def test_the_rule_of_the_study_decides(tmp_path, cog, verdict):
    found = CLAIM.judge(results(tmp_path, runs(cog)))
    assert found[0] == verdict and "20 runs on a machine, 2026-11-16" in found[1]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"seed": 9}, "with other seeds"),
        ({"point": "lr=0.5"}, "with other rates"),
        ({"choose_on": "length=9"}, "with other examples by which rates are chosen"),
    ],
)
def test_runs_of_an_earlier_version_of_the_study_are_said(tmp_path, changes, words):
    made = runs(0.9)
    lone = replace(made[0], swept=True, validation_by={"length=9": 0.0}, key="another", **changes)
    _, why = CLAIM.judge(results(tmp_path, [*made, lone]))
    assert (f"earlier version of the study, {words};" in why) if words else "earlier version" not in why


def test_two_seeds_decide_nothing_and_no_record_is_not_run(tmp_path):
    assert CLAIM.judge(results(tmp_path, runs(0.9, seeds=2)))[0] == "undecided"
    assert CLAIM.judge(Results({"subjects": [], "answers": []}))[0] == "not run"


def test_the_difference_to_softmax_is_paired_and_a_share_of_the_way_to_the_best(tmp_path):
    found = results(tmp_path, runs(0.9))
    assert training.over_softmax(found, "cog").value == pytest.approx((0.9 - 0.4) / 0.9)
    assert training.over_softmax(found, "softmax1").value == pytest.approx(0.0)
    assert training.over_softmax(found, "softmax") == (0.0, None, None), "the reference"
    assert training.over_softmax(found, "relu") is None
    (column,) = training.SECTION.columns
    assert [column.cell(found, name)["reading"] for name in ("cog", "softmax")] == ["yes", "partly"]
    assert column.cell(results(tmp_path, runs(0.3)), "cog")["reading"] == "no"


def test_an_error_counts_the_other_way(tmp_path):
    errors = [
        replace(run, higher_is_better=False, metric="relative error", chance=1.0, known=0.0)
        for run in runs(0.3)
    ]
    assert training.over_softmax(results(tmp_path, errors), "cog").value == pytest.approx(0.1)


def test_only_shared_seeds_and_tasks_count(tmp_path):
    """An easy task of one's own makes a mechanism no better, nor does a seed that softmax lacks."""
    easy = [
        replace(run, study="mine", group="mine", score=1.0, key=f"m{run.key}")
        for run in runs(0.9)
        if run.mechanism == "cog"
    ]
    lucky = [replace(run, seed=9, score=1.0, key=f"l{run.key}") for run in runs(0.9) if run.key == "cog0"]
    alone = training.over_softmax(results(tmp_path, runs(0.9)), "cog")
    assert training.over_softmax(results(tmp_path, [*runs(0.9), *easy, *lucky]), "cog") == alone


def test_tasks_count_equally_whatever_their_seeds_are_called(tmp_path):
    mine = {"study": "mine", "group": "mine"}
    later = [replace(run, **mine, task="mine", seed=run.seed + 5, key=f"m{run.key}") for run in runs(0.5)]
    found = results(tmp_path, [*runs(0.9), *later])
    assert training.over_softmax(found, "cog").value == pytest.approx((0.5 / 0.9 + 0.1 / 0.9) / 2)
    assert training.trained_on(found, "cog") == "2 tasks: deletion, mine"
    again = [replace(run, study="again", key=f"a{run.key}") for run in runs(0.9)]
    assert training.over_softmax(results(tmp_path, [*runs(0.9), *again, *later]), "cog") == (
        training.over_softmax(found, "cog")
    ), "a task that two studies train on counts once"


def test_a_difference_that_is_not_clear_reads_partly(tmp_path):
    """One seed in four is far better: +0.22 on average, and 0 lies in the interval."""
    records = [replace(run, score=0.9 if run.key == "cog0" else run.score) for run in runs(0.4)]
    (column,) = training.SECTION.columns
    cell = column.cell(results(tmp_path, records), "cog")
    assert cell["value"] > 0.1 and cell["low"] < 0 and cell["reading"] == "partly"


def test_shipped_records_show_what_is_ahead_of_softmax():
    rows = training.rows_of(PACKAGED)
    answer = {"name": "study", "mechanism": "", "rows": rows, "problem": ""}
    found = Results({"subjects": [], "answers": [answer]})
    gains = {name: training.over_softmax(found, name).value for name in ("cog", "relu", "logn+softmax")}
    assert gains["cog"] > 0.2 and len(training.pairs_of(found, "cog")) >= 3
    assert gains["relu"] < 0.001 and gains["logn+softmax"] < 0.01
    assert "key bias" not in training.trained_on(found, "relu2")
    assert training.trained_on(found, "magnitude").startswith("3 tasks, magnitude on mass: ")


def test_the_page_says_where_and_when(tmp_path):
    found = results(tmp_path, runs(0.9))
    (part,) = training.parts(found)
    assert [row["over softmax"] for row in part.rows] == pytest.approx([None, 0.0, 0.0, 0.0, 0.5])
    where = training.recorded(found)
    assert "runs.csv" in where and "20 runs on a machine, 2026-11-16" in where
    assert training.SECTION.view(found)["recorded"] == where
    (part,) = training.parts(Results({"subjects": [], "answers": []}))
    assert "--study FILE" in part.text


def test_the_packaged_record_is_small_and_reads_back(tmp_path):
    store = tmp_path / "runs.csv"
    write_csv(store, [record.to_row() for record in runs(0.9, losses=[[1, 0.5]] * 50)])
    assert write_packaged(store, tmp_path / "small.csv") == 20
    assert (tmp_path / "small.csv").stat().st_size < store.stat().st_size / 1.5
    assert [record.score for record in read_records(tmp_path / "small.csv")] == [r.score for r in runs(0.9)]
    assert not PACKAGED.is_file() or read_records(PACKAGED)


def test_every_default_study_is_a_claim():
    from unsoft.lab.study.read import default_studies

    names = {claim.name for section in sections() for claim in section.claims}
    assert {f"trained-{name}" for name in default_studies()} <= names


def test_a_variant_stands_for_a_mechanism_that_was_trained_in_no_other_way(tmp_path):
    records = [
        replace(run, mechanism="magnitude on mass", base="magnitude+softmax", key=f"m{run.key}")
        for run in runs(0.9)
        if run.mechanism == "cog"
    ]
    controls = [
        replace(run, mechanism="softmax as large", key=f"l{run.key}") for run in runs(0.9, base="softmax")
    ]
    found = results(tmp_path, [*controls, *runs(0.9), *records])
    assert training.over_softmax(found, "magnitude") == training.over_softmax(found, "cog")
    assert training.trained_on(found, "magnitude") == "1 task, magnitude on mass: deletion"
    (column,) = training.SECTION.columns
    assert column.cell(found, "cog")["note"] == "1 task: deletion"
    assert training.over_softmax(found, "magnitude+cog") is None, "another mechanism"
    relus = [replace(run, mechanism="linear-relu", base="linear-relu") for run in records]
    assert training.over_softmax(results(tmp_path, relus), "linear-elu1") is None, "other features"
    assert training.trained_on(found, "softmax") == "reference"


def test_a_study_joins_the_record_without_touching_the_others(tmp_path):
    small = tmp_path / "small.csv"
    for study, cog in (("deletion", 0.9), ("mine", 0.5), ("deletion", 0.7)):
        write_csv(tmp_path / "runs.csv", [replace(run, study=study).to_row() for run in runs(cog)])
        write_packaged(tmp_path / "runs.csv", small)
    best = {(run.study, run.mechanism): run.score for run in read_records(small) if run.seed == 0}
    assert best["deletion", "cog"] == 0.7 and best["mine", "cog"] == 0.5 and len(best) == 10
    assert command_for(read_records(small)) == "unsoft study deletion,mine --out study"


@pytest.mark.parametrize("name", sorted({record.study for record in read_records(PACKAGED)}))
def test_the_page_keeps_all_that_a_verdict_needs(name):
    """Which rate is the best, too: without its curve a run may lose against another at an equal score."""
    kept = [Record.from_row(row) for row in training.rows_of(PACKAGED) if row["study"] == name]
    whole = [record for record in read_records(PACKAGED) if record.study == name]
    rules = default_study(name).rules
    assert kept and verdict(rules, kept) == verdict(rules, whole)
    assert " seeds)" in verdict(rules, kept)[1]


def test_pages_show_the_verdicts_of_the_shipped_record():
    """The gallery and the questions are written from a run; a new rule or record must reach them, too."""
    answer = {"name": "study", "mechanism": "", "rows": training.rows_of(PACKAGED), "problem": ""}
    found = Results({"subjects": [], "answers": [answer]})
    shown = 0
    for claim in (*training.SECTION.claims, *learned.SECTION.claims):
        verdict, numbers = claim.judge(found)
        for page in (DOCS / "gallery.md", *(DOCS / "questions").glob("*.md")):
            for line in page.read_text().splitlines():
                if f"| {claim.text} |" in line or line.startswith(f"- **{claim.text}**"):
                    assert numbers in line and f" {verdict} " in line, f"{page.name}: {claim.name}"
                    shown += 1
    assert shown > 10
