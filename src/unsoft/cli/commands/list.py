"""``unsoft list``: every mechanism and what it promises."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from unsoft.cli.terminal import show_table


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable, with formulas and papers.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/mechanisms.md.")] = False,
) -> None:
    """Show every mechanism with its formula and properties.

    \b
    Examples:
      unsoft list
      unsoft list --json
    """
    if as_json and markdown:
        raise typer.BadParameter("choose one of --json and --markdown")
    if as_json:
        typer.echo(json.dumps(_records(), indent=1))
    elif markdown:
        from unsoft.cli.mechanism_page import mechanism_page

        typer.echo(mechanism_page(), nl=False)
    else:
        _print_table()


def _records() -> list[dict[str, Any]]:
    from unsoft.mechanisms import mechanisms

    return [
        {"name": name, **_content(found), "properties": found.properties.to_dict()}
        for name, found in mechanisms().items()
    ]


def _content(found: Any) -> dict[str, Any]:
    """The formula, or for a family what it is and the formula that it runs, if any."""
    from unsoft.formula import Formula

    if isinstance(found, Formula):
        return {"formula": found.to_dict()}
    formula = {} if found.formula is None else {"formula": found.formula.to_dict()}
    return {"summary": found.summary, "paper": found.family.paper, **formula}


def _print_table() -> None:
    from unsoft.mechanisms import mechanisms
    from unsoft.modules.registry import modifiers

    rows = mechanisms().rows()
    show_table(
        {name: "whole" if name == "name" else "left" for name in rows[0]},
        [list(row.values()) for row in rows],
    )
    for modifier in modifiers():
        typer.echo(f"{modifier.name}+...  {modifier.summary}")
    typer.echo("Formulas and papers: unsoft list --json")
