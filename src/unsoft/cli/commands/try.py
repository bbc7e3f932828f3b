"""``unsoft try``: from a formula to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unsoft.cli import arguments
from unsoft.cli.arguments import AsJson, DryRun, Open, Plugin, path_option, unset, wrong
from unsoft.cli.mechanisms import Name
from unsoft.cli.terminal import interrupted, print_json, print_plan, progress, warn_if_busy


def command(
    mechanism: Name,
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
    dry_run: DryRun = False,
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
    arguments.load_plugin(plugin)
    from unsoft.lab.trial import jobs_of, read_subject, try_formula

    kind: Any = normalise  # read_subject raises ValueError for an unknown one
    try:
        subject = read_subject(mechanism, kind, name)
    except ValueError as problem:
        raise wrong(str(problem), "'MECHANISM'") from None
    if dry_run:
        print_plan(jobs_of(subject), as_json=as_json)
        return
    arguments.check_drawing()
    arguments.check_folder(out)
    warn_if_busy()
    if subject.note and not as_json:
        typer.echo(subject.note)
    with progress(1, refresh=False) as announce:

        def tell(done: int, total: int, text: str) -> None:
            step = text.partition(", about")[0].partition(":")[0]  # without the time that is left
            announce(done, f"{step} {done}" if step.startswith("training") else step, text, total)

        options: dict[str, Any] = {"train": train, "out": out, "plugin": plugin or "", "again": force}
        trial = try_formula(mechanism, normalise=kind, name=name, tell=tell, **options)
    if as_json:
        print_json({"verdict": trial.verdict, "closest": trial.closest, "rows": trial.rows()})
    else:
        typer.echo(trial.checks)
        typer.echo(trial.verdict)
        typer.echo(f"{out / 'index.html'}: the page")
    if not trial.finished:
        raise interrupted("finished measurements and runs are kept")
    arguments.open_page(out / "index.html", wanted=open)
