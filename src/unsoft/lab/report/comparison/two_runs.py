"""Two runs side by side: did a change help?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsoft.lab.report.comparison.page import SCHEMA
from unsoft.lab.report.page import page

HERE = Path(__file__).parent


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file that ``unsoft compare`` wrote; ValueError that names the file otherwise."""
    try:
        found = json.loads(path.read_text())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(found, dict) or found.get("kind") != "unsoft compare" or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} was not written by this version of unsoft compare; it writes compare.json")
    return found


def caveats(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What else differs between two runs than the change that is asked
    about; on the page and in the terminal alike.
    """
    found = []
    if first["level"] != second["level"]:
        names = [run["level"]["name"] for run in (first, second)]
        how = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"{names[0]}, with other sizes"
        found.append(f"The runs are of different levels ({how}): their numbers differ for that reason too.")
    if first["machine"] != second["machine"]:
        found.append(
            "The runs are from different machines: their times cannot be compared, though ratios to"
            " PyTorch's softmax partly can."
        )
    for place, run in (("first", first), ("second", second)):
        if not run["finished"]:
            found.append(f"The {place} run was interrupted.")
        if any(answer.get("disturbed") for answer in run["answers"]):
            found.append(f"Other programs used the machine while the {place} run took times.")
    return found


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each mechanism and question that either run answered:
    both numbers, the change, and a word for it.
    """
    cells = [
        {
            (row["mechanism"], name): cell["value"]
            for row in record["scoreboard"]
            for name, cell in row["cells"].items()
        }
        for record in (first, second)
    ]
    rows = []
    for mechanism in dict.fromkeys(name for side in cells for name, _ in side):
        for column in second["columns"]:
            a, b = (side.get((mechanism, column["name"])) for side in cells)
            if a is None and b is None:
                continue
            rows.append(
                {
                    "mechanism": mechanism,
                    "question": column["title"],
                    "first": a,
                    "second": b,
                    "change": None if a is None or b is None else b - a,
                    "word": _word(column, a, b),
                }
            )
    return rows


def changed_claims(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Claims whose verdict differs."""
    before = {claim["name"]: claim for claim in first["claims"]}
    return [
        {"claim": claim["text"], "first": before[claim["name"]]["verdict"], "second": claim["verdict"]}
        for claim in second["claims"]
        if claim["name"] in before and before[claim["name"]]["verdict"] != claim["verdict"]
    ]


def two_runs_page(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The text of an HTML file that needs nothing else."""
    rows = differences(first, second)
    return page(
        HERE / "two_runs.html",
        title=f"unsoft compare: {names[0]} and {names[1]}",
        styles=[HERE / "page.css"],
        data={},
        names=names,
        records=(first, second),
        rows=rows,
        caveats=caveats(first, second),
        noisy=[(c["title"], c["noise"]) for c in second["columns"] if c["noise"] > 0.001],
        counts={
            word: sum(row["word"] == word for row in rows)
            for word in ("better", "worse", "same", "only in one")
        },
        claims=changed_claims(first, second),
    )


def _word(column: Mapping[str, Any], a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return "only in one"
    if abs(b - a) <= column["noise"] * max(abs(a), abs(b)):
        return "same"
    return "better" if (b < a) == column["low_is_good"] else "worse"
