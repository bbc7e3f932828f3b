"""Trained models that the page shows at once: a small record that comes with the package.

``python -m unsoft.compare.trained study/study.db`` writes it anew from a study, without what the page does
not need.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unsoft.files import write_csv
from unsoft.study.record import DONE, read_records

PACKAGED = Path(__file__).parent / "records.csv"
INTERVENTIONS = Path(__file__).parent / "interventions"
"""Verdicts of ``unsoft neurons`` and ``unsoft steer``, as these commands wrote them."""
_STUDIES = ("census", "deletion", "needle", "opposition")
COMMAND = f"unsoft study {' '.join(f'--default {name}' for name in _STUDIES)} --out study"
"""What makes the record that comes with the package, before it is made small."""


def write_packaged(study: str | Path, out: Path = PACKAGED) -> int:
    """Runs of a study that are done, without losses and specifications; how many there are."""
    kept = [replace(record, losses=[], spec={}) for record in read_records(study) if record.status == DONE]
    if not kept:
        raise ValueError(f"trained: there is no finished run in {str(study)!r}")
    write_csv(out, [record.to_row() for record in kept])
    return len(kept)
