"""Do records belong to a study as it is written now?"""

from __future__ import annotations

from collections.abc import Sequence

from unsoft.lab.study.plan import Study, label_of
from unsoft.lab.study.record import Record


def earlier_words(study: Study, records: Sequence[Record]) -> str:
    """What of the runs the study would not run any more, in words; "" if it would run all of them.

    >>> from unsoft.lab.study.read import make_study
    >>> study = make_study({"name": "s", "seeds": 3, "group": [{"task": "census", "mechanisms": ["cog"]}]})
    >>> place = {"study": "s", "group": "census", "task": "census", "mechanism": "cog", "point": "lr=0.01"}
    >>> old = Record(**place, seed=7, lr=0.01, key="k")
    >>> earlier_words(study, [old])
    'these runs are of an earlier version of the study, with other seeds'
    """
    chosen_on = {group.name: group.choose_on for group in study.groups}
    points = {label_of(point) for point in study.points}
    other = {
        "seeds": any(run.seed not in study.seeds for run in records),
        "rates": any(run.point not in points for run in records),
        "examples by which rates are chosen": any(
            run.choose_on != chosen_on.get(run.group, run.choose_on) for run in records
        ),
    }
    found = [name for name, differs in other.items() if differs]
    if not found:
        return ""
    return f"these runs are of an earlier version of the study, with other {' and other '.join(found)}"
