"""``unsoft compare``: files, the store, an interrupt, and wrong usage."""

import csv
import json
import re

import pytest

from tests.lab.compare.test_model import save
from unsoft.cli.arguments import load_plugin
from unsoft.lab.bench import machine
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.sections import cost, sign
from unsoft.modules.plugins import unregister

SWISH = "name=mine;weight=s*exp(s - m);mass=abs(s)*exp(s - m);peak=s"


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """A store of its own; the library for charts is left out, whose bundling takes seconds and which the
    browser's tests have."""
    monkeypatch.setenv("UNSOFT_COMPARE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr("unsoft.lab.compare.output.vega", lambda store: "")


def small(out, *more):
    return (
        "compare",
        "softmax",
        "cog",
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
    assert "mine" in done.stdout and " falsifiable claims: " in done.stdout and "left" in done.stderr
    record = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert record["finished"] and [s["label"] for s in record["subjects"]] == ["softmax", "cog", "mine"]
    assert record["command"].startswith("unsoft compare softmax cog 'name=mine;")
    with open(tmp_path / "report" / "data" / "hijack.csv") as file:
        rows = [
            row for row in csv.DictReader(file) if row["mechanism"] == "softmax" and row["clones"] == "50"
        ]
    assert {row["kind"] for row in rows} == {"measured", "theory"}
    assert all(float(row["share"]) == pytest.approx(20 / 70) for row in rows)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
        assert (tmp_path / "report" / "figures" / f"hijack.{kind}").read_bytes().startswith(start)

    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(sign, "other_logits", refuse)  # called by `curves`, which is registered at import
    again = run_here(*small(tmp_path / "second"))
    assert again.returncode == 0 and "left" not in again.stderr


def test_an_interrupt_leaves_what_is_done(run_here, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    normals = sign.normals
    # The seed of `heat_map`, which cannot be replaced itself: measurements are registered at import.
    monkeypatch.setattr(sign, "normals", lambda seed, *more: stop() if seed == 3 else normals(seed, *more))
    done = run_here(*small(tmp_path / "report"))
    assert done.returncode == 130 and "interrupted" in done.stderr
    record = json.loads((tmp_path / "report" / "compare.json").read_text())
    # Processes work side by side, so others may be done as well; that which was interrupted is not.
    names = {answer["name"] for answer in record["answers"]}
    assert not record["finished"] and {"hijack", "curves"} <= names and "map" not in names
    assert "interrupted" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--quick", "--full"], "choose one"),
        (["sofmax"], "did you mean 'softmax'"),
        (["--only", "everything"], "there is no section 'everything'"),
        (["weight=exq(s)"], "did you mean 'exp'"),
        (["name=<b>;weight=s"], "a name is made of letters"),
    ],
)
def test_nonsense_is_one_line(run_here, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    done = run_here("compare", *arguments)
    # A mistake in a formula is shown below the message: the text, a caret and what is allowed.
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) in (1, 4)


def test_a_folder_that_cannot_be_made(run_here, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_here("compare", "--quick", "--out", str(tmp_path / "file"))
    assert done.returncode == 2 and "cannot be made a folder" in done.stderr


def test_a_model_is_inspected_swapped_and_never_served_stale(run_here, tmp_path):
    arguments = (
        "compare",
        "softmax",
        "cog",
        "--quick",
        "--only",
        "model",
        "--model",
        str(tmp_path / "model"),
    )
    missing = run_here(*arguments, "--out", str(tmp_path / "report"))
    assert missing.returncode == 2 and missing.stdout == "" and len(missing.stderr.splitlines()) == 1
    assert "is neither a folder here nor the id of a model" in missing.stderr
    assert not (tmp_path / "report").exists()
    save(tmp_path / "model")
    first = run_here(*arguments, "--out", str(tmp_path / "report"))
    assert first.returncode == 0, first.stderr
    assert " tokens: " in first.stdout and "sample.txt" in first.stdout
    assert "cog" in first.stdout.partition("Perplexity on")[2]
    assert "4 measurements: all by this run" in first.stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert "With each mechanism in place of its own" in page and "all by this run" in page
    again = run_here(*arguments, "--out", str(tmp_path / "report"))
    assert "4 measurements: none by this run, 4 kept from" in again.stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert "none by this run" in page and "measured by this run" not in page
    save(tmp_path / "model", seed=1)
    changed = run_here(*arguments, "--out", str(tmp_path / "report"))
    assert "4 measurements: all by this run" in changed.stdout
    assert changed.stdout.partition("Perplexity on")[2] != first.stdout.partition("Perplexity on")[2]


def test_the_section_on_a_model_needs_a_model(run_here, tmp_path):
    done = run_here("compare", "--only", "model", "--out", str(tmp_path / "report"))
    assert done.returncode == 2 and "needs --model" in done.stderr


def test_again_measures_anew(run_here, cache, tmp_path):
    arguments = ("compare", "softmax", "--quick", "--only", "hijack", "--out", str(tmp_path / "report"))
    run_here(*arguments)
    assert "none by this run" in run_here(*arguments).stdout
    assert "all by this run" in run_here(*arguments, "--again").stdout
    cleared = run_here("cache", "clear").stdout
    assert "results of unsoft compare deleted" in cleared and "0 results" not in cleared
    assert "all by this run" in run_here(*arguments).stdout


def test_times_of_a_busy_machine_are_said_to_be_so_and_taken_anew(run_here, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.Watch, "disturbed", lambda self, threads: True)
    monkeypatch.setattr("unsoft.lab.compare.sections.cost.memory", lambda subjects, lengths: [])
    monkeypatch.setattr(
        "unsoft.lab.compare.sections.cost.interleaved", lambda calls, **_: {name: [1.0] for name in calls}
    )
    arguments = ("compare", "softmax", "--quick", "--only", "cost", "--out", str(tmp_path / "report"))
    for measured in ("all by this run", "5 by this run, 1 kept"):  # memory is no time, and is kept
        done = run_here(*arguments)
        assert done.returncode == 0
        assert "other programs used the machine while times were taken" in done.stderr
        assert measured in done.stdout and "other programs used the machine during 5" in done.stdout


@pytest.mark.slow
def test_the_command_beside_a_claim_prints_its_whole_chain(run_here, tmp_path):
    out = tmp_path / "report"
    run_here("compare", "softmax", "--quick", "--only", "gating", "--out", str(out))
    claims = {claim["name"]: claim for claim in json.loads((out / "compare.json").read_text())["claims"]}
    expected = "unsoft compare --claim gate --quick --again"
    assert claims["gate"]["command"] == expected
    before = (out / "index.html").read_bytes()
    done = run_here(*expected.split()[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "Rosić 2026: “The magnitude gate keeps clones from taking over.”\nkind: experiment"
    )
    for words in (
        "rule: Five cases",
        "refuted if: 50 clones",
        "data: gates, ",
        "verdict: ",
    ):
        assert words in done.stdout, words
    assert done.stdout.splitlines()[-1] == f"verdict: {claims['gate']['verdict']}"
    assert claims["gate"]["found"] in done.stdout and (out / "index.html").read_bytes() == before
    assert "data: residual" not in done.stdout, "only what the claim needs"


def test_an_unknown_claim_and_a_study_that_is_none(run_here, tmp_path):
    done = run_here("compare", "--claim", "few-step")
    assert done.returncode == 2 and "did you mean 'few-steps'?" in done.stderr
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    done = run_here(
        "compare", "--only", "training", "--study", str(tmp_path / "mine.csv"), "--out", str(tmp_path)
    )
    assert done.returncode == 2 and "is not an exported study" in done.stderr


OWN = """import unsoft

class Average(unsoft.nn.WrittenOut):
    "The same weight for every key."
    def weights(self, logits, visible):
        return FACTOR * visible / visible.sum(-1, keepdim=True).clamp(min=1)

FACTOR = 1.0
unsoft.register("{name}", Average, row_sum="1", l1="1", signed=False)
"""


def test_a_mechanism_of_ones_own_takes_part_and_its_code_is_part_of_the_question(run_here, tmp_path):
    out = tmp_path / "report"
    arguments = (
        "average",
        "--quick",
        "--only",
        "hijack",
        "--out",
        str(out),
        "--plugin",
        str(tmp_path / "average.py"),
    )
    (tmp_path / "average.py").write_text(OWN.replace("{name}", "average"))
    done = run_here("compare", *arguments)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "compare.json").read_text())
    assert record["scoreboard"][0]["cells"]["clones"]["value"] == pytest.approx(50)
    identity = Candidate("average", "average").identity
    unregister("average")
    (tmp_path / "average.py").write_text(
        OWN.replace("{name}", "average").replace("FACTOR = 1.0", "FACTOR = 2.0")
    )
    run_here("compare", *arguments)
    assert Candidate("average", "average").identity != identity
    unregister("average")


def test_memory_of_a_mechanism_of_ones_own_is_measured_in_a_process_that_knows_it(tmp_path):
    (tmp_path / "heavy.py").write_text(OWN.replace("{name}", "heavy"))
    load_plugin(str(tmp_path / "heavy.py"))
    rows = cost.memory([Candidate("heavy", "heavy")], [128])
    unregister("heavy")
    assert [row["mechanism"] for row in rows] == [cost.PEER, "heavy"]


def test_what_comes_from_a_record_is_marked(run_here, tmp_path):
    """On the page at its column and its section, in the terminal below the scoreboard."""
    out = tmp_path / "report"
    done = run_here("compare", "softmax", "cog", "--quick", "--only", "training", "--out", str(out))
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("not measured by this run: ")]
    assert "trained vs softmax (record shipped with unsoft: " in said and "AMD EPYC" in said
    assert re.search(r"\+0\.\d\d \(\d tasks\) ✓", done.stdout) and "0 (reference)" in done.stdout
    assert "0 measurements: all by this run; 1 record read" in done.stdout
    page = (out / "index.html").read_text()
    assert "Not measured by this command: record shipped with unsoft" in page
    assert " · record</small>" in page and re.search(r"<small>\d tasks</small>", page)
    again = run_here("compare", "--claim", "trained-recall", "--quick")
    assert re.search(r"data: study, \d+ rows, read from a record", again.stdout)
    assert again.stdout.splitlines()[-1] == "verdict: at ceiling"
