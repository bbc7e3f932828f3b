"""Studies: many training runs with a store, and their summaries and verdicts. Imported on demand.

>>> import unsoft
>>> group = {"task": "census", "mechanisms": ["softmax", "cog"]}
>>> study = unsoft.lab.study.make_study({"seeds": 3, "group": [group]})
>>> len(study), study.sweep
(10, 'tuned')
"""

from unsoft.lab.study.driver import run_study
from unsoft.lab.study.plan import Study
from unsoft.lab.study.read import default_study, make_study, read_study
from unsoft.lab.study.record import Record, read_records, write_records
from unsoft.lab.study.rule import Rule, verdict
from unsoft.lab.study.summary import ResultSummary, summarise

__all__ = [
    "Record",
    "Rule",
    "Study",
    "ResultSummary",
    "default_study",
    "make_study",
    "read_records",
    "read_study",
    "run_study",
    "summarise",
    "verdict",
    "write_records",
]
