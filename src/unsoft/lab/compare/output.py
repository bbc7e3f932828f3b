"""What a comparison leaves behind: its record as plain data; a folder with the page, tables and pictures."""

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
from unsoft.lab.bench.machine import load, machine, versions
from unsoft.lab.compare.jobs import Answer, Results
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.processes import can_copy_itself, in_processes
from unsoft.lab.compare.section import conclusions, sections
from unsoft.lab.compare.sections.sign import LOGITS, others
from unsoft.lab.compare.store import Store, code_digest, key_of
from unsoft.lab.compare.subject import Subject
from unsoft.lab.report.comparison.page import SCHEMA, Playground, comparison_page
from unsoft.lab.report.figure import Figure, has_drawn, svg_and_png, vega_script
from unsoft.mechanisms.magnitude import Magnitude
from unsoft.modules.catalogue import formulas

PAGE, RECORD = "index.html", "compare.json"


def record(
    subjects: Sequence[Subject],
    answers: Sequence[Answer],
    level: Level,
    *,
    finished: bool,
    command: str,
    out: str = "report",
    model: str | None = None,
    study: str | None = None,
) -> dict[str, Any]:
    """Ready for JSON.

    ``finished`` is False for a run that was interrupted; ``out`` is the folder of the page.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "unsoft compare",
        "command": command,
        "out": out,
        "model": model,
        "study": study,
        "level": dataclasses.asdict(level),
        "finished": finished,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "versions": versions("altair", "vl-convert-python"),
        "code": code_digest()[:16],
        "subjects": [
            {
                "label": s.label,
                "summary": s.summary,
                "own": s.own,
                "formula": None if s.formula is None else s.formula.to_dict(),
            }
            for s in subjects
        ],
        "answers": [dict(vars(answer)) for answer in answers],  # asdict would copy every row
    }
    return content | conclusions(Results(content), level.name)


def views_of(results: Results) -> list[dict[str, Any]]:
    """The sections as the page shows them."""
    with debug_mode(False):  # charts that our own code makes need not be checked part by part
        return [view for section in sections(results.record) if (view := section.view(results)) is not None]


def playground(results: Results, subjects: Sequence[Subject]) -> Playground:
    """Formulas that take part come first, then all others there are; curves are those of the section on
    signs, where it ran.
    """
    own = {s.label: s.formula for s in subjects if s.formula is not None and not s.formula.fields}
    rows = {s.label: results.get("curves", s.label) for s in subjects if s.formula is None}
    return Playground(
        formulas=own | {name: formula for name, formula in formulas().items() if name not in own},
        eps=inspect.signature(Magnitude).parameters["eps"].default,
        logits=LOGITS,
        others=others().tolist(),
        curves={label: [row["weight"] for row in found] for label, found in rows.items() if found},
    )


def write(
    out: Path,
    content: dict[str, Any],
    views: Sequence[dict[str, Any]],
    subjects: Sequence[Subject],
    store: Store,
    say: Callable[[str], None] = lambda _: None,
    processes: int = 1,
) -> dict[str, int]:
    """Everything into the folder ``out``; how many tables and pictures there are.

    ``say`` is told what is being drawn, in ``processes`` copies of this process where that is safe.
    """
    figures: list[Figure] = [figure for view in views for figure in view["figures"]]
    results = Results(content)
    for folder in (out, out / "data", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    # Before this process bundles scripts itself: copies must not inherit what that starts.
    _write_pictures(out / "figures", figures, say, processes)
    page = comparison_page(content, results.labels, views, playground(results, subjects), vega(store))
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
    """PNG and SVG; pictures whose specification has not changed are left as they are."""
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
        index[name] = stale[name][0]
        write_json(index_path, index)


def _drawn(specs: dict[str, dict[str, Any]], processes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Each picture by its name, as they come."""
    left = dict(specs)
    if processes > 1 and len(specs) > 1 and can_copy_itself() and not has_drawn():
        names = list(specs)
        for place, pictures in in_processes([partial(svg_and_png, specs[name]) for name in names], processes):
            del left[names[place]]
            yield names[place], pictures
    for name, spec in left.items():
        yield name, svg_and_png(spec)


def vega(store: Store) -> str:
    """The JavaScript that draws charts, as vl-convert brings it: one script.

    Bundling takes seconds, so it is kept.
    """
    key = key_of({"name": "vega", "version": importlib.metadata.version("vl-convert-python")})
    found = store.get(key)
    if found is not None and isinstance(found.get("script"), str) and store.trusts(key):
        return str(found["script"])
    script = vega_script()
    store.put(key, {"script": script})
    return script
