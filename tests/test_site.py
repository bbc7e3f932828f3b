"""The site builds without a warning from the pages, the mechanisms and the docstrings."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path

import pytest

import unsoft
from unsoft.mechanisms.core.registry import modifiers

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    application = pytest.importorskip("sphinx.application", reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    where = {"srcdir": DOCS, "confdir": DOCS / "site", "outdir": out, "doctreedir": out / ".doctrees"}
    path = list(sys.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between Sphinx and its extensions
        try:
            made = application.Sphinx(
                **where, buildername="html", status=None, warning=sys.stderr, warningiserror=True
            )
            made.build()
        finally:
            sys.path[:] = path
    assert made.statuscode == 0
    return out


def test_every_mechanism_and_modifier_has_a_page(site):
    names = [*unsoft.mechanisms(), *(f"with-{modifier.name}" for modifier in modifiers())]
    missing = [name for name in names if not (site / "mechanisms" / f"{name}.html").exists()]
    assert not missing
    cog = (site / "mechanisms" / "cog.html").read_text()
    for part in (
        "<math",
        "arXiv 2411.07176",
        "What it promises",
        "Cannot",
        "COG",
        "src/unsoft/mechanisms/cog.py",
    ):
        assert part in cog, part


def test_pages_that_the_landing_page_promises_are_there(site):
    landing = (site / "index.html").read_text()
    for name in (
        "choose",
        "own",
        "inspection",
        "converting",
        "magnitude",
        "numerics",
        "peers",
        "scale",
        "api",
        "glossary",
    ):
        assert f'href="{name}.html"' in landing, name
    assert "unsoft.attention.attention" in (site / "api.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name}: {loaded[:2]}"


def docs_script(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_choose_shows_its_record():
    script = docs_script("choose")
    text = script.PAGE.read_text()
    assert script.page(text, script.read()) == text, "run: python docs/choose.py"


def test_choose_names_who_meets_a_need_best_first():
    script = docs_script("choose")
    column = {"name": "speed", "title": "fast?", "help": "seconds", "unit": "s", "low_is_good": True}
    cells = {"cog": (2.0, "yes"), "relu": (1.0, "yes"), "sinh": (3.0, "partly"), "softmax": (9.0, "no")}
    rows = [
        {"mechanism": name, "cells": {"speed": {"value": value, "reading": reading, "beyond": False}}}
        for name, (value, reading) in cells.items()
    ]
    line = script.decisions({"columns": [column], "scoreboard": rows}).splitlines()[-1]
    assert line == (
        "| fast? | [relu](mechanisms.md#relu) 1, [cog](mechanisms.md#cog) 2 | 9 (no) | seconds (s) |"
    )
    partly = script.decisions({"columns": [column], "scoreboard": rows[2:]}).splitlines()[-1]
    assert "nobody fully; partly [sinh](mechanisms.md#sinh) 3" in partly
    assert "| not run | not run |" in script.decisions({"columns": [column], "scoreboard": []})


def test_page_about_peers_shows_its_records():
    script = docs_script("peers")
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run: python docs/peers.py"


def test_sources_are_named_by_author_and_year():
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md"):
        assert not re.search(r"document 00\d", page.read_text()), page.name
