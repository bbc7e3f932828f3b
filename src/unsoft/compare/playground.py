"""What the playground of the page computes with: all formulas, and measured curves of everything else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from unsoft.compare.jobs import Results
from unsoft.compare.sections.sign import LOGITS, others
from unsoft.compare.subject import Subject
from unsoft.mechanisms.core.catalogue import formulas
from unsoft.mechanisms.magnitude import Magnitude
from unsoft.report.comparison.page import Playground


def playground(results: Results, subjects: Sequence[Subject]) -> Playground:
    """Formulas that take part come first, then all others there are; curves are those of the section on
    signs, where it ran.
    """
    own = {subject.label: subject.formula for subject in subjects if subject.formula is not None}
    rows = {s.label: results.get("curves", s.label) for s in subjects if s.formula is None}
    return Playground(
        formulas=own | {name: formula for name, formula in formulas().items() if name not in own},
        eps=inspect.signature(Magnitude).parameters["eps"].default,
        logits=LOGITS,
        others=others().tolist(),
        curves={label: [row["weight"] for row in found] for label, found in rows.items() if found},
    )
