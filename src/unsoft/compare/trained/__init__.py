"""Trained models that the page shows at once: a small record that comes with the package.

``python -m unsoft.compare.trained study/study.db`` puts the studies of a store into it, without what the page
does not need; studies that the store does not have stay as they were.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unsoft.files import write_csv
from unsoft.study.record import DONE, read_records

PACKAGED = Path(__file__).parent / "records.csv"
INTERVENTIONS = Path(__file__).parent / "interventions"
"""Verdicts of ``unsoft neurons`` and ``unsoft steer``, as these commands wrote them."""
_STUDIES = ("census", "deletion", "focus", "needle", "opposition", "recall", "repulsion", "trigger")
COMMAND = f"unsoft study {' '.join(f'--default {name}' for name in _STUDIES)} --out study"
"""What makes the record that comes with the package, before it is made small."""


def write_packaged(study: str | Path, out: Path = PACKAGED) -> int:
    """Puts the finished runs of a store into the record, without losses and specifications; how many there
    are then.
    """
    new = [replace(record, losses=[], spec={}) for record in read_records(study) if record.status == DONE]
    if not new:
        raise ValueError(f"trained: there is no finished run in {str(study)!r}")
    replaced = {record.study for record in new}
    kept = [record for record in read_records(out) if record.study not in replaced] if out.exists() else []
    records = sorted([*kept, *new], key=lambda record: record.study)
    write_csv(out, [record.to_row() for record in records])
    return len(records)
