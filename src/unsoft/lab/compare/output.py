"""Output of a comparison: its record as plain data, and a folder with the page, tables and pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from altair.utils.schemapi import debug_mode

from unsoft.files import write_csv, write_json, write_whole
from unsoft.formula.display import CURVE_LOGITS, other_logits
from unsoft.lab.bench.machine import load, machine, versions
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.conclusion import best_for, effect, sentences
from unsoft.lab.compare.jobs import Answer, Results, can_fork, in_processes
from unsoft.lab.compare.plan import sections
from unsoft.lab.compare.section import BASELINE, KINDS, Claim, Request, Section
from unsoft.lab.compare.store import AnswerStore, code_digest, key_of
from unsoft.lab.evidence import VERDICTS
from unsoft.lab.report.comparison import SCHEMA, Playground, comparison_page
from unsoft.lab.report.figure import Figure, has_drawn, svg_and_png, vega_script
from unsoft.mechanisms import formulas, summary_of
from unsoft.theory.hijack import magnitude_hijack

PAGE, RECORD = "index.html", "compare.json"
_CHINESE = Path(__file__).with_name("chinese.json")
TEXTS: dict[str, dict[str, str]] = {"en": {}, "zh": json.loads(_CHINESE.read_text(encoding="utf-8"))}
"""English texts of the page to those of each language, in which a missing text stays English;
:func:`unsoft.lab.report.page.translator` explains "#", "{name}" and "~"."""


def record(
    request: Request,
    answers: Sequence[Answer],
    *,
    only: Sequence[str] = (),
    finished: bool,
    command: str,
    out: str = "report",
) -> dict[str, Any]:
    """Return everything that was measured and concluded, ready for JSON.

    ``only`` are the names of the requested sections, all if empty. ``finished`` is False for a run that was
    interrupted; ``out`` is the folder of the page.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "unsoft compare",
        "command": command,
        "out": out,
        "model": request.model,
        "study": request.study,
        "level": dataclasses.asdict(request.level),
        "finished": finished,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "versions": versions("altair", "vl-convert-python"),
        "code": code_digest()[:16],
        "subjects": [
            {"label": one.label, "summary": one.summary, "own": one.own}
            | {"formula": None if one.formula is None else one.formula.to_dict()}
            for one in request.candidates
        ],
        "answers": [dict(vars(answer)) for answer in answers],  # asdict would copy every row
    }
    return content | conclusions(Results(content), request.level.name, only)


