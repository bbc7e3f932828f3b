"""The application: its commands, and one rule for everything that goes wrong.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one line on standard error; set
``UNSOFT_TRACEBACK=1`` to see where an unexpected one came from.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import unsoft
from unsoft.cli import cache
from unsoft.cli.bench import bench
from unsoft.cli.compare import compare
from unsoft.cli.inspect import inspect
from unsoft.cli.list import list_mechanisms
from unsoft.cli.swap import swap
from unsoft.cli.tasks import list_tasks
from unsoft.cli.theory import theory
from unsoft.cli.train import train

app = typer.Typer(
    name="unsoft",
    help="Attention beyond softmax.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("compare")(compare)
app.command("list")(list_mechanisms)
app.command("bench")(bench)
app.command("swap")(swap)
app.command("tasks")(list_tasks)
app.command("theory")(theory)
app.command("inspect")(inspect)
app.command("train")(train)
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"unsoft {unsoft.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The console script."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
        code = error.exit_code
    except (Exception, typer.Abort) as error:
        if os.environ.get("UNSOFT_TRACEBACK"):
            raise
        _complain(str(error) or type(error).__name__)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    """One line, whatever the message looked like."""
    typer.echo(f"unsoft: {' '.join(message.split())}", err=True)
