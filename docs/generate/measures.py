"""Writes docs/measures.md from the docstrings of ``unsoft.measure``: ``python docs/generate/measures.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from unsoft import measure

PAGE = Path(__file__).parents[1] / "measures.md"
FIRST = (  # on the page; other modules follow in alphabetical order
    "focus",
    "sign",
    "overview",
    "erasing",
    "separation",
    "groups",
    "redundancy",
    "states",
    "slopes",
    "heads",
)


class Entry(NamedTuple):
    """What the docstring of a measure says."""

    name: str
    signature: str
    summary: str
    formula: list[str]
    answers: str
    range: str
    details: list[str]
    example: str


def entry(function: Callable) -> Entry:
    """The parts of a docstring; ValueError names what is missing."""
    text, _, example = inspect.getdoc(function).partition("\n>>> ")
    summary, *paragraphs = text.strip().split("\n\n")
    found: dict[str, str] = {}
    details = []
    for paragraph in paragraphs:
        label = re.match(r"(Range|Answers): ", paragraph)
        if label:
            found[label[1]] = plain(paragraph[label.end() :])
        elif all(line.startswith("    ") for line in paragraph.splitlines()):
            found["formula"] = paragraph
        else:
            details.append(plain(paragraph))
    missing = [part for part in ("formula", "Range", "Answers") if part not in found]
    if missing or not example:
        raise ValueError(f"{function.__name__}: its docstring has no {', '.join(missing) or 'example'}")
    return Entry(
        function.__name__,
        re.sub(r"'|torch\.", "", str(inspect.signature(function)).partition(" ->")[0]),
        plain(summary),
        [line.strip() for line in found["formula"].splitlines()],
        found["Answers"],
        found["Range"],
        details,
        ">>> " + example,
    )


def plain(text: str) -> str:
    """One line of Markdown."""
    text = re.sub(r":\w+:`", "`", " ".join(text.split()))
    return text.replace("``", "`")


class Group(NamedTuple):
    """A module: its question, what it says about all its measures, and they in the order of the source."""

    heading: str
    about: str
    entries: list[Entry]


def groups() -> list[Group]:
    functions = [
        getattr(measure, name) for name in measure.__all__ if inspect.isfunction(getattr(measure, name))
    ]
    placed = []
    others = sorted({f.__module__.rpartition(".")[2] for f in functions} - set(FIRST))
    for module in (*FIRST, *others):
        own = [f for f in functions if f.__module__ == f"unsoft.measure.{module}"]
        own.sort(key=lambda f: f.__code__.co_firstlineno)
        text = inspect.getdoc(inspect.getmodule(own[0]))
        heading = re.match(r".*?[?.]", text)[0]
        about = text.removeprefix(heading).strip().replace("``", "`")
        placed.append(Group(heading.rstrip("."), about, [entry(f) for f in own]))
    return placed


def row(item: Entry) -> str:
    formula = "<br>".join(f"`{line}`" for line in item.formula)
    cells = [f"[{item.name}](#{item.name})", formula, item.range, item.answers]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    lines = [
        "# Measures",
        "",
        "Written by `python docs/generate/measures.py` from the docstrings of `src/unsoft/measure/`; do not"
        " edit by"
        " hand. The",
        "examples of single measures assume `import torch` and `from unsoft.measure import *`.",
        "",
    ]
    for paragraph in inspect.getdoc(measure).replace("``", "`").split("\n\n")[1:]:
        example = paragraph.startswith(">>>")
        lines += ["```pycon", paragraph, "```", ""] if example else [paragraph, ""]
    for group in groups():
        lines += [f"## {group.heading}", "", *([group.about, ""] if group.about else [])]
        lines += [
            "| measure | formula | range | answers |",
            "|---|---|---|---|",
            *map(row, group.entries),
            "",
        ]
        for item in group.entries:
            lines += [f"### {item.name}", "", f"`measure.{item.name}{item.signature}`", "", item.summary, ""]
            for paragraph in item.details:
                lines += [paragraph, ""]
            lines += ["```pycon", *item.example.splitlines(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
