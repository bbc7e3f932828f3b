"""What ``unsoft study`` prints: a study with its verdict, and the list of those that come with unsoft."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unsoft.cli.terminal import cell, show_table

if TYPE_CHECKING:
    from unsoft.lab.study import Record, Study, Summary


def _read(out: Path, name: str) -> tuple[Study, list[Record], list[Summary]]:
    from unsoft.lab.study import Study, summarise
    from unsoft.lab.study.store import NAME, Store

    with Store(out / NAME) as store:
        records, definition = store.records(name), store.definition(name)
    assert definition is not None
    return Study.from_dict(definition), records, summarise(records)


def study_record(out: Path, name: str) -> dict[str, Any]:
    """A study as plain data: what each mechanism reached on each task, and the verdict, if it has rules."""
    from unsoft.lab.study import verdict

    study, records, summaries = _read(out, name)
    found = {"study": name, "claim": study.claim, "source": study.source}
    if study.rules:
        found |= dict(zip(("verdict", "why"), verdict(study.rules, records), strict=True))
    rows = [asdict(replace(one, runs=())) for one in summaries]
    return found | {"results": [{key: row[key] for key in row if key != "runs"} for row in rows]}


def print_study(out: Path, name: str) -> None:
    """The table of a study, its verdict, and how rates were chosen."""
    from unsoft.lab.study import verdict
    from unsoft.lab.study.rule import edge_words

    study, records, summaries = _read(out, name)
    if not any(one.seeds for one in summaries):
        return
    titles = {"task": "whole", "mechanism": "whole"} | dict.fromkeys(
        ("score", "95 % interval", "over softmax", "its interval", "seeds", "rate", "parameters", "ms/step"),
        "right",
    )
    show_table(
        titles, [_row(one) for one in summaries if one.seeds], title=f"{name} ({summaries[0].sweep_words})"
    )
    for one in {one.group: one for one in summaries if one.seeds}.values():
        shortcut = "" if one.shortcut is None else f", shortcut {cell(one.shortcut)}"
        better = "higher" if one.higher_is_better else "lower"
        typer.echo(
            f"{one.group}: {one.metric}, {better} is better; chance {cell(one.chance)}{shortcut},"
            f" known solution {cell(one.known)}"
        )
    if study.rules:
        found, why = verdict(study.rules, records)
        typer.echo(f"{study.claim} ({study.source}): {found}. {why}")
    else:  # with a rule they are part of what was found
        for words in edge_words(summaries):
            typer.echo(words)


def _row(one: Summary) -> list[str]:
    gain = one.difference
    return [
        one.group,
        one.mechanism,
        cell(one.mean),
        _interval(one.low, one.high),
        "" if gain is None else f"{gain.mean:+.3f}",
        "" if gain is None else _interval(gain.low, gain.high),
        str(one.seeds),
        one.rate_words,
        cell(one.parameters),
        "" if one.seconds_per_step is None else cell(1e3 * one.seconds_per_step),
    ]


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def print_defaults(*, as_json: bool) -> None:
    """The studies that come with unsoft."""
    from unsoft.lab.study.read import default_studies, read_study

    titles = {"name": "whole", "source": "left", "claim": "left", "runs": "right"}
    rows = []
    for name, path in default_studies().items():
        study = read_study(path)
        rows.append([name, study.source, study.claim, len(study)])
    if as_json:
        typer.echo(json.dumps([dict(zip(titles, row, strict=True)) for row in rows], indent=1))
    else:
        show_table(titles, rows)
