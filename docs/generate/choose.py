"""Write the tables of docs/choose.md from what ``unsoft compare`` measured.

``python docs/generate/choose.py report [report ...]`` keeps the scoreboards of these folders in
docs/choose.json (the first that measured a cell counts) and writes the page; with ``--update`` what they did
not measure stays as it is. Without a folder it writes the page alone.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from unsoft.files import write_json, write_whole
from unsoft.lab.compare.jobs import Results
from unsoft.lab.compare.output import read_record
from unsoft.lab.compare.sections import gating
from unsoft.lab.report.page import number
from unsoft.mechanisms import mechanisms

HERE = Path(__file__).parents[1]
PAGE, RECORD = HERE / "choose.md", HERE / "choose.json"
AIMS = {"clones": 1.0, "clones_fitted": 1.0}
"""Columns whose best number is in the middle: those nearest to it, in ratio, come first."""
NEEDS = {  # a column that is not named here is shown by its own title
    "needle": "one key to win among a thousand",
    "clones": "fifty copies counted as one, without training",
    "clones_fitted": "fifty copies counted as one, with a fitted gate",
    "opposed": "opposed keys told apart from irrelevant ones",
    "deletes": "one head that adds for some queries and erases for others",
    "learns": "fast learning from a key that was ignored",
    "rank": "deep attention that keeps its rank",
    "identity": "tokens that stay distinct with depth",
    "decoding": "decoding as fast as softmax",
    "training": "training as fast as PyTorch's fused softmax",
    "memory": "no more training memory than PyTorch's fused softmax",
    "trained": "better scores than softmax after training",
}
KEPT = ("command", "written", "machine", "threads", "load", "versions", "code")
SHOWN = 6
ANCHORS = {  # in docs/mechanisms.md, where the heading has the argument too
    name: "".join(c for c in row["name"] if c.isalnum() or c in "-_")
    for name, row in zip(mechanisms(), mechanisms().rows(), strict=True)
}


def keep(reports: list[Path], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Merge the scoreboards of the reports; the first that measured a cell counts, ``earlier`` comes last."""
    runs: list[dict[str, Any]] = []
    columns: dict[str, Any] = {}
    board: dict[str, dict[str, Any]] = {}
    for report in reports:
        content = read_record(report / "compare.json")
        used = []
        for row in content["scoreboard"]:
            cells = board.setdefault(row["mechanism"], {})
            new = {name: cell for name, cell in row["cells"].items() if cell["value"] is not None} | cells
            if new.keys() != cells.keys():
                board[row["mechanism"]] = new
                used.append(row["mechanism"])
        columns = {column["name"]: column for column in content["columns"]} | columns
        timed = any(column["section"] == "cost" for column in content["columns"])
        runs.append({key: content[key] for key in KEPT} | {"mechanisms": used, "timed": timed})
    if earlier is not None:
        for row in earlier["scoreboard"]:
            cells = board.get(row["mechanism"], {})
            old = {name: cell for name, cell in row["cells"].items() if not cells or name not in columns}
            board[row["mechanism"]] = old | cells
        # Columns and mechanisms keep their places in the tables.
        order = [column["name"] for column in earlier["columns"]]
        columns = {column["name"]: column for column in earlier["columns"]} | columns
        columns = {name: columns[name] for name in dict.fromkeys([*order, *columns])}
        names = dict.fromkeys([*(row["mechanism"] for row in earlier["scoreboard"]), *board])
        board = {name: board[name] for name in names}
        runs += earlier["runs"]
    rows = [{"mechanism": name, "cells": cells} for name, cells in board.items()]
    first = json.loads((reports[0] / "compare.json").read_text())
    claims = [{key: claim[key] for key in ("name", "verdict", "found")} for claim in first["claims"]]
    return {
        "runs": runs,
        "columns": list(columns.values()),
        "scoreboard": rows,
        "claims": claims,
        "clones": gating.all_counts(Results(first)),
    }


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def cell(value: dict[str, Any]) -> str:
    """Return a number, marked if the measurement ended there.

    >>> cell({"value": 64.0, "beyond": True}), cell({"value": 0.0457, "beyond": False}), cell({"value": None})
    ('≥ 64', '0.046', '')
    >>> cell({"value": 0.3, "beyond": False, "low": 0.25, "high": 0.35, "note": "3 tasks: a, b, c"})
    '+0.300 (+0.250 to +0.350, 3 tasks)'
    """
    if value["value"] is None:
        return ""
    if "note" in value:  # a difference to softmax
        basis = value["note"].partition(":")[0]
        if "low" not in value:
            return basis
        return f"{value['value']:+.3f} ({value['low']:+.3f} to {value['high']:+.3f}, {basis})"
    short = f"{value['value']:.2g}" if abs(value["value"]) < 100 else number(float(value["value"]))
    return ("≥ " if value["beyond"] else "") + short


