"""``python -m experiments.scenes``: train the image-text model and steer it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.scenes.experiment import run_experiment
from experiments.scenes.report import write_report
from experiments.scenes.training import Settings, train_scenes
from unsoft.cli.app import run
from unsoft.cli.arguments import AsJson, check_drawing, check_folder, path_option
from unsoft.cli.commands.steer import show_judgement
from unsoft.cli.terminal import INTERRUPTED, note, progress, show_table
from unsoft.errors import Interrupted
from unsoft.lab.interpret.steering.controls import steps as count_steps


def command(
    out: Annotated[Path, path_option("Folder of the model, the measurements and the page.")] = Path("scenes"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and training scenes.")] = 0,
    negative: Annotated[
        str, typer.Option(help="Negative picture of a pair: original, or without the relevant regions.")
    ] = "original",
    as_json: AsJson = False,
) -> None:
    """Train a small image-text model that names missing objects, and steer it by what it sees.

    Ctrl-C during training saves a checkpoint; rerun the same command to resume.

    \b
    Examples:
      python -m experiments.scenes --steps 500 --out scenes
      python -m experiments.scenes --negative without --seed 1
    """
    check_drawing()
    check_folder(out)
    try:
        model = train_scenes(out, Settings(steps=steps, seed=seed), progress=True)
    except Interrupted as stopped:
        note(str(stopped))
        raise typer.Exit(INTERRUPTED) from None
    total = count_steps(bounds=3) + 2
    with progress(total) as bar:
        count = iter(range(total))
        results = run_experiment(model, negative=negative, progress=lambda step: bar(next(count), step, step))
    again = f"python -m experiments.scenes --steps {steps} --seed {seed} --negative {negative}"
    written = write_report(out, model, results, again)
    if as_json:
        about = {"judgement": results.judgement.to_dict(), "measures": results.measures}
        typer.echo(json.dumps(about, indent=1))
    else:
        show_judgement(results.judgement)
        show_measures(results.measures)
    for path in written:
        typer.echo(str(path), err=as_json)


def show_measures(measures: list[dict[str, Any]]) -> None:
    """Print the measures before and after steering, next to those of a random direction."""
    columns = dict.fromkeys(
        ("measure", "before", "steered", "change", "interval", "random direction"), "right"
    )
    rows = [
        [
            one["name"],
            *(f"{one[key]:.3f}" for key in ("before", "after")),
            f"{one['change']:+.3f}",
            f"{one['low']:+.3f} to {one['high']:+.3f}",
            f"{one['random']:.3f}",
        ]
        for one in measures
    ]
    show_table(columns, rows, box=False)


def application() -> typer.Typer:
    """Return the command-line application."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    return app


if __name__ == "__main__":
    run(application(), "python -m experiments.scenes")
