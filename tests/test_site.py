"""The site builds without a warning from the pages, the mechanisms and the docstrings."""

import re
import sys
import warnings
from pathlib import Path

import pytest

import unsoft
from docs.generate import choose, peers
from unsoft.modules.registry import modifiers

DOCS = Path(__file__).parents[1] / "docs"


def built(out: Path, builder: str):
    """The site in the folder ``out``; a warning is an error."""
    application = pytest.importorskip("sphinx.application", reason="needs the extra docs")
    where = {"srcdir": DOCS, "confdir": DOCS / "site", "outdir": out, "doctreedir": out / ".doctrees"}
    path = list(sys.path)
    from sphinx.util.docutils import docutils_namespace  # a second build registers its directives again

    with warnings.catch_warnings(), docutils_namespace():
        warnings.simplefilter("ignore")  # deprecations between Sphinx and its extensions
        try:
            made = application.Sphinx(
                **where, buildername=builder, status=None, warning=sys.stderr, warningiserror=True
            )
            made.build()
        finally:
            sys.path[:] = path
    assert made.statuscode == 0
    return made


def page_names() -> list[str]:
    """Of mechanisms and modifiers."""
    return [*unsoft.mechanisms(), *(f"with-{modifier.name}" for modifier in modifiers())]


@pytest.mark.slow  # CI builds the site anyway (make site)
def test_everything_is_read_and_every_mechanism_has_a_page(tmp_path):
    pages = built(tmp_path, "dummy").env.found_docs  # reads and links everything, writes no HTML
    assert {f"mechanisms/{name}" for name in page_names()} <= pages
    cog = (DOCS / "mechanisms" / "cog.md").read_text()
    parts = (
        "$$a_{ij}",
        "arXiv 2411.07176",
        "Strengths: ",
        "Limitations: ",
        ">>> COG.row",
        "What it promises",
        "Measured",
    )
    for part in (*parts, "src/unsoft/mechanisms/cog.py", 'unsoft.attention(q, k, v, "cog"'):
        assert part in cog, part
    assert ">>> layer = Gpam(" in (DOCS / "mechanisms" / "gpam.md").read_text(), "of a family, too"


@pytest.mark.slow
def test_the_site_as_it_is_seen(tmp_path):
    built(tmp_path, "html")
    assert all((tmp_path / "mechanisms" / f"{name}.html").exists() for name in page_names())
    assert "<math" in (tmp_path / "mechanisms" / "cog.html").read_text()
    landing = (tmp_path / "index.html").read_text()
    for name in "choose own inspection converting magnitude numerics peers scale api glossary".split():
        assert f'href="{name}.html"' in landing, name
    functions = (tmp_path / "api" / "unsoft.html").read_text()
    assert functions.count('<span class="pre">attn_mask</span>') == 1, "overloads are one signature"
    for part in (
        'id="unsoft.attention"',
        'href="#unsoft.attention"><code',
        "_modules/unsoft/attention.html#",
    ):
        assert part in functions, part
    assert "fox" not in functions.partition('id="unsoft.attention"')[2].partition("</dt>")[0]
    assert "scaled_dot_product_attention" in (tmp_path / "notebooks" / "use.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} loads from elsewhere: {loaded[:2]}"


def test_choose_shows_its_record():
    script = choose
    text = script.PAGE.read_text()
    assert script.page(text, script.read()) == text, "run: python docs/generate/choose.py"


def test_choose_names_who_meets_a_need_best_first():
    script = choose
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
    assert "none fully; partly [sinh](mechanisms.md#sinh) 3" in partly
    assert "| not run | not run |" in script.decisions({"columns": [column], "scoreboard": []})


def test_page_about_peers_shows_its_records():
    script = peers
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run: python docs/generate/peers.py"


def test_sources_are_named_by_author_and_year():
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md"):
        assert not re.search(r"document 00\d", page.read_text()), page.name
