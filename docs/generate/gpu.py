"""Write the tables of docs/gpu.md from the recorded compiler output: ``python docs/generate/gpu.py``.

``python -m tests.engines.triton.compiled.table`` compiles all kernels and updates the record.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "gpu.md"
ROOT = PAGE.parents[1]
RECORD = ROOT / "tests" / "engines" / "triton" / "compiled" / "resources.csv"
FAMILIES = RECORD.with_name("families.csv")
ESTIMATED = ("cog", "softmax", "softpick")
"""Shown on the page: a signed formula, the usual one, and one whose functions take many instructions."""
UNITS = ("matrix", "special", "fma", "alu", "memory", "issue")


def record(path: Path = RECORD) -> list[dict[str, str]]:
    """Return the lines of a file of the record."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def resources() -> str:
    """Return the resources of cog's kernels, the list of recorded formulas, and whether any kernel spills."""
    head = ("target", "width", "kernel", "tile (rows x keys)", "registers", "shared memory, KiB", "products")
    lines, rows = [_line(head), "|---" * len(head) + "|"], record()
    for row in rows:
        if row["formula"] == "cog" and row["kernel"] != "combine":
            tile = f"{row['rows']} x {row['keys']}, {row['warps']} warps, {row['stages']} stages"
            shared = f"{int(row['shared']) / 1024:.0f}"
            cells = (
                row["target"],
                row["width"],
                _kernel(row),
                tile,
                row["registers"],
                shared,
                row["products"],
            )
            lines.append(_line(cells))
    formulas, targets, widths = (
        list(dict.fromkeys(row[name] for row in rows)) for name in ("formula", "target", "width")
    )
    kernels = {row["kernel"] for row in rows}
    if len(rows) != len(formulas) * len(targets) * len(widths) * len(kernels):
        raise ValueError(f"{RECORD} lacks some kernels; make it anew")
    inside = sum(int(row["in_loops"]) > 0 for row in rows)
    subject = f"{inside} of them access" if inside else "None of them accesses"
    lines += [
        "",
        f"`{RECORD.relative_to(ROOT)}` has {len(rows)} kernels: {', '.join(formulas)} (a formula of a user",
        f"with a parameter), each for {', '.join(targets)} at widths {' and '.join(widths)}.",
        f"{subject} a spilled register in a loop that multiplies matrices.",
    ]
    return "\n".join(lines) + "\n"


def estimate() -> str:
    """Return the cycles by unit, and the speed that follows."""
    head = ("GPU", "width", "formula", "kernel", *UNITS, "TFLOP/s, turns to overlap")
    lines = [_line(head), "|---" * len(head) + "|"]
    for row in record():
        if row["gpu"] and row["formula"] in ESTIMATED:
            cycles = {unit: float(row[unit]) for unit in UNITS}
            busiest = max(cycles, key=lambda unit: cycles[unit])
            cells = [f"**{x:.3f}**" if unit == busiest else f"{x:.3f}" for unit, x in cycles.items()]
            speed = f"{row['turns']} to {row['overlap']}"
            lines.append(_line((row["gpu"], row["width"], row["formula"], _kernel(row), *cells, speed)))
    return "\n".join(lines) + "\n"


def families() -> str:
    """Return the largest resources of a kernel of each family, by target and width."""
    head = (
        "kernels of",
        "target",
        "width",
        "kernels",
        "registers, most",
        "shared memory, KiB, most",
        "products",
    )
    lines, groups = [_line(head), "|---" * len(head) + "|"], {}
    for row in record(FAMILIES):
        groups.setdefault((row["family"], row["target"], row["width"]), []).append(row)
    for key, rows in groups.items():
        registers, shared = (max(int(row[name]) for row in rows) for name in ("registers", "shared"))
        products = sum(int(row["products"]) for row in rows)
        lines.append(_line((*key, str(len(rows)), str(registers), f"{shared / 1024:.0f}", str(products))))
    spilled = [
        f"{row['kernel']} ({row['family']}) on {row['target']} at {row['width']}"
        for row in record(FAMILIES)
        if int(row["in_loops"])
    ]
    kernels = f"{', '.join(spilled)}; no others" if spilled else "none"
    last = f"Spilled registers in a loop that multiplies matrices: {kernels}."
    return "\n".join([*lines, "", last]) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _kernel(row: dict[str, str]) -> str:
    return row["kernel"].replace("_", " ")


def page(text: str) -> str:
    """Return the page with its tables updated."""
    contents = {"resources": resources(), "estimate": estimate(), "families": families()}
    for name, content in contents.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        text = re.sub(f"{begin}.*?{end}", lambda _, new=begin + content + end: new, text, flags=re.S)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
