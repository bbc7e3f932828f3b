"""Verdicts of interventions inside a trained model, by ``unsoft neurons`` and ``unsoft steer``.

Those that come with the package are in ``lab/records/interventions``.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from unsoft.lab.compare.jobs import Job, Missing, Results, Rows, record_job
from unsoft.lab.compare.section import SURVEY, Finding, Request, Section
from unsoft.lab.evidence import VERDICTS
from unsoft.lab.records import INTERVENTIONS

NAME = "interventions"


SECTION = Section(order=91)


@SECTION.jobs
def jobs(request: Request) -> list[Job]:
    own = None if request.verdicts is None else Path(request.verdicts)
    files = [*sorted(INTERVENTIONS.glob("*.json")), *([own] if own else [])]  # the last verdict counts
    prepare = None if own is None else partial(verdicts_of, own)

    def read() -> Rows:
        return [row for file in files for row in verdicts_of(file)]

    return [record_job(NAME, files, read, prepare=prepare)]


def verdicts_of(file: Path) -> Rows:
    """Return the verdicts in a verdicts.json of ``unsoft neurons`` or a steering.json of ``unsoft steer``."""
    try:
        content = json.loads(file.read_text())
        return [
            {"claim": str(one["claim"]), "verdict": str(one["verdict"]), "found": str(one["found"])}
            | {"model": str(content["model"]), "command": str(content["command"])}
            for one in content["verdicts"]
        ]
    except OSError as problem:
        raise ValueError(f"compare: {str(file)!r} cannot be read: {problem.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"compare: {str(file)!r} is not a file of verdicts; unsoft neurons writes verdicts.json, unsoft"
            " steer check and python -m experiments.scenes write steering.json"
        ) from None


def _judge(name: str, results: Results) -> Finding:
    mine = results.rows(NAME, claim=name)
    if not mine:
        raise Missing(f"no verdict on {name} is on record: give a file with --verdicts FILE")
    last = mine[-1]
    if last["verdict"] not in VERDICTS:
        raise Missing(f"the verdict on {name} on record, {last['verdict']!r}, is none that is known")
    return last["verdict"], f"{last['model']}: {last['found']}; measured with: {last['command']}"


@SECTION.trained(
    SURVEY, "Entropy neurons write into the null space of the unembedding and act through the layer norm."
)
def _entropy_neurons(results: Results) -> Finding:
    """Of the 1 % of neurons of the last layer that write most into the null space at least half pass the test
    against matched controls; one or more: partly. Refuted: None of them passes.
    """
    return _judge("entropy-neurons", results)


@SECTION.trained(SURVEY, "Token-frequency neurons move logits along the unigram distribution.")
def _frequency_neurons(results: Results) -> Finding:
    """Of the 1 % of neurons of the last layer that point most along word frequency at least half pass the
    test against matched controls; one or more: partly. Refuted: None of them passes.
    """
    return _judge("frequency-neurons", results)


@SECTION.trained(SURVEY, "Steering the latent space reduces hallucinated objects (VaLSe).")
def _steering(results: Results) -> Finding:
    """On a small image-text model with a planted habit: every control of python -m experiments.scenes passes;
    only side effects fail: partly.

    Refuted: The effect on held-out scenes, or a control other than a side effect, fails.
    """
    return _judge("steering", results)
