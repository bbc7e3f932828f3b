"""``unsoft list``: every mechanism and what it promises."""

from __future__ import annotations

import json
from typing import Annotated

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
        {"name": name, "formula": formula.to_dict(), "properties": asdict(formula.properties)}
        for name, formula in mechanisms().items()
    ]


def _print_table() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from unsoft.mechanisms import mechanisms

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
    console.print("Formulas and papers: unsoft list --json")
