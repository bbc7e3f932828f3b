"""Writes the table of mechanisms into README.md: python docs/readme_table.py

The rows are those of the registry; tests/test_readme.py says when they are stale.
"""

import re
from pathlib import Path

import unsoft

README = Path(__file__).parents[1] / "README.md"
HEAD = "| mechanism | | signed | sparse | row sum |\n|---|---|---|---|---|\n"


def row(name: str, summary: str, properties: object) -> str:
    marks = ("yes" if getattr(properties, mark) else "" for mark in ("signed", "sparse"))
    return f"| {name} | {summary} | {' | '.join(marks)} | {properties.row_sum} |\n"


found = unsoft.mechanisms()
rows = "".join(
    row(line["name"], mechanism.summary, mechanism.properties)
    for line, mechanism in zip(found.rows(), found.values(), strict=True)
)
text = README.read_text()
README.write_text(re.sub(re.escape(HEAD) + r"(?:\|.*\n)+", lambda _: HEAD + rows, text))
