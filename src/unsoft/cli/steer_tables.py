"""Tables of ``unsoft steer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from unsoft.cli.terminal import show_table

if TYPE_CHECKING:
    from unsoft.hf.steering.controls import Judgement


def show_measures(measures: list[dict[str, Any]]) -> None:
    """What steering changed in the scenes, beside a random direction."""
    columns = dict.fromkeys(
        ("measure", "before", "steered", "change", "interval", "random direction"), "right"
    )
    rows = [
        [
            one["name"],
            *(f"{one[key]:.3f}" for key in ("before", "after")),
            f"{one['change']:+.3f}",
            f"{one['low']:+.3f} to {one['high']:+.3f}",
            f"{one['random']:.3f}",
        ]
        for one in measures
    ]
    show_table(columns, rows, box=False)


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
