"""``unsoft theory``: the table, the files, and every way to ask for nonsense."""

import csv
import json
import math
import re
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest

from unsoft import theory
from unsoft.formula.formula import formula_from_text as read_formula

FIGURES = {
    "relu2-sparsity",
    "identity-sparsity",
    "sparsity",
    "hijack",
    "finite-length",
    "finite-dimension",
}
SWISH = "weight=s*exp(s - m);mass=abs(s)*exp(s - m);peak=s"


class Elements(HTMLParser):
    """Every element that a browser would make; the text of scripts is none."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, attrs))


def table(stdout):
    """Rows of cells below the rule; a column is separated by at least two spaces."""
    lines = stdout.rpartition("─")[2].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]


def test_the_table_holds_the_theory(run_here):
    done = run_here("theory", "softmax", "tanh", "--beta", "-1,0.5", "--gamma", "0.5,1,2")
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[:2] for row in rows] == [
        ["softmax", "-1"],
        ["softmax", "0.5"],
        ["tanh", "-1"],
        ["tanh", "0.5"],
    ]
    for row in rows[:2]:
        assert [float(cell) for cell in row[2:6]] == [0.8825, 0.6065, 0.1353, 0.1353]
        assert row[6] == "closed form"
    assert rows[3][6] == "quadrature"
    assert "\x1b" not in done.stdout


def test_a_formula_from_the_command_line(run_here):
    done = run_here(
        "theory",
        "weight=exp(tau*s - m);mass=exp(tau*s - m);peak=tau*s;tau=2;name=sharp",
        "--beta",
        "0",
        "--gamma",
        "0.5",
    )
    assert done.returncode == 0, done.stderr
    assert table(done.stdout) == [["sharp", "0", "0.6065", "0.6065", "quadrature"]]  # exp(-(2 * 0.5)^2 / 2)


def test_many_spreads_are_thinned_in_the_table_and_all_kept_elsewhere(run_here):
    done = run_here("theory", "cog", "--beta", "0", "--gamma", "0:30:301")
    assert done.returncode == 0
    (row,) = table(done.stdout)
    assert len(row) == 2 + 7 + 2
    assert float(row[-2]) == pytest.approx(math.sqrt(2) * math.exp(-450), rel=0.05)


@pytest.fixture(scope="module")
def folder(make_once):
    """Everything the command writes, made once."""
    from unsoft.cli import main

    def fill(out):
        arguments = ["softmax", SWISH, "--beta", "-1,0", "--gamma", "0.5,1,2"]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(sys, "argv", ["unsoft", "theory", *arguments, "--out", str(out / "new")])
            main()
        assert stopped.value.code == 0

    return make_once("theory", fill) / "new"


def test_every_figure_has_its_five_files_and_nothing_is_left_over(folder):
    kinds = ("csv", "html", "json", "png", "svg")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{f}.{k}" for f in FIGURES for k in kinds
    )


@pytest.mark.parametrize("figure", sorted(FIGURES))
def test_files_are_what_they_say(folder, figure):
    assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG\r\n")
    svg = xml.etree.ElementTree.parse(folder / f"{figure}.svg").getroot()
    assert svg.tag.endswith("svg") and len(list(svg.iter())) > 20
    rows = list(csv.DictReader((folder / f"{figure}.csv").read_text().splitlines()))
    kept = json.loads((folder / f"{figure}.json").read_text())
    assert kept["title"] and len(kept["rows"]) == len(rows) and list(kept["rows"][0]) == list(rows[0])


@pytest.mark.parametrize("figure", sorted(FIGURES))
def test_pages_need_no_network(folder, figure):
    page = (folder / f"{figure}.html").read_text()
    reader = Elements()
    reader.feed(page)
    assert {tag for tag, _ in reader.elements} >= {"html", "style", "script"}
    links = [value for _, given in reader.elements for name, value in given if name in ("src", "href")]
    assert set(links) <= {"data:,", "#main"}, "the empty icon, so that browsers ask for none; a skip link"
    assert "vegaEmbed" in page and len(page) > 300_000


def test_the_data_are_those_of_the_theory(folder):
    rows = json.loads((folder / "sparsity.json").read_text())["rows"]
    assert {row["mechanism"] for row in rows} == {"softmax", "s*exp(s - m)"}
    for row in rows:
        mechanism = "softmax" if row["mechanism"] == "softmax" else read_formula(SWISH)
        assert row["S"] == pytest.approx(
            float(theory.sparsity(mechanism, row["beta"], row["gamma"])), rel=1e-12
        )
    identity = json.loads((folder / "identity-sparsity.json").read_text())["rows"]
    assert min(row["S"] for row in identity) == pytest.approx(math.sqrt(2 / math.pi))
    clones = {
        row["mechanism"]: row["share"]
        for row in json.loads((folder / "hijack.json").read_text())["rows"]
        if row["clones"] == 10
    }
    assert clones["softmax"] == pytest.approx(math.exp(3) / (math.exp(3) + 10 * math.exp(1)))
    assert clones["magnitude on values, gate w"] == pytest.approx(clones["magnitude on mass, gate w"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cogg"], 2, "did you mean 'cog'?"),
        (["gpam"], 2, "not a formula"),
        (["--gamma", "-1"], 2, "cannot be negative"),
        (["--gamma", "1,nan"], 2, "'1,nan'"),
        (["--gamma", "0:1"], 2, "first:last:count"),
        (["--gamma", "0:1:1"], 2, "first:last:count"),
        (["--beta", "one"], 2, "'one'"),
        (["--beta", "0:1:200", "--gamma", "0:1:100"], 2, "200 x 100 points"),
        (["--beta", ""], 2, "--beta"),
        (["--n", "0"], 2, "--n"),
        (["mass=exp(s)"], 2, "weight="),
        (["weight=s;weight=s"], 2, "each once"),
        (["weight=s;wight=exp(s)"], 2, "'wight'"),
        (["weight=s;name=</script><b>"], 2, "a name is made of"),
        (["weight=exq(s)"], 2, "did you mean 'exp'"),
        (["weight=exp(s);mass=exp(s - m);peak=s"], 2, "does not cancel"),
        (["weight=exp(s - m);mass=exp(s - m);peak=s;tau=2"], 2, "'tau' occurs nowhere"),
        (
            ["name=a;weight=s/n", "name=a;weight=2*s/n"],
            2,
            "two formulas are called 'a'",
        ),
        (["weight=sqrt(s);normalise=count"], 2, "not a number at the logit"),
        (["exp(exp(s))"], 2, "cannot be stabilised"),
        (["--out", "/proc/version/figures"], 2, "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_one_line(run_here, arguments, code, words):
    done = run_here("theory", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    # A mistake in a formula is shown below the message: the text, a caret and what is allowed.
    assert len(done.stderr.splitlines()) in (1, 4) and done.stderr.startswith("unsoft: ")
    assert words in done.stderr


def test_without_the_drawing_packages_one_line_says_what_to_install(run_here, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = run_here("theory", "softmax", "--out", str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "unsoft[report]" in done.stderr and list(tmp_path.iterdir()) == []
    assert run_here("theory", "softmax", "--gamma", "1").returncode == 0, "the table needs none of them"
