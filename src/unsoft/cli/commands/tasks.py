"""``unsoft tasks``: every task, what it tests, and its reference scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson
from unsoft.cli.terminal import print_json, show_table

if TYPE_CHECKING:
    from unsoft.lab.tasks import Task


def command(
    scores: Annotated[
        bool, typer.Option("--scores", help="Run the known solution of each, and the shortcut if it has one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List every task on which mechanisms can be trained.

    \b
    Examples:
      unsoft tasks
      unsoft tasks --scores --json
    """
    from unsoft.lab.tasks import tasks

    made = [kind() for kind in tasks().values()]
    if as_json:
        print_json([_record(task, scores) for task in made])
    else:
        _print_table(made, scores)


def _record(task: Task, scores: bool) -> dict[str, Any]:
    from dataclasses import asdict

    record = {
        "name": task.name,
        "tells": task.tells,
        "source": task.source,
        "inputs": task.kind,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "chance": task.chance,
        "knobs": task.knobs(),
        "setup": asdict(task.setup),
        "difficulty": task.difficulty,
        "tested_at": list(task.difficulties()),
    }
    return record | (_scores(task) if scores else {})


def _scores(task: Task) -> dict[str, Any]:
    """Return the scores on the examples on which trained models are tested, as results quote them."""
    from unsoft.lab.training.run import references
    from unsoft.lab.training.trainer import evaluation_batches

    try:
        return dict(zip(("known", "shortcut"), references(evaluation_batches(task, width=0)), strict=True))
    except ValueError as problem:  # scikit-learn is not installed
        return {"known": None, "shortcut": None, "problem": str(problem)}


def _print_table(made: list[Task], scores: bool) -> None:
    shown = ("known", "shortcut") if scores else ()
    columns = dict.fromkeys(("name", "tests", "metric", "chance", *shown, "layers x width / heads"), "left")
    rows = []
    for task in made:
        setup, references = task.setup, _scores(task) if scores else {}
        numbers = ["" if references[name] is None else f"{references[name]:.3g}" for name in shown]
        model = f"{setup.layers} x {setup.width} / {setup.heads}"
        rows.append([task.name, task.tells, task.metric, f"{task.chance:.3g}", *numbers, model])
    show_table(columns | {"name": "whole"}, rows)
    typer.echo("Knobs: unsoft tasks --json. Train one: unsoft train TASK cog")