def decisions(record: dict[str, Any]) -> str:
    """Return a table of needs: the mechanisms that read "yes", best first, and softmax's number."""
    lines = ["| you need | take (measured) | softmax | measured as |", "|---|---|---|---|"]
    for column in record["columns"]:
        cells = {
            row["mechanism"]: row["cells"].get(column["name"], {"value": None})
            for row in record["scoreboard"]
        }
        taken = (
            best(cells, "yes", column) or best(cells, "partly", column, "none fully; partly ") or "not run"
        )
        softmax = cells.get("softmax", {"value": None})
        reading = f"{cell(softmax)} ({softmax['reading']})" if softmax["value"] is not None else "not run"
        if softmax.get("note") == "reference":
            reading = "reference"
        need = NEEDS.get(column["name"], column["title"])
        unit = f" ({column['unit']})" if column["unit"] else ""
        lines.append(f"| {need} | {taken} | {reading} | {column['help']}{unit} |")
    return "\n".join(lines) + "\n"


def best(cells: dict[str, Any], reading: str, column: dict[str, Any], before: str = "") -> str:
    """Return the mechanisms with this reading, best first, each with its number and a link."""
    names = [name for name, one in cells.items() if one["value"] is not None and one["reading"] == reading]
    aim, down = AIMS.get(column["name"]), not column["low_is_good"]
    values = {name: cells[name]["value"] for name in names}
    if aim:
        values, down = {name: abs(math.log(value / aim)) for name, value in values.items()}, False
    names.sort(key=values.__getitem__, reverse=down)
    shown = [f"[{name}](mechanisms.md{_anchor(name)}) {cell(cells[name])}" for name in names[:SHOWN]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return before + ", ".join(shown) + more if names else ""


def _anchor(name: str) -> str:
    """Return the anchor of a mechanism's heading; none for a composition."""
    return f"#{ANCHORS[name]}" if name in ANCHORS else ""


MARKS = {"yes": "●", "partly": "◐", "no": "○"}


def scoreboard(record: dict[str, Any]) -> str:
    """Return a table of every mechanism and every column."""
    columns = record["columns"]
    lines = ["| mechanism | " + " | ".join(column["title"] for column in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in record["scoreboard"]:
        cells = [row["cells"].get(column["name"], {"value": None}) for column in columns]
        shown = [
            f"{MARKS.get(one['reading'], '')} {cell(one)}" if one["value"] is not None else ""
            for one in cells
        ]
        lines.append(f"| {row['mechanism']} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def about(record: dict[str, Any]) -> str:
    """Return a list of the runs that the numbers come from."""
    lines = []
    for run in record["runs"]:
        busy = (
            f"; load {run['load']:.1f} on {run['threads']} threads, so its times are rough"
            if run["load"] > run["threads"] and run.get("timed", True)
            else ""
        )
        lines.append(
            f"- `{run['command']}`, {run['machine']}, torch {run['versions']['torch']},"
            f" {run['written'][:10]}{busy}: {', '.join(run['mechanisms'])}"
        )
    return "\n".join(lines) + "\n"


def by_mechanism() -> dict[str, list[str]]:
    """Return the measurements of each mechanism as lines of Markdown for its page."""
    record = read()
    made: dict[str, list[str]] = {}
    for row in record["scoreboard"]:
        lines = ["| question | found | reading |", "| --- | --- | --- |"]
        for column in record["columns"]:
            answer = row["cells"].get(column["name"], {"value": None})
            if answer["value"] is not None:
                has_interval = "low" in answer and "note" not in answer  # a note comes with the interval
                interval = f" ({number(answer['low'])} to {number(answer['high'])})" if has_interval else ""
                lines.append(
                    f"| {column['title']} | {cell(answer)} {column['unit']}{interval} | {answer['reading']} |"
                )
        made[row["mechanism"]] = [
            *lines,
            "",
            "All mechanisms side by side: [choose a mechanism](../choose.md).",
        ]
    return made


def page(text: str, record: dict[str, Any]) -> str:
    """Return the page with new tables."""
    for name, block in (
        ("decisions", decisions(record)),
        ("scoreboard", scoreboard(record)),
        ("about", about(record)),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + block + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    folders = [Path(folder) for folder in sys.argv[1:] if folder != "--update"]
    if folders:
        write_json(RECORD, keep(folders, read() if "--update" in sys.argv else None))
    write_whole(PAGE, page(PAGE.read_text(), read()).encode())
