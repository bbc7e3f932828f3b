"""The command-line application: its commands, error messages and exit codes."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Annotated

import typer
from typer.main import get_command

import unsoft
from unsoft.cli import commands
from unsoft.cli.help import GroupedCommands, make_readable

_HELP = """Attention beyond softmax.

\b
Examples:
  unsoft try "tanh(s)*exp(abs(s))"
  unsoft compare cog softmax --quick --out report
  unsoft COMMAND --help
"""
_EPILOG = """\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one
line on standard error, and a wrong formula has a caret below the mistake;
UNSOFT_TRACEBACK=1 shows where it came from. Progress goes to standard error,
as a bar in a terminal and as lines elsewhere.
Completion for your shell: unsoft --install-completion
"""


def application() -> typer.Typer:
    """Return the application. Command files import torch only when they run, so that help is fast."""
    app = typer.Typer(
        name="unsoft",
        cls=GroupedCommands,
        help=_HELP,
        epilog=_EPILOG,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root)
    for module in pkgutil.iter_modules(commands.__path__):
        command = importlib.import_module(f"{commands.__name__}.{module.name}").command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=module.name)
        else:
            app.command(module.name)(command)
    return app


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
    run(application(), "unsoft")


def run(app: typer.Typer, name: str) -> None:
    """Run the application called ``name`` and exit with its code; an error is one line on standard error."""
    command = get_command(app)
    make_readable(command)
    try:
        code = command(prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        _complain(error.format_message())
        code = error.exit_code
    except (Exception, typer.Abort) as error:
        if os.environ.get("UNSOFT_TRACEBACK"):
            raise
        # The library raises these two for arguments that do not fit; everything else is a failure.
        wrong_usage = isinstance(error, (ValueError, TypeError))
        # Every process of torchrun sees the same wrong arguments; only the first reports them.
        if not wrong_usage or os.environ.get("RANK", "0") == "0":
            _complain(str(error) or type(error).__name__)
        code = 2 if wrong_usage else 1
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    """Print an error as one line; a caret stays below what it points at."""
    lines = message.splitlines()
    at = next((k for k, line in enumerate(lines) if line.strip() == "^"), None)
    if at is None:
        typer.echo(f"unsoft: {' '.join(message.split())}", err=True)
        return
    first, last = " ".join(lines[: at - 1]), " ".join(" ".join(lines[at + 1 :]).split())
    typer.echo("\n".join(filter(None, (f"unsoft: {first}", lines[at - 1], lines[at], last))), err=True)