def conclusions(results: Results, level: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return the scoreboard and the verdicts on claims of the requested sections as plain data."""
    requested = sections(only, results.record)
    columns = [(section, column) for section in requested for column in section.columns]
    fields = (
        *("name", "title", "help", "low_is_good", "noise", "unit", "thresholds", "why", "reference"),
        *("group", "need", "aim", "is_ratio"),
    )

    def row(label: str, summary: str) -> dict[str, Any]:
        cells = {column.name: column.cell(results, label) for _, column in columns}
        for _, column in columns:
            if versus := cells[column.name].get("versus"):
                versus["text"] = effect(versus, vars(column))
        return {"mechanism": label, "summary": summary, "cells": cells}

    content = {
        "columns": [
            {"section": section.name, "recorded": section.recorded(results) if section.recorded else ""}
            | {name: getattr(column, name) for name in fields}
            for section, column in columns
        ],
        "scoreboard": [row(subject["label"], subject["summary"]) for subject in results.record["subjects"]],
        "baseline": row(BASELINE, summary_of(BASELINE)),
        "claims": [
            _judged(claim, section, results, level) for section in requested for claim in section.claims
        ],
        "verdicts": VERDICTS,
        "kinds": KINDS,
    }
    whole = {**results.record, **content}
    return content | {"conclusions": sentences(whole), "best": best_for(whole)}


def _judged(claim: Claim, section: Section, results: Results, level: str) -> dict[str, Any]:
    verdict, numbers = claim.judge(results)
    fields = ("name", "source", "text", "kind", "rule", "refuted", "counts")
    return {name: getattr(claim, name) for name in fields} | {
        "section": section.evidence or (section.name if section.is_shown else ""),
        "verdict": verdict,
        "found": numbers,
        "command": command_again(claim.name, level),
    }


def command_again(claim: str, level: str) -> str:
    """Return the command that measures one claim again, at the level of the run.

    >>> command_again("few-steps", "quick")
    'unsoft compare --claim few-steps --quick --again'
    """
    flag = f" --{level}" if level in ("quick", "full") else ""
    return f"unsoft compare --claim {claim}{flag} --again"


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a comparison; ValueError unless this version of unsoft can read it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / RECORD
    >>> write_json(path, {"kind": "unsoft compare", "schema": 1})
    >>> read_record(path)
    Traceback (most recent call last):
    ValueError: ...
    """
    try:
        content = json.loads(path.read_text())
    except OSError as problem:
        raise ValueError(f"compare: {str(path)!r} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"compare: {str(path)!r} is not JSON: {problem}") from None
    if not isinstance(content, dict) or content.get("kind") != "unsoft compare":
        raise ValueError(f"compare: {str(path)!r} is not a record of unsoft compare")
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"compare: {str(path)!r} was written by another version of unsoft (schema"
            f" {content.get('schema')}, not {SCHEMA}); run unsoft compare again with another --out"
        )
    return content


def views_of(results: Results, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the requested sections as the page shows them."""
    with debug_mode(False):  # charts that our own code makes need not be validated part by part
        views = [section.view(results) for section in sections(only, results.record)]
    return [view for view in views if view is not None]


def playground(results: Results, candidates: Sequence[Candidate], *, every: bool = True) -> Playground:
    """Return the compared formulas, then with ``every`` all others, which imports all mechanisms.

    Curves are those of the section "sign", if it ran.
    """
    own = {c.label: c.formula for c in candidates if c.formula is not None and not c.formula.fields}
    others = formulas() if every else {}
    rows = {c.label: results.get("curves", c.label) for c in candidates if c.formula is None}
    return Playground(
        formulas=own | {name: formula for name, formula in others.items() if name not in own},
        eps=inspect.signature(magnitude_hijack).parameters["eps"].default,
        logits=CURVE_LOGITS,
        others=other_logits().tolist(),
        curves={label: [row["weight"] for row in curve] for label, curve in rows.items() if curve},
    )


def write(
    out: Path,
    content: dict[str, Any],
    views: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    store: AnswerStore,
    *,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    processes: int = 1,
    lang: str = "en",
) -> dict[str, int]:
    """Write everything into the folder ``out`` and return the number of tables and figures.

    ``only`` are the requested sections: a page of some sections has no further formulas in its playground.
    ``say`` gets progress messages; ``lang``, "en" or "zh", is the language of the page's fixed texts.
    Pictures are drawn in ``processes`` copies of this process where that is safe.
    """
    figures: list[Figure] = [figure for view in views for figure in view["figures"]]
    results = Results(content)
    for folder in (out, out / "data", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    # Before this process bundles scripts itself, since copies must not inherit the threads that starts.
    _write_pictures(out / "figures", figures, say, processes)
    play = playground(results, candidates, every=not only)
    page = comparison_page(content, results.labels, views, play, vega(store), lang, TEXTS[lang])
    write_whole(out / PAGE, page.encode())
    write_json(out / RECORD, content)
    tables = {figure.name: figure.rows for figure in figures}
    tables["scoreboard"] = [
        {"mechanism": row["mechanism"]} | {name: cell["value"] for name, cell in row["cells"].items()}
        for row in content["scoreboard"]
    ]
    tables["claims"] = content["claims"]
    for name, rows in tables.items():
        if rows:
            write_csv(out / "data" / f"{name}.csv", rows)
    return {"tables": sum(map(bool, tables.values())), "figures": len(figures)}


def _write_pictures(
    folder: Path, figures: Sequence[Figure], say: Callable[[str], None], processes: int
) -> None:
    """Write PNG and SVG of figures whose specification has changed."""
    index_path = folder / "index.json"
    try:
        index = json.loads(index_path.read_text())
    except (OSError, ValueError):
        index = {}
    stale: dict[str, tuple[str, dict[str, Any]]] = {}
    for figure in figures:
        spec = figure.for_file()
        digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        if index.get(figure.name) != digest or not all(
            (folder / f"{figure.name}.{kind}").exists() for kind in ("svg", "png")
        ):
            stale[figure.name] = (digest, spec)
    for name, pictures in _drawn({name: spec for name, (_, spec) in stale.items()}, processes):
        say(f"drew {name}")
        for kind, picture in pictures.items():
            write_whole(folder / f"{name}.{kind}", picture)
        write_json(folder / f"{name}.json", stale[name][1])  # Vega-Lite, with the data
        index[name] = stale[name][0]
        write_json(index_path, index)


def _drawn(specs: dict[str, dict[str, Any]], processes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield each picture with its name, in the order in which they are drawn."""
    left = dict(specs)
    if processes > 1 and len(specs) > 1 and can_fork() and not has_drawn():
        names = list(specs)
        for index, pictures in in_processes([partial(svg_and_png, specs[name]) for name in names], processes):
            del left[names[index]]
            yield names[index], pictures
    for name, spec in left.items():
        yield name, svg_and_png(spec)


def vega(store: AnswerStore) -> str:
    """Return the JavaScript that draws charts, from the store if possible: bundling takes seconds."""
    key = key_of({"name": "vega", "version": importlib.metadata.version("vl-convert-python")})
    kept = store.get(key)
    if kept is not None and isinstance(kept.get("script"), str) and store.trusts(key):
        return str(kept["script"])
    script = vega_script()
    store.put(key, {"script": script})
    return script
