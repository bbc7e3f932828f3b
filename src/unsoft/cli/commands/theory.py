"""``unsoft theory``: sparsity, clones and finite rows of formulas, in closed form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, check_drawing, path_option, prepare_folder, wrong
from unsoft.cli.mechanisms import Names, read_mechanisms
from unsoft.cli.terminal import print_json, show_table

if TYPE_CHECKING:
    from unsoft.cli.theory_data import TheorySubject

_DEFAULT = ("softmax", "cog", "sinh", "relu", "relu2", "sigmoid", "tanh", "identity")
_SHOWN = 7  # columns of gamma in the terminal
_MOST = 10_000  # points of beta and gamma


def command(
    mechanism: Names = None,
    beta: Annotated[str, typer.Option(help="Means of the logits: -1,0,1 or first:last:count.")] = "-1,0,1",
    gamma: Annotated[
        str, typer.Option(help="Spreads (standard deviations) of the logits, written in the same way.")
    ] = "0.05:4:80",
    n: Annotated[int, typer.Option(help="Number of keys, for formulas that depend on it.")] = 1024,
    out: Annotated[
        Path | None, path_option("Write figures (HTML, PNG, SVG) and data (CSV, JSON) to this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how evenly a formula spreads its weights.

    S = E|a| / sqrt(E a^2) of a long row with logits N(beta, gamma^2): 1 is even, 0 is all on one key. With
    --out also: the curves, clones against a unique key, short rows, few dimensions.

    \b
    Examples:
      unsoft theory softmax relu2 --beta=-1,0,1 --gamma 0.5,1,2
      unsoft theory "tanh(s)*exp(abs(s))" --out theory
    """
    betas, gammas = read_range("--beta", beta), read_range("--gamma", gamma)
    if min(gammas) < 0:
        raise wrong(f"a spread cannot be negative, as {min(gammas):g} is", "'--gamma'")
    if len(betas) * len(gammas) > _MOST:
        raise wrong(f"{len(betas)} x {len(gammas)} points are more than {_MOST}", "'--beta'")
    if n < 1:
        raise wrong(f"expected 1 key or more, not {n}", "'--n'")
    subjects = _subjects(read_mechanisms(mechanism), n)
    if out is not None:
        check_drawing()
        prepare_folder(out)
    from unsoft.cli.theory_data import sparsity_rows

    rows = sparsity_rows(subjects, betas, gammas)
    if as_json:
        print_json(rows)
    else:
        _print_table(rows, gammas)
    if out is not None:
        from unsoft.cli.theory_figures import figures, write_figure
        from unsoft.lab.report.figure import vega_script

        library = vega_script()
        for figure, controls in figures(subjects, rows):
            write_figure(figure, controls, out, library)
            typer.echo(f"{out / figure.name}.html .png .svg .csv .json: {figure.title}", err=as_json)


def read_range(option: str, text: str) -> list[float]:
    """Parse "a,b,c", or "first:last:count" for that many evenly spaced numbers.

    >>> read_range("--beta", "-1, 0"), read_range("--gamma", "0:1:5")
    ([-1.0, 0.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    problem = wrong(
        f"expected numbers as in '0.5,1,2' or 'first:last:count' as in '0.1:4:80', not {text!r}",
        f"'{option}'",
    )
    try:
        if ":" in text:
            first, last, count = text.split(":")
            steps = int(count)
            if not 2 <= steps <= _MOST:
                raise problem
            numbers = [float(first) + (float(last) - float(first)) * k / (steps - 1) for k in range(steps)]
        else:
            numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise problem from None
    if not all(map(math.isfinite, numbers)) or len(numbers) > _MOST:
        raise problem
    return numbers


def _subjects(names: list[str], n: int) -> list[TheorySubject]:
    from unsoft.cli.theory_data import TheorySubject
    from unsoft.modules.registry import label_of, resolve_formula

    return [
        TheorySubject(label_of(name), resolve_formula(name), n, named="{" not in name)
        for name in names or _DEFAULT
    ]


def _print_table(rows: list[dict[str, Any]], gammas: list[float]) -> None:
    every = sorted(set(gammas))
    shown = every
    if len(every) > _SHOWN:
        shown = [every[round(k * (len(every) - 1) / (_SHOWN - 1))] for k in range(_SHOWN)]
    titles = ("mechanism", "beta", *(f"gamma {gamma:.3g}" for gamma in shown), "lowest", "found by")
    columns = {title: "left" if title in ("mechanism", "found by") else "right" for title in titles}
    curves: dict[tuple[str, float], dict[float, float]] = {}
    found_by = {}
    for row in rows:
        curves.setdefault((row["mechanism"], row["beta"]), {})[row["gamma"]] = row["S"]
        found_by[row["mechanism"]] = row["found by"]
    lines = []
    for (name, beta), curve in curves.items():
        values = [*(curve[gamma] for gamma in shown), min(curve.values())]
        lines.append([name, f"{beta:g}", *map(_cell, values), found_by[name]])
    show_table(columns, lines, title="S: 1 even, 0 all on one key", keys=2)


def _cell(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
