"""``unsoft try``: from a formula to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unsoft.cli.arguments import (
    AsJson,
    Open,
    Plugin,
    check_drawing,
    check_folder,
    load_plugin,
    open_page,
    path_option,
    unset,
    wrong,
)
from unsoft.cli.completion import complete_mechanism
from unsoft.cli.terminal import INTERRUPTED, note, print_json, progress, warn_if_busy


def command(
    formula: Annotated[
        str,
        typer.Argument(
            metavar="FORMULA",
            help="A weight such as 'tanh(s)*exp(abs(s))', or the name of a mechanism.",
            autocompletion=complete_mechanism,
        ),
    ],
    name: Annotated[str | None, unset("Name of the formula in the result.", metavar="NAME")] = None,
    normalise: Annotated[
        str | None, unset("What weights are divided by: sum, abs, square or count.", metavar="KIND")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also train small models: up to 15 minutes on two cores.")
    ] = False,
    out: Annotated[Path, path_option("Folder for the page.")] = Path("try"),
    open: Open = False,
    force: Annotated[bool, typer.Option("--force", help="Measure everything again.")] = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check a formula and compare it with softmax in one paragraph.

    Takes up to 3 minutes on two cores. The page has all numbers.

    \b
    Examples:
      unsoft try "tanh(s)*exp(abs(s))" --name gentle
      unsoft try cog --train --out report
    """
    load_plugin(plugin)
    from unsoft.lab.trial import read_subject, try_formula

    try:
        subject = read_subject(formula, normalise, name)  # type: ignore[arg-type]
    except ValueError as problem:
        raise wrong(str(problem), "'FORMULA'") from None
    check_drawing()
    check_folder(out)
    warn_if_busy()
    if subject.note and not as_json:
        typer.echo(subject.note)
    with progress(1, refresh=False) as announce:
        trial = try_formula(
            formula,
            normalise=normalise,  # type: ignore[arg-type]
            name=name,
            train=train,
            out=out,
            plugin=plugin or "",
            again=force,
            tell=lambda done, total, text: announce(done, text.partition(":")[0], text, total),
        )
    if as_json:
        print_json({"verdict": trial.verdict, "closest": trial.closest, "rows": trial.rows()})
    else:
        typer.echo(trial.checks)
        typer.echo(trial.verdict)
        typer.echo(f"{out / 'index.html'}: the page")
    if not trial.finished:
        note("interrupted; rerun the same command to resume")
        raise typer.Exit(INTERRUPTED)
    open_page(out / "index.html", wanted=open)
