"""The same questions asked of a real model: an inspection as one more measurement, and its part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsoft.compare.job import Answer, Job

_LENGTH, _SEQUENCES = 256, 4


def model_job(model: str) -> Job:
    """Inspects a model that :func:`unsoft.hf.models.load_model` knows, on our own page of text."""
    question = {"name": "model", "model": model, "length": _LENGTH, "sequences": _SEQUENCES}
    return Job("model", model, question, lambda: [_inspected(model)], 30.0)


def model_variables(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """What the page's section on the model needs; None if none was inspected."""
    answer = next((a for a in answers if a.name == "model" and a.rows), None)
    if answer is None:
        return None
    from unsoft.hf.inspection import Inspection
    from unsoft.hf.inspection.page import depth_charts, role_table
    from unsoft.hf.inspection.roles import ROLES

    found = Inspection(**{key: x for key, x in answer.rows[0].items() if key != "schema"})
    return {
        "inspection": found,
        "roles": [role_table(role, found) for role in ROLES],
        "stacks": depth_charts(found),
    }


def _inspected(model: str) -> dict[str, Any]:
    from dataclasses import replace

    from unsoft.hf import inspection
    from unsoft.hf.models import load_model

    network, tokenizer = load_model(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so it cannot read text")
    text = (Path(inspection.__file__).parent / "sample.txt").read_text()
    found = inspection.inspect(
        network, text, tokenizer=tokenizer, batch_size=2, max_length=_LENGTH, max_sequences=_SEQUENCES
    )
    return replace(found, model=model).to_dict()
