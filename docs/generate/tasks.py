"""Runs the default of every task and writes what it found into docs/tasks.md.

``python docs/generate/tasks.py`` runs what ``docs/tasks.json`` does not have yet, one after another, and
writes the
record after each; ``--only NAME ...`` some tasks, ``--again`` also what is there, ``--table`` the page alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch

import unsoft
from unsoft.files import write_json, write_whole
from unsoft.lab.training import Spec, train

DOCS = Path(__file__).parents[1]
PAGE, RECORD = DOCS / "tasks.md", DOCS / "tasks.json"
START, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
RIVALS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # The mechanism that should do better than softmax, its options, and what else is not the default.
    "census": ("magnitude+softmax", {"where": "mass"}, {}),
    "deletion": ("cog", {}, {}),
    "focus": ("logn+softmax", {}, {}),
    "needle": ("magnitude+softmax", {"where": "mass"}, {}),
    "opposition": ("cog", {}, {}),
    "trigger": ("relu2", {}, {}),
}


def runs() -> list[Spec]:
    """Every task with softmax, and beside it the mechanism that should win."""
    found = []
    for name in unsoft.lab.tasks.tasks():
        found.append(Spec(task=name))
        if name in RIVALS:
            mechanism, options, more = RIVALS[name]
            found.append(Spec(task=name, mechanism=mechanism, options=options, **more))
    return found


def measured(spec: Spec) -> dict[str, Any]:
    """One run, as a row of the record."""
    begin = time.process_time()
    result = train(spec)
    hardest = result.score_by[-1] if result.score_by else None
    return {
        "run": spec.to_dict(),
        "metric": result.metric,
        "score": round(result.score, 4),
        "chance": round(result.chance, 4),
        "shortcut": None if result.shortcut is None else round(result.shortcut, 4),
        "known": round(result.known, 4),
        "hardest": None
        if hardest is None
        else [result.difficulty, hardest["value"], round(hardest["score"], 4)],
        "first_token": [round(value, 3) for value in result.attention["first_token"]],
        "steps": result.steps,
        "seconds": round(time.process_time() - begin, 1),
        "date": datetime.date.today().isoformat(),
        "versions": result.versions,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| task | mechanism | score | chance | shortcut | known | hardest test | steps | seconds | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run, hardest = row["run"], row["hardest"]
        options = " ".join(f"{name}={value}" for name, value in run["options"].items())
        cells = [
            run["task"],
            f"{run['mechanism']} {options}".strip(),
            f"{row['score']:.3f}",
            f"{row['chance']:.3f}",
            "" if row["shortcut"] is None else f"{row['shortcut']:.3f}",
            f"{row['known']:.3f}",
            "" if hardest is None else f"{hardest[2]:.3f} ({hardest[0]} {hardest[1]})",
            str(row["steps"]),
            f"{row['seconds']:.0f}",
            row["date"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with another table."""
    before, rest = text.split(START)
    return before + START + table(rows) + END + rest.split(END)[1]


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="some tasks, in this order")
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    order = [json.dumps(spec.to_dict()) for spec in runs()]
    rows = {json.dumps(row["run"]): row for row in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    names = given.only or list(unsoft.lab.tasks.tasks())
    for spec in sorted((one for one in runs() if one.task in names), key=lambda one: names.index(one.task)):
        key = json.dumps(spec.to_dict())
        if not given.table and (given.again or key not in rows):
            print(spec.task, spec.mechanism, flush=True)
            rows[key] = measured(spec)
            print(rows[key]["score"], rows[key]["seconds"], flush=True)
        write_json(RECORD, [rows[one] for one in order if one in rows])
    write_whole(PAGE, page(PAGE.read_text(), [rows[one] for one in order if one in rows]).encode())


if __name__ == "__main__":
    main()
