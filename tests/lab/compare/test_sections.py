"""A section is one file: a new one is measured, drawn, scored, judged, kept and shown with no other edit.

One that is requested alone runs without the others.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unsoft
from tests.lab.compare.tiny import TINY, record_of
from unsoft.cli import main
from unsoft.lab.compare import sections
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.plan import section_names
from unsoft.lab.compare.plan import sections as all_sections
from unsoft.lab.compare.section import Request, Section

OWN = '''
"""How heavy is the first of three equal keys?"""
from unsoft.lab.compare.section import Section
from unsoft.lab.evidence import grade
from unsoft.lab.report.comparison import Part
from unsoft.lab.report.figure import Figure, by_mechanism
import torch

FACTOR = 1.0
SECTION = Section(order=45, question="How heavy is the first key?", about="All keys are equal.")

@SECTION.each(0.1)
def first_key(candidate):
    q, k = torch.ones(1, 1, 8), torch.ones(1, 3, 8)
    for n in (1, 2, 3):
        yield {"keys": n, "weight": float(candidate.weights(q, k[:, :n])[0, 0, 0]) * FACTOR}

@SECTION.figures
def figures(results):
    if rows := results.each("first key"):
        chart = by_mechanism(results.labels, rows, "keys", "weight", x_title="keys", y_title="weight")
        note = "1 over their number, if nothing else."
        yield Figure("first-key", "Weight of the first key", note, rows, chart)

@SECTION.parts
def parts(results):
    rows = [(label, third(results, label)) for label in results.labels]
    yield Part.table("In numbers", "Of three keys.", ("mechanism", "weight"), rows, in_terminal=True)

@SECTION.column("third", "a third?", yes=0.3, partly=0.1)
def third(results, label):
    """Weight of one of three equal keys."""
    rows = results.get("first key", label)
    return rows[-1]["weight"] if rows else None

@SECTION.theorem("nobody 2026", "Equal keys share alike.")
def fair(results):
    """A third to 1e-6."""
    weight = results.rows("first key", "softmax")[-1]["weight"]
    return grade(abs(weight - 1 / 3) < 1e-6), f"softmax gives {weight:.3f}"
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A section that lies somewhere else."""
    monkeypatch.setenv("UNSOFT_COMPARE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr("unsoft.lab.compare.output.vega", lambda store: "")
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "first.py").write_text(OWN)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(folder)])
    yield folder / "first.py"
    sys.modules.pop("unsoft.lab.compare.sections.first", None)


def compare(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["unsoft", "compare", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().out


def test_a_new_section_is_one_file(own, tmp_path, monkeypatch, capsys):
    out = tmp_path / "report"
    arguments = ("softmax", "cog", "--quick", "--only", "first", "--out", str(out))
    code, text = compare(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "a third?" in text and "0.33 ≈" in text, "in the terminal, on the scoreboard"
    assert (
        "In numbers\nOf three keys." in text
        and "1 falsifiable claims: 1 supported" in text
        and "2 measurements: all by this run" in text
    )
    page = (out / "index.html").read_text()
    assert '<section id="first">' in page and '<a href="#first">First</a>' in page
    for words in (
        "How heavy is the first key?",
        "All keys are equal.",
        'data-figure="first-key"',
        "Of three keys.",
        "a third?",
    ):
        assert words in page, words
    assert "nobody 2026" in page and "softmax gives 0.333" in page and "--claim fair --quick --again" in page
    assert {path.name for path in (out / "figures").iterdir()} >= {"first-key.svg", "first-key.png"}
    assert (out / "data" / "first-key.csv").read_text().startswith("mechanism,keys,weight\nsoftmax,1,1.0")
    record = json.loads((out / "compare.json").read_text())
    assert {answer["name"] for answer in record["answers"]} == {"first key"}

    code, text = compare(monkeypatch, capsys, *arguments)
    assert "2 measurements: none by this run, 2 kept from" in text, "in the store"
    # Another length: Python reuses byte code of a source with the same size and second of modification.
    own.write_text(OWN.replace("FACTOR = 1.0", "FACTOR = 1 / 2"))
    sys.modules.pop("unsoft.lab.compare.sections.first")
    code, text = compare(monkeypatch, capsys, *arguments)
    assert "all by this run" in text and "0.17 " in text, "its code is part of the question"


def test_the_section_that_the_docs_show(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text()
    (tmp_path / "heaviest.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    record = record_of([Candidate("softmax", "softmax")], tmp_path / "store", ["heaviest"])
    sys.modules.pop("unsoft.lab.compare.sections.heaviest")
    value = record["scoreboard"][0]["cells"]["heaviest"]["value"]
    q, k = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    assert value == pytest.approx(float(torch.softmax(q @ k.mT / 8, -1).max()), rel=1e-5)


def test_sizes_of_a_measurement_come_from_the_level():
    section = Section(order=1)

    @section.each(lambda level: level.depth, "cog", rows=lambda level: 2 * level.geometries)
    def some_rows(candidate, rows, draws, width=3):
        yield {"label": candidate.label, "rows": rows, "draws": draws, "width": width}

    (make,) = section.measured
    jobs = make(Request([Candidate("softmax", "softmax")], TINY))
    assert [job.title for job in jobs] == ["some rows: softmax", "some rows: cog"]
    sizes = {"rows": 2 * TINY.geometries, "draws": TINY.draws}
    assert jobs[1].compute() == [{"label": "cog", "width": 3} | sizes]
    assert jobs[0].expected == TINY.depth and jobs[0].question.items() >= sizes.items()


def test_every_section_of_ours_is_complete():
    every = all_sections()
    assert sorted(section.name for section in every) == section_names()
    for section in every:
        assert isinstance(section, Section) and section.claims or section.columns
        assert not section.is_shown or section.question, section.name
    names = [column.name for section in every for column in section.columns]
    assert len(names) == len(set(names))


def test_the_report_knows_no_section_by_name():
    texts = [
        path.read_text()
        for path in (Path(unsoft.__file__).parent / "lab" / "report").rglob("*.*")
        if path.suffix in (".py", ".html")
    ]
    for section in all_sections():
        if section.is_shown:  # the others have no place there; "linear" is a scale, too
            for text in texts:
                assert f'"{section.name}"' not in text and f"#{section.name}" not in text, section.name


ONE_SECTION = """
import json, sys, threading
import vl_convert
threading.active_count = lambda: 2  # no forks, whose imports would not be seen
vl_convert.javascript_bundle = lambda: ""  # takes seconds
from unsoft.cli import main
sys.argv = ["unsoft", "compare", "cog", "softmax", "--only", "hijack", "--quick", "--out", sys.argv[1]]
try:
    main()
finally:
    print(json.dumps([name for name in sys.modules if name.startswith("unsoft")]))
"""


def test_one_section_runs_without_the_others(tmp_path):
    environment = os.environ | {"UNSOFT_COMPARE_DIR": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", ONE_SECTION, str(tmp_path / "report")]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    imported = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / "report" / "index.html").exists(), done.stderr
    others = set(section_names()) - {"hijack"}
    assert not others & {name.rpartition("sections.")[2] for name in imported}
    assert not [name for name in imported if name.startswith(("unsoft.lab.study", "unsoft.lab.tasks"))]
    claims = json.loads((tmp_path / "report" / "compare.json").read_text())["claims"]
    assert {claim["name"] for claim in claims} == {"example", "hijacking", "wasted-capacity"}
