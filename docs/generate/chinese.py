"""Write docs/coverage.zh-CN.md from docs/coverage.md: ``python docs/generate/chinese.py``.

Item numbers and pointers are those of the English page. Texts are translated by coverage.zh-CN.json, whose
keys are the English texts: a text that changes there must be translated again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1]
TRANSLATED = Path(__file__).with_name("coverage.zh-CN.json")
ROW = re.compile(r"\| (\d+) \| (.+) \| (.+) \| (.+) \|")
"""Number, text, state and pointers of an item."""


def coverage(english: str, translated: Mapping[str, str]) -> str:
    """Return the Chinese page.

    Raises ValueError if a text has no translation, or a translation no text.
    """
    used = set()

    def chinese(text: str) -> str:
        used.add(text)
        return translated.get(text, "")

    def row(line: str) -> str:
        if item := ROW.fullmatch(line):
            number, text, state, pointers = item.groups()
            return f"| {number} | {chinese(text)} | {chinese(state)} | {pointers} |"
        return line if set(line) == {"|", "-"} else chinese(line)

    blocks = [
        "\n".join(map(row, block.splitlines())) if block.startswith("|") else chinese(" ".join(block.split()))
        for block in english.strip().split("\n\n")
    ]
    if wrong := used ^ set(translated):
        raise ValueError(f"{TRANSLATED.name}: without translation or no longer used: {sorted(wrong)}")
    return "\n\n".join(blocks) + "\n"


def page() -> str:
    """Return docs/coverage.zh-CN.md as it should be."""
    return coverage((DOCS / "coverage.md").read_text(), json.loads(TRANSLATED.read_text()))


if __name__ == "__main__":
    (DOCS / "coverage.zh-CN.md").write_text(page())
