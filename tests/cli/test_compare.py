"""``unsoft compare``: files, the store, an interrupt, two runs, and every way to ask for nonsense."""

import csv
import json

import pytest

from unsoft.compare import plan

SWISH = "name=mine;weight=s*exp(s - m);mass=abs(s)*exp(s - m);peak=s"


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """A store of its own; the library for charts is left out, whose bundling takes seconds and which the browser's tests have."""
    monkeypatch.setenv("UNSOFT_COMPARE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr("unsoft.compare.library.vega", lambda store: "")


def small(out, *more):
    return (
        "compare",
        "softmax",
        "cog",
        "--formula",
        SWISH,
        "--quick",
        "--only",
        "sign",
        "--only",
        "hijack",
        "--out",
        str(out),
        *more,
    )


def test_it_leaves_a_page_data_and_figures_and_asks_nothing_twice(run_here, tmp_path, monkeypatch):
    done = run_here(*small(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout and "claims:" in done.stdout and "left" in done.stderr
    record = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert record["finished"] and [s["label"] for s in record["subjects"]] == ["softmax", "cog", "mine"]
    assert record["command"].startswith("unsoft compare softmax cog --formula 'name=mine;")
    with open(tmp_path / "report" / "data" / "hijack.csv") as file:
        rows = [
            row for row in csv.DictReader(file) if row["mechanism"] == "softmax" and row["clones"] == "50"
        ]
    assert {row["kind"] for row in rows} == {"measured", "theory"}
    assert all(float(row["share"]) == pytest.approx(20 / 70) for row in rows)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
        assert (tmp_path / "report" / "figures" / f"hijack.{kind}").read_bytes().startswith(start)

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(plan.sign, "curves", refuse)
    monkeypatch.setattr(plan.hijack, "hijack", refuse)
    again = run_here(*small(tmp_path / "second"))
    assert again.returncode == 0 and "left" not in again.stderr


def test_an_interrupt_leaves_what_is_done(run_here, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan.sign, "heat_map", stop)
    done = run_here(*small(tmp_path / "report"))
    assert done.returncode == 130 and "interrupted" in done.stderr
    record = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert not record["finished"] and {a["name"] for a in record["answers"]} == {"hijack", "curves"}
    assert "interrupted" in (tmp_path / "report" / "index.html").read_text()


def test_two_runs(run_here, tmp_path):
    run_here("compare", "softmax", "--quick", "--only", "hijack", "--out", str(tmp_path))
    first = tmp_path / "compare.json"
    record = json.loads(first.read_text())
    record["scoreboard"][0]["cells"]["clones"]["value"] = 0.9
    (tmp_path / "b.json").write_text(json.dumps(record))
    done = run_here("compare", str(first), str(tmp_path / "b.json"), "--out", str(tmp_path / "changes"))
    assert done.returncode == 0 and "better" in done.stdout and "0.286" in done.stdout
    assert (tmp_path / "changes" / "changes.html").exists()
    same = run_here("compare", str(first), str(first), "--out", str(tmp_path / "changes"))
    assert "no number changed" in same.stdout


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--quick", "--full"], "choose one"),
        (["sofmax"], "did you mean 'softmax'"),
        (["--only", "everything"], "there is no section 'everything'"),
        (["--formula", "weight=exq(s)"], "did you mean 'exp'"),
        (["--formula", "name=<b>;weight=s"], "a name is made of letters"),
        (["a.json"], "two files"),
        (["a.json", "softmax"], "two files"),
        (["a.json", "b.json"], "cannot be read"),
    ],
)
def test_nonsense_is_one_line(run_here, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    done = run_here("compare", *arguments)
    assert done.returncode in (1, 2) and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_made(run_here, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_here("compare", "--quick", "--out", str(tmp_path / "file"))
    assert done.returncode == 2 and "cannot be made a folder" in done.stderr


def test_a_file_of_something_else(run_here, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    done = run_here("compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    assert done.returncode == 2 and "was not written by" in done.stderr
