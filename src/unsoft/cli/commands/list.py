"""``unsoft list``: every mechanism with its properties."""

from __future__ import annotations

from typing import Any

import typer

from unsoft.cli.arguments import AsJson
from unsoft.cli.terminal import print_json, show_table


def command(as_json: AsJson = False) -> None:
    """List every mechanism with its properties.

    \b
    Examples:
      unsoft list
      unsoft list --json
    """
    from unsoft.mechanisms import mechanisms
    from unsoft.modules.registry import modifiers

    if as_json:
        print_json([_record(name, each) for name, each in mechanisms().items()])
        return
    rows = mechanisms().rows()
    columns = dict.fromkeys(rows[0], "left") | {"name": "whole"}
    show_table(columns, [list(row.values()) for row in rows])
    for modifier in modifiers():
        typer.echo(f"{modifier.name}+...  {modifier.summary}")
    typer.echo("One mechanism with its formula, curve and paper: unsoft show NAME")


def _record(name: str, mechanism: Any) -> dict[str, Any]:
    """Return a mechanism as plain data; a family has a summary and paper, and a formula if it runs one."""
    from unsoft.formula import Formula

    if isinstance(mechanism, Formula):
        content: dict[str, Any] = {"formula": mechanism.to_dict()}
    else:
        content = {"summary": mechanism.summary, "paper": mechanism.family.paper}
        if mechanism.formula is not None:
            content["formula"] = mechanism.formula.to_dict()
    return {"name": name, **content, "properties": mechanism.properties.to_dict()}
