"""The command-line application: its commands, error messages and exit codes."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import unsoft
from unsoft.cli import commands
from unsoft.cli.arguments import Plugin, load_plugin

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

PANELS = {
    "Use": ("list", "show", "swap", "convert"),
    "Evaluate": ("try", "compare", "theory", "bench"),
    "Train": ("train", "study", "tasks"),
    "Interpret": ("inspect", "neurons", "steer"),
    "Setup": ("doctor", "cache"),
}
_PLACEHOLDERS = {"int": "N", "float": "X", "path": "PATH", "Path": "PATH"}
_METAVARS = {
    **{"--set": "NAME=VALUE", "--option": "NAME=VALUE", "--only-layers": "LAYERS", "--lrs": "X,X,..."},
    **{"--beta": "X,X,...", "--gamma": "X,X,...", "--lang": "en|zh", "--start": "open|paper"},
    **{"--tune": "all|attention", "--sweep": "KIND", "--repulse": "KIND", "--device": "cpu|cuda"},
    **{"--init-from": "MODEL", "--report-to": "NAME", "--scale": "FACTOR", "--ray": "ADDRESS"},
    **{"--only": "NAME", "--text": "PATH"},
}


class GroupedCommands(TyperGroup):
    """A group whose help lists commands by purpose, with untruncated summaries."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name for names in PANELS.values() for name in names}
        others = tuple(name for name in self.commands if name not in known)
        for title, names in (PANELS | ({"Other": others} if others else {})).items():
            with formatter.section(title):
                formatter.write_dl([(name, summary(self.commands[name])) for name in names])


def summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    first = " ".join((command.help or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".") + "."


def make_readable(command: Any) -> None:
    """Give every option and argument of a command, and of its subcommands, a readable placeholder."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            _readable_argument(parameter)
        elif not parameter.is_flag and parameter.metavar is None:
            kind = parameter.bare_type().removeprefix("list[").removesuffix("]")
            name = parameter.opts[-1].lstrip("-").upper()
            parameter.metavar = _METAVARS.get(parameter.opts[-1]) or _PLACEHOLDERS.get(kind, name)
    for inner in getattr(command, "commands", {}).values():
        inner.short_help = inner.short_help or summary(inner)  # click truncates what it derives itself
        make_readable(inner)


def _readable_argument(argument: Any) -> None:
    name = (argument.metavar or argument.name.upper()).strip("[].")
    many = "..." if argument.nargs != 1 else ""
    shown = f"{name}{many}" if argument.required else f"[{name}{many}]"
    argument.metavar = name
    argument.display_type_rich = lambda ctx: ""
    argument._usage_display_name = lambda: shown


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
            for inner in command.registered_commands:
                inner.callback = with_plugin(inner.callback)
            app.add_typer(command, name=module.name)
        else:
            app.command(module.name)(with_plugin(command))
    return app


def with_plugin(function: Any) -> Callable[..., None]:
    """Return a command with the option ``--plugin``, which is imported before the command runs."""
    signature = inspect.signature(function, eval_str=True)
    if "plugin" in signature.parameters:
        return function  # type: ignore[no-any-return]

    @wraps(function)
    def command(plugin: str | None = None, **values: Any) -> None:
        load_plugin(plugin)
        function(**values)

    option = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Plugin)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option]
    )
    return command


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
