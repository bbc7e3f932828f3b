"""``unsoft list``: every mechanism and what it promises."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_WIDE = 120  # columns, when a file or a pipe reads along


def list_mechanisms(
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable, with formulas and papers.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/mechanisms.md.")] = False,
) -> None:
    """Show every mechanism with its formula and properties."""
    if as_json and markdown:
        raise typer.BadParameter("choose one of --json and --markdown")
    if as_json:
        typer.echo(json.dumps(_records(), indent=1))
    elif markdown:
        from unsoft.cli.mechanism_page import mechanism_page

        typer.echo(mechanism_page(), nl=False)
    else:
        _print_table()


def _records() -> list[dict]:
    from dataclasses import asdict

    from unsoft.mechanisms import mechanisms

    return [
        {"name": name, **_content(found), "properties": asdict(found.properties)}
        for name, found in mechanisms().items()
    ]


def _content(found: Any) -> dict:
    """The formula, or for a family what it is and the formula that it runs, if any."""
    from unsoft.formula import Formula

    if isinstance(found, Formula):
        return {"formula": found.to_dict()}
    formula = {} if found.formula is None else {"formula": found.formula.to_dict()}
    return {"summary": found.summary, "paper": found.family.paper, **formula}


def _print_table() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from unsoft.mechanisms import mechanisms
    from unsoft.mechanisms.core.registry import modifiers

    rows = mechanisms().rows()
    table = Table(box=box.SIMPLE_HEAD)
    for title in rows[0]:
        table.add_column(title, no_wrap=title == "name")
    for row in rows:
        table.add_row(*row.values())
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(table)
    for modifier in modifiers():
        console.print(f"{modifier.name}+...  {modifier.summary}", markup=False)
    console.print("Formulas and papers: unsoft list --json")
