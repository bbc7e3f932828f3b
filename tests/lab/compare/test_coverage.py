"""docs/coverage.md: all 109 items, each with something that exists; every claim is named."""

import json
import re
from pathlib import Path

import pytest

from docs.generate import chinese
from unsoft.lab.compare.plan import sections

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "coverage.md").read_text()
ROWS = [line.rsplit("|", 2)[:2] + [line] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
CLAIMS = {claim.name for section in sections() for claim in section.claims}


def test_every_item_is_there_once_and_in_order():
    assert [int(line.split("|")[1]) for *_, line in ROWS] == list(range(1, 110))


def test_every_item_is_done_or_says_why_not():
    for *_, line in ROWS:
        state = line.split(" | ")[-2]
        states = r"(method )?done|(partly|undecided|at ceiling|not run): \w|.*not testable here: \w"
        assert re.match(states, state), line


def test_what_is_named_exists():
    for _, by, line in ROWS:
        named = by.split()
        assert named, line
        for one in named:
            kind, _, name = one.partition(":")
            if kind == "claim":
                assert name in CLAIMS, one
                continue
            path, _, function = name.partition("::")
            assert kind in ("test", "doc") and (ROOT / path).exists(), one
            assert not function or f"\ndef {function}(" in (ROOT / path).read_text(), one


def test_every_claim_has_its_item():
    """Studies may be added without an item of their own."""
    named = set(re.findall(r"claim:([\w-]+)", PAGE.partition("## Survey")[2]))
    assert named <= CLAIMS
    assert {name for name in CLAIMS - named if not name.startswith("trained-")} == set()


def test_the_chinese_page_has_the_same_items_and_pointers():
    page = (ROOT / "docs" / "coverage.zh-CN.md").read_text()
    assert page == chinese.page(), "run: python docs/generate/chinese.py"
    items = [(row[1], row[4]) for row in chinese.ROW.finditer(page)]
    assert items == [(line.split("|")[1].strip(), by.strip()) for _, by, line in ROWS]


@pytest.mark.parametrize(
    "english", [f"{PAGE}\nA new paragraph.\n", PAGE.replace("| rank collapse |", "| GPAM |")]
)
def test_every_text_must_be_translated(english):
    with pytest.raises(ValueError, match="new paragraph|rank collapse"):
        chinese.coverage(english, json.loads(chinese.TRANSLATED.read_text()))
