"""Write the table of docs/gpu.md from the recorded compiler output: ``python docs/generate/gpu.py``.

``python -m tests.engines.triton.compiled.table`` and ``.families`` compile all kernels and update the record.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "gpu.md"
RECORDS = PAGE.parents[1] / "tests" / "engines" / "triton" / "compiled"


def record(name: str) -> list[dict[str, str]]:
    """Return the lines of a file of the record."""
    with (RECORDS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def resources() -> str:
    """Return the largest resources of a kernel for each target, and how many kernels spill in a loop."""
    formulas, others = record("resources.csv"), record("families.csv")
    head = ("target", "kernels compiled", "registers, at most", "shared memory, at most")
    lines = [_line(head), "|---" * len(head) + "|"]
    for target in dict.fromkeys(row["target"] for row in formulas):
        rows = [row for row in (*formulas, *others) if row["target"] == target]
        registers, shared = (max(int(row[name]) for row in rows) for name in ("registers", "shared"))
        lines.append(_line((target, str(len(rows)), str(registers), f"{shared / 1024:.0f} KiB")))
    spilling = sum(int(row["in_loops"]) > 0 for row in (*formulas, *others))
    names = ", ".join(dict.fromkeys(row["formula"] for row in formulas))
    text = f"Formulas: {names}, at head widths 64 and 128, in bfloat16; and linear attention and magnitude."
    return "\n".join([*lines, "", text, f"Kernels with a spilled register in a loop: {spilling}."]) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(text: str) -> str:
    """Return the page with its table updated."""
    begin, end = "<!-- resources -->\n", "<!-- end of resources -->\n"
    return re.sub(f"{begin}.*?{end}", lambda _: begin + resources() + end, text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
