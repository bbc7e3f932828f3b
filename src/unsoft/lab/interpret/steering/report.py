"""The files of a check: the record with the verdict that ``unsoft compare`` reads, tables, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import unsoft
from unsoft.files import write_csv, write_json, write_whole
from unsoft.lab.interpret.steering.controls import VERDICT_RULE, Judgement
from unsoft.lab.report.page import line_chart, page

HERE = Path(__file__).parent
SCHEMA = 1
RECORD = "steering.json"


def write(
    folder: Path,
    model: str,
    judgement: Judgement,
    command: str,
    *,
    claim: str = "steering-text",
    score: str = "log odds of the words to go toward",
    measures: Sequence[dict[str, Any]] = (),
    maps: Sequence[dict[str, Any]] = (),
    pictures: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """steering.json, controls.csv, doses.csv and steering.html; returns what was written.

    ``claim`` is the name of what is judged, as in ``unsoft compare``; ``score`` says what is scored.
    ``measures`` are rows of what else was measured before and after, ``maps`` rows of how true the maps of
    relevance are, and ``pictures`` those maps with their words; page.html shows which fields they have.
    """
    record = {
        "schema": SCHEMA,
        "model": model,
        "command": command,
        "score": score,
        "verdicts": [
            {"claim": claim, "model": model, "verdict": judgement.verdict, "found": judgement.told()}
        ],
        "rule": VERDICT_RULE,
        **judgement.to_dict(),
        "measures": list(measures),
        "maps": list(maps),
        "versions": {
            "unsoft": unsoft.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    write_json(folder / RECORD, record)
    write_csv(folder / "controls.csv", [asdict(one) for one in judgement.controls])
    write_csv(folder / "doses.csv", judgement.doses)
    write_whole(folder / "steering.html", steering_page(record, pictures).encode())
    return [folder / name for name in (RECORD, "controls.csv", "doses.csv", "steering.html")]


def steering_page(record: dict[str, Any], pictures: Sequence[dict[str, Any]] = ()) -> str:
    """The text of an HTML file that needs nothing else, from the content of steering.json."""
    doses = record["doses"]
    chart = line_chart([dose["strength"] for dose in doses], [dose["mean"] for dose in doses], "strength")
    return page(
        HERE / "page.html",
        title=f"unsoft steer: {record['model']}",
        styles=[HERE / "page.css"],
        data={},
        record=record,
        chart=chart,
        pictures=pictures,
    )
