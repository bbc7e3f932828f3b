"""Exported runs: what is written is what is read back."""

import json
import sqlite3
from contextlib import closing

import pytest

from tests.lab.study.made_up import runs
from unsoft.lab.study import read_records, summarise
from unsoft.lab.study.record import write_records
from unsoft.lab.study.store import NAME, StudyStore

RECORDS = [
    *runs("softmax", [0.5, 0.25]),
    *runs(
        "softmax ×2 heads",
        [0.7],
        harder={"repeats=64": 0.5},
        validation_by={"repeats=64": 0.25},
        choose_on="repeats=64",
        learned={"a.beta": [1.5, -2.0]},
        curve=[[10, 0.5], [20, 0.7]],
        losses=[[10, 2.0]],
        spec={"task": "copy", "lr": 0.1},
        swept=True,
        higher_is_better=False,
        parameters=123,
        seconds_per_step=0.01,
        error="a line, with a comma\nand another",
    ),
]


@pytest.mark.parametrize("kind", ["db", "csv", "json"])
def test_what_is_written_is_read_back(tmp_path, kind):
    path = tmp_path / f"study.{kind}"
    if kind == "db":
        with StudyStore(path, write=True) as store:
            store.put(RECORDS)
    else:
        write_records(RECORDS, path)
    found = read_records(path)
    wanted = (
        RECORDS if kind != "csv" else [*RECORDS[:2], type(RECORDS[2])(**{**vars(RECORDS[2]), "losses": []})]
    )
    assert found == wanted
    assert summarise(found)[1].mean == 0.7
    assert read_records(path, study="other") == []


def test_files_from_before_rates_could_be_chosen_on_harder_examples_are_read(tmp_path):
    """Exported ones; a store is written again and again, so one of another schema is refused."""
    write_records(RECORDS[:2], tmp_path / "old.json")
    rows = json.loads((tmp_path / "old.json").read_text())
    for row in rows:
        del row["choose_on"], row["validation_by"]
    (tmp_path / "old.json").write_text(json.dumps(rows))
    assert read_records(tmp_path / "old.json") == RECORDS[:2]
    with StudyStore(tmp_path / NAME, write=True) as store:
        store.put(RECORDS)
    with closing(sqlite3.connect(tmp_path / NAME)) as base:
        base.execute("pragma user_version = 1")
    with pytest.raises(ValueError, match=r"written by another version of unsoft \(schema 1, not 2\)"):
        read_records(tmp_path / NAME)


def test_unknown_fields_are_named(tmp_path):
    write_records(RECORDS[:2], tmp_path / "new.json")
    rows = [row | {"colour": "red"} for row in json.loads((tmp_path / "new.json").read_text())]
    (tmp_path / "new.json").write_text(json.dumps(rows))
    (tmp_path / "new.csv").write_text("study,colour\ns,red\n")
    for name in ("new.json", "new.csv"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ValueError, match=f"{name}' is not an exported study: unknown fields colour"):
            read_records(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("change", ["alter table runs add column colour", "pragma user_version = 1"])
def test_a_store_of_another_version_is_neither_read_nor_changed(tmp_path, change):
    with StudyStore(tmp_path / NAME, write=True) as store:
        store.put(RECORDS)
    with closing(sqlite3.connect(tmp_path / NAME)) as base:
        base.execute("pragma journal_mode = delete")
        base.execute(change)
        base.commit()
    before = (tmp_path / NAME).read_bytes()
    for write in (False, True):
        with pytest.raises(ValueError, match="version of unsoft.* choose another folder"):
            StudyStore(tmp_path / NAME, write=write)
    assert (tmp_path / NAME).read_bytes() == before


def test_a_database_of_another_program_stays_as_it_is(tmp_path):
    with closing(sqlite3.connect(tmp_path / NAME)) as base:
        base.execute("create table songs (title)")
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ValueError, match="another version of unsoft"):
        StudyStore(tmp_path / NAME, write=True)
    assert (tmp_path / NAME).read_bytes() == before


def test_files_that_were_not_exported(tmp_path):
    for name, text in (
        ("a.json", "[1]"),
        ("b.json", "{"),
        ("d.json", '{"kind": "unsoft compare"}'),
        ("c.csv", "x,y\n1,2\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="is not an exported study"):
            read_records(tmp_path / name)
    assert not (tmp_path / NAME).exists()


def test_a_file_of_another_kind_raises(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.csv or \.json"):
        write_records(RECORDS, tmp_path / "study.parquet")
