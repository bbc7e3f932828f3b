"""Writes docs/measures.md from the docstrings of ``unsoft.measure``: ``python docs/generate/measures.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from unsoft import measure

PAGE = Path(__file__).parents[1] / "measures.md"
FIRST = ("row_measures", "keys", "erasing", "mechanism", "redundancy", "states", "heads")
"""Modules at the beginning of the page; others follow in alphabetical order."""


class Entry(NamedTuple):
    """The parts of a measure's docstring."""

    name: str
    signature: str
    summary: str
    formula: list[str]
    answers: str
    range: str
    details: list[str]
    example: str


def entry(function: Callable) -> Entry:
    """Return the parts of a docstring; ValueError names what is missing."""
    text, _, example = inspect.getdoc(function).partition("\n>>> ")
    summary, *paragraphs = text.strip().split("\n\n")
    parts: dict[str, str] = {}
    details = []
    for paragraph in paragraphs:
        label = re.match(r"(Range|Answers): ", paragraph)
        if label:
            parts[label[1]] = plain(paragraph[label.end() :])
        elif all(line.startswith("    ") for line in paragraph.splitlines()):
            parts["formula"] = paragraph
        else:
            details.append(plain(paragraph))
    missing = [part for part in ("formula", "Range", "Answers") if part not in parts]
    if missing or not example:
        raise ValueError(f"{function.__name__}: its docstring has no {', '.join(missing) or 'example'}")
    return Entry(
        function.__name__,
        re.sub(r"'|torch\.", "", str(inspect.signature(function)).partition(" ->")[0]),
        plain(summary),
        [line.strip() for line in parts["formula"].splitlines()],
        parts["Answers"],
        parts["Range"],
        details,
        ">>> " + example,
    )


def plain(text: str) -> str:
    """Return the text as one line of Markdown."""
    text = re.sub(r":\w+:`", "`", " ".join(text.split()))
    return text.replace("``", "`")


class Group(NamedTuple):
    """A module: heading, notes on all its measures, and the measures in the order of the source."""

    heading: str
    about: str
    entries: list[Entry]


def groups() -> list[Group]:
    """Return the modules in the order of the page."""
    functions = [
        getattr(measure, name) for name in measure.__all__ if inspect.isfunction(getattr(measure, name))
    ]
    groups = []
    others = {f.__module__.rpartition(".")[2] for f in functions} - set(FIRST)
    for module in (*FIRST, *sorted(others)):
        own = [f for f in functions if f.__module__ == f"unsoft.measure.{module}"]
        own.sort(key=lambda f: f.__code__.co_firstlineno)
        text = inspect.getdoc(inspect.getmodule(own[0]))
        heading = re.match(r".*?[.]", text)[0]
        about = text.removeprefix(heading).strip().replace("``", "`")
        groups.append(Group(heading.rstrip("."), about, [entry(f) for f in own]))
    return groups


def row(item: Entry) -> str:
    formula = "<br>".join(f"`{line}`" for line in item.formula)
    cells = [f"[{item.name}](#{item.name})", formula, item.range, item.answers]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    lines = [
        "# Measures",
        "",
        "Written by `python docs/generate/measures.py` from the docstrings of `src/unsoft/measure/`; do not"
        " edit by hand. The",
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
