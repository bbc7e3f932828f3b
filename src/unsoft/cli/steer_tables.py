"""Tables of ``unsoft steer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from unsoft.cli.terminal import show_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.steering.controls import Judgement


def show_judgement(judgement: Judgement) -> None:
    """The table of controls and the verdict, on the terminal."""
    columns = {"control": "whole", "effect": "right", "interval": "whole", "passed": "left", "rule": "left"}
    rows = [
        [one.name, f"{one.effect:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}", _yes(one.passed), one.rule]
        for one in judgement.controls
    ]
    show_table(columns, rows, box=False)
    typer.echo(f"{judgement.verdict}: {judgement.told()}")


def _yes(passed: bool) -> str:
    return "yes" if passed else "NO"
