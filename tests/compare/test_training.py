"""Trained models on the page: records of a study, by hand."""

from dataclasses import replace

import pytest

from unsoft.compare.jobs import Results, run
from unsoft.compare.level import QUICK
from unsoft.compare.section import Request, sections
from unsoft.compare.sections import training
from unsoft.compare.store import Store
from unsoft.compare.trained import PACKAGED, write_packaged
from unsoft.files import write_csv
from unsoft.study import default_study, verdict
from unsoft.study.record import Record, read_records


def runs(cog, seeds=4, **more):
    """The study of deletion: softmax and its kin at 0.4, cog at ``cog``."""
    names = {"softmax": 0.4, "softmax1": 0.4, "gated+softmax": 0.4, "cog": cog}
    return [
        Record(
            study="deletion",
            group="deletion",
            task="deletion",
            mechanism=name,
            base=name,
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
            **more,
        )
        for name, score in names.items()
        for seed in range(seeds)
    ]


def results(tmp_path, records):
    path = tmp_path / "runs.csv"
    write_csv(path, [record.to_row() for record in records])
    request = Request([], QUICK, study=str(path))
    answers, _ = run(training.jobs(request), Store(tmp_path / "store"))
    kept = [vars(answer) for answer in answers]
    return Results({"subjects": [], "answers": kept, "study": str(path)})


CLAIM = next(claim for claim in training.SECTION.claims if claim.name == "trained-deletion")


@pytest.mark.parametrize("cog, verdict", [(0.9, "holds"), (0.3, "does not hold"), (0.485, "does not hold")])
def test_the_rule_of_the_study_decides(tmp_path, cog, verdict):
    found = CLAIM.judge(results(tmp_path, runs(cog)))
    assert found[0] == verdict and "16 runs on a machine, 2026-11-16" in found[1]


def test_two_seeds_decide_nothing_and_no_record_is_not_run(tmp_path):
    assert CLAIM.judge(results(tmp_path, runs(0.9, seeds=2)))[0] == "undecided"
    assert CLAIM.judge(Results({"subjects": [], "answers": []}))[0] == "not run"


def test_the_score_is_the_way_from_chance_to_the_best(tmp_path):
    found = training.trained_score(results(tmp_path, runs(0.9)), "cog")
    assert found.value == pytest.approx((0.915 - 0.1) / 0.9) and found.low < found.value < found.high
    assert training.trained_score(results(tmp_path, runs(0.9)), "relu") is None


def test_the_page_says_where_and_when(tmp_path):
    (part,) = training.parts(results(tmp_path, runs(0.9)))
    assert "runs.csv" in part.text and "16 runs on a machine, 2026-11-16" in part.text and len(part.rows) == 4
    (part,) = training.parts(Results({"subjects": [], "answers": []}))
    assert "--study FILE" in part.text


def test_the_packaged_record_is_small_and_reads_back(tmp_path):
    store = tmp_path / "runs.csv"
    write_csv(store, [record.to_row() for record in runs(0.9, losses=[[1, 0.5]] * 50)])
    assert write_packaged(store, tmp_path / "small.csv") == 16
    assert (tmp_path / "small.csv").stat().st_size < store.stat().st_size / 1.5
    assert [record.score for record in read_records(tmp_path / "small.csv")] == [r.score for r in runs(0.9)]
    assert not PACKAGED.is_file() or read_records(PACKAGED)


def test_a_store_replaces_its_own_studies_in_the_record_and_no_others(tmp_path):
    store, record = tmp_path / "runs.csv", tmp_path / "small.csv"
    older = [replace(one, study=name) for name in ("kept", runs(0.5)[0].study) for one in runs(0.5)]
    write_csv(record, [one.to_row() for one in older])
    write_csv(store, [one.to_row() for one in runs(0.9)])
    assert write_packaged(store, record) == 32
    found = read_records(record)
    assert [one.score for one in found if one.study == "kept"] == [one.score for one in runs(0.5)]
    assert [one.score for one in found if one.study != "kept"] == [one.score for one in runs(0.9)]


def test_every_default_study_is_a_claim():
    from unsoft.study.read import default_studies

    names = {claim.name for section in sections() for claim in section.claims}
    assert {f"trained-{name}" for name in default_studies()} <= names


@pytest.mark.parametrize("name", sorted({record.study for record in read_records(PACKAGED)}))
def test_the_page_keeps_all_that_a_verdict_needs(name):
    """Which rate is the best, too: without its curve a run may lose against another at an equal score."""
    kept = [Record.from_row(row) for row in training.rows_of(PACKAGED) if row["study"] == name]
    whole = [record for record in read_records(PACKAGED) if record.study == name]
    rules = default_study(name).rules
    assert verdict(rules, kept) == verdict(rules, whole)
    assert "5 seeds" in verdict(rules, kept)[1]
