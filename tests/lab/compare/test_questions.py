"""Pages of docs/questions: what stands beside numbers of models is composed from them."""

import re
from pathlib import Path

import pytest

from docs.generate import model_tables

PAGES = Path(__file__).parents[3] / "docs" / "questions"
NAMES = sorted(page.stem for page in PAGES.glob("*.md") if not page.stem.endswith(".zh-CN"))
ABOUT = {"machine": "a machine", "written": "2026-11-16", "sequences": 4, "length": 8}


@pytest.fixture(scope="module")
def tables():
    return model_tables


def ablated(deleting, others, control, other_deletion=0.0):
    """Losses of four sequences; the plain ones are 3.0 to 3.3."""
    kinds = [("deleting", "head", deleting), ("deleting", "deletion", 0.1), ("others", "head", others)]
    kinds += [("deleting", "as much elsewhere", control), ("others", "deletion", other_deletion)]
    rows = [("none", "", 0.0), *kinds]
    return ABOUT | {
        "deleting": 7,
        "rows": [
            {"heads": h, "part": p, "draw": 0, "losses": [3 + k / 10 + x * (1 + k / 100) for k in range(4)]}
            for h, p, x in rows
        ],
    }


@pytest.mark.parametrize(
    ("deleting", "others", "control", "words"),
    [
        (2.0, 1.0, 0.01, ("costs more than taking others", "costs more than as much elsewhere")),
        (1.0, 2.0, 0.5, ("costs less than taking others", "costs less than as much elsewhere")),
        (1.0, 1.0, 0.1, ("not clearly more or less than taking others", "or less than as much elsewhere")),
    ],
)
def test_the_words_follow_the_losses(tables, deleting, others, control, words):
    page = "\n".join(tables.heads_of({"heads": ablated(deleting, others, control)}))
    assert all(word in page for word in words), page
    assert "has 7 heads" in page and f"| deleting | head | {deleting:.1f}" in page


@pytest.mark.parametrize(("decoded", "word"), [(0.8, "evolution"), (0.02, "noise")])
def test_the_word_of_a_depth_follows_its_numbers(tables, decoded, word):
    states = {"rank": [0.9, 0.91], "decoded": [decoded] * 2, "moved": [0.7, 0.8], "target": [0.2, 0.2]}
    kept = {"states-minilm": ABOUT | {"depths": [0, 3], "measured": [states, states]}}
    (row,) = [line for line in tables.states_of(kept, "minilm") if line.startswith("| 3 ")]
    assert row.endswith(f"| {word} |")


def test_what_was_not_measured_is_left_out(tables):
    assert tables.heads_of({}) == tables.trained_of({}) == tables.states_of({}, "minilm") == []


def test_an_answer_does_not_outlive_its_verdict(monkeypatch):
    monkeypatch.syspath_prepend(Path(model_tables.__file__).parent)
    from docs.generate import questions

    name, (claim, *_) = "deletion", questions.WRITTEN_FOR["deletion"]
    claims = [{"name": claim, "verdict": "not supported"}]
    with pytest.raises(ValueError, match=f"written for claim {claim!r}.*'not supported'"):
        questions.page(name, {"claims": claims})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("suffix", "answer"), [("", "**Answer.**"), (".zh-CN", "**回答。**")])
def test_every_page_answers_first(name, suffix, answer):
    text = (PAGES / f"{name}{suffix}.md").read_text()
    assert text.index(answer) < text.index("![") < text.index("|---")
    assert suffix or "arXiv" in text


@pytest.mark.parametrize("name", NAMES)
def test_chinese_pages_have_the_numbers_of_the_english_ones(name):
    english, chinese = ((PAGES / f"{name}{suffix}.md").read_text() for suffix in ("", ".zh-CN"))
    numbers = set(re.findall(r"\d+\.\d+", chinese))
    assert len(numbers) > 5 and numbers <= set(re.findall(r"\d+\.\d+", english))
    assert not re.search(r"[a-z]{2,} [a-z]{2,}", re.sub("`.*?`", "", chinese)), "words without translation"
