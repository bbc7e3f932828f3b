"""Help texts: commands in groups with whole summaries, and placeholders such as N and PATH for values."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Use": ("list", "show", "swap", "convert"),
    "Evaluate": ("try", "compare", "theory", "bench"),
    "Train": ("train", "study", "tasks"),
    "Interpret": ("inspect", "neurons", "steer"),
    "Setup": ("doctor", "cache"),
}
_PLACEHOLDERS = {"int": "N", "float": "X", "path": "PATH", "Path": "PATH"}


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
            parameter.metavar = _PLACEHOLDERS.get(kind, name)
    for inner in getattr(command, "commands", {}).values():
        make_readable(inner)


def _readable_argument(argument: Any) -> None:
    name = (argument.metavar or argument.name.upper()).strip("[].")
    many = "..." if argument.nargs != 1 else ""
    shown = f"{name}{many}" if argument.required else f"[{name}{many}]"
    argument.metavar = name
    argument.display_type_rich = lambda ctx: ""
    argument._usage_display_name = lambda: shown
