"""Records of trained models that come with the package.

``python -m unsoft.lab.records study/study.db`` replaces the runs of the studies in that file, without fields
that pages do not need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from unsoft.files import write_csv
from unsoft.lab.study.record import DONE, Record, read_records

PACKAGED = Path(__file__).parent / "records.csv"
INTERVENTIONS = Path(__file__).parent / "interventions"
"""Verdicts of ``unsoft neurons`` and ``unsoft steer``, as these commands wrote them."""


def command_for(records: Iterable[Record]) -> str:
    """Return the command that makes such records.

    >>> run = Record(study="census", group="census", task="census", mechanism="cog", key="k", seed=0, lr=0.1)
    >>> command_for([run, run])
    'unsoft study --default census --out study'
    """
    names = dict.fromkeys(record.study for record in records)
    return f"unsoft study {' '.join(f'--default {name}' for name in sorted(names))} --out study"


def write_packaged(study: str | Path, out: Path = PACKAGED) -> int:
    """Store the finished runs of a study without losses and specifications; return their number."""
    runs = [replace(record, losses=[], spec={}) for record in read_records(study) if record.status == DONE]
    if not runs:
        raise ValueError(f"trained: there is no finished run in {str(study)!r}")
    new = {record.study for record in runs}
    kept = [record for record in read_records(out) if record.study not in new] if out.is_file() else []
    write_csv(out, [record.to_row() for record in [*kept, *runs]])
    return len(runs)
