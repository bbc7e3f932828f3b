"""A comparison as plain data: what ran, where, what came out, and what it says about the claims."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from unsoft.bench.record import load, machine, versions
from unsoft.compare.job import Answer
from unsoft.compare.level import Level
from unsoft.compare.store import code_digest
from unsoft.compare.subject import Subject
from unsoft.report.claims import judged
from unsoft.report.results import Results
from unsoft.report.scoreboard import scoreboard

SCHEMA = 1


def record(
    subjects: Sequence[Subject],
    answers: Sequence[Answer],
    level: Level,
    *,
    finished: bool,
    command: str,
    out: str = "report",
) -> dict[str, Any]:
    """Ready for JSON. ``finished`` is False for a run that was interrupted; ``out`` is the folder of the page."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "unsoft compare",
        "command": command,
        "out": out,
        "level": dataclasses.asdict(level),
        "finished": finished,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "versions": versions()
        | {name: importlib.metadata.version(name) for name in ("altair", "vl-convert-python")},
        "code": code_digest()[:16],
        "subjects": [
            {
                "label": s.label,
                "summary": s.summary,
                "own": not isinstance(s.mechanism, str),
                "formula": None if s.formula is None else s.formula.to_dict(),
            }
            for s in subjects
        ],  # fmt: skip
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }
    results = Results(content)
    content["scoreboard"] = scoreboard(results)
    content["claims"] = [claim.to_dict() for claim in judged(results)]
    return content
