"""Records of trained models that come with the package.

``python -m unsoft.lab.records study/study.db`` replaces the runs of the studies in that file, without fields
that pages do not need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from unsoft.files import write_csv
from unsoft.lab.study.record import DONE, LANGUAGE_COLUMNS, Record, read_records

PACKAGED = Path(__file__).parent / "records.csv"
LANGUAGE = Path(__file__).parent / "language.csv"
"""Runs of language models, with columns of their own: size, rate, bits_per_byte."""
INTERVENTIONS = Path(__file__).parent / "interventions"
"""Verdicts of ``unsoft neurons`` and ``unsoft steer``, as these commands wrote them."""


def command_for(records: Iterable[Record]) -> str:
    """Return the command that makes such records.

    >>> run = Record(study="census", group="census", task="census", mechanism="cog", key="k", seed=0, lr=0.1)
    >>> command_for([run, run])
    'unsoft study census --out study'
    """
    return f"unsoft study {','.join(sorted({record.study for record in records}))} --out study"


def write_packaged(study: str | Path, out: Path = PACKAGED) -> int:
    """Store the finished runs of a study without losses and specifications; return their number.

    Runs of language models go to ``language.csv`` beside ``out``, with their losses, and are added to those
    of the same study that are there: such a study takes days, on several machines.
    """
    runs = [replace(record, spec={}) for record in read_records(study) if record.status == DONE]
    if not runs:
        raise ValueError(f"trained: there is no finished run in {str(study)!r}")
    small = [replace(record, losses=[]) for record in runs if record.task != LANGUAGE.stem]
    if small:
        new = {record.study for record in small}
        kept = [record for record in read_records(out) if record.study not in new] if out.is_file() else []
        write_csv(out, [record.to_row() for record in [*kept, *small]])
    language = {record.key: record for record in runs if record.task == LANGUAGE.stem}
    if language:
        _write_language(language, out.with_name(LANGUAGE.name))
    return len(runs)


def _write_language(runs: dict[str, Record], out: Path) -> None:
    before = read_records(out) if out.is_file() else []
    kept = {(record.study, record.key): record for record in before}
    kept |= {(record.study, record.key): record for record in runs.values()}
    names = {field: column for column, field in LANGUAGE_COLUMNS.items()}
    first = ("study", "group", "mechanism", "seed", "lr", "score", "swept", "steps")
    rows = [record.to_row() for record in kept.values()]
    columns = [*first, *(name for name in rows[0] if name not in first)]
    write_csv(out, [{names.get(name, name): row[name] for name in columns} for row in rows])
