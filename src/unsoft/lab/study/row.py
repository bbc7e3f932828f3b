"""From a run to its row in the store: when it is planned, and when it is done."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from unsoft.lab.study.plan import Run, Study
from unsoft.lab.study.record import DONE, Record
from unsoft.lab.study.worker import code_digest

_OF_RESULT = (
    "score",
    "validation",
    "metric",
    "higher_is_better",
    "chance",
    "known",
    "shortcut",
    "parameters",
)
_OF_RUN = ("steps", "seconds", "learned", "attention", "versions")


def planned(study: Study, run: Run, plugin: str = "") -> Record:
    """The row of a run that is still to be run."""
    group, mechanism, seed, point = run.place
    spec = run.spec.to_dict()
    return Record(
        study=study.name,
        group=group,
        task=run.group.task,
        mechanism=mechanism,
        base=run.variant.mechanism,
        seed=seed,
        lr=run.point["lr"],
        point=point,
        sweep=study.sweep,
        choose_on=run.group.choose_on,
        swept=run.swept,
        spec=spec,
        code=code_digest(plugin),
        key=key_of(spec, plugin),
    )


def words(record: Record) -> str:
    """A run in words.

    >>> place = {"study": "s", "group": "g", "seed": 1, "lr": 0.1, "point": "lr=0.1"}
    >>> words(Record(task="copy", mechanism="cog", key="k", **place))
    'g cog seed 1 lr=0.1'
    """
    return f"{record.group} {record.mechanism} seed {record.seed} {record.point}"


def key_of(spec: dict[str, Any], plugin: str = "") -> str:
    """Forty digits that stand for a run, the code that decides its result, and the torch it runs on."""
    import torch

    content = {"spec": spec, "code": code_digest(plugin), "torch": torch.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


def done(record: Record, outcome: dict[str, Any]) -> Record:
    """The row of a run that ended well."""
    result = outcome["result"]
    history, best = result["history"], max if result["higher_is_better"] else min
    curve = [[row["step"], row["eval_score"]] for row in history if "eval_score" in row]
    tests = {f"{result['difficulty']}={test['value']}": test for test in result["score_by"]}
    return replace(
        record,
        status=DONE,
        error="",
        best_validation=best(score for _, score in curve),
        curve=curve,
        losses=[[row["step"], row["loss"]] for row in history if "loss" in row],
        harder={label: test["score"] for label, test in tests.items()},
        validation_by={label: test["validation"] for label, test in tests.items()},
        machine=outcome["machine"],
        seconds_per_step=result["seconds"] / result["steps"] if record.attempts == 1 else None,
        **{name: result[name] for name in (*_OF_RESULT, *_OF_RUN)},
    )
