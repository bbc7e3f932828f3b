"""``unsoft theory``: what can focus, what is hijacked, and how soon the theory holds."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.folder import prepare_folder

if TYPE_CHECKING:
    from unsoft.cli.theory_data import Subject
    from unsoft.formula import Formula

_DEFAULT = ("softmax", "cog", "sinh", "relu", "relu2", "sigmoid", "tanh", "identity")
_PARTS = ("weight", "mass", "peak", "norm", "offset_mass", "name")
_SHOWN = 7  # columns of gamma in the terminal
_MOST = 10_000  # points of beta and gamma


def theory(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help="Names of formulas; without any, a selection.", show_default=False),
    ] = None,
    beta: Annotated[str, typer.Option(help="Means of the logits: -1,0,1 or first:last:count.")] = "-1,0,1",
    gamma: Annotated[str, typer.Option(help="Spreads of the logits, likewise.")] = "0.05:4:80",
    formula: Annotated[
        list[str] | None,
        typer.Option(help='One of your own, "weight=...;mass=...;peak=..."; may be repeated.'),
    ] = None,
    n: Annotated[int, typer.Option(help="Number of keys, for formulas that depend on it.")] = 1024,
    out: Annotated[
        Path | None, typer.Option(help="Keep figures (HTML, PNG, SVG) and data (CSV, JSON) in this folder.")
    ] = None,
) -> None:
    """Show how evenly a long row spreads its weight: S = E|a| / sqrt(E a^2) for logits N(beta, gamma^2).

    1 is even, 0 is all on one key. With --out also: the curves, clones against a unique key, short rows, few
    dimensions.
    """
    betas, gammas = read_range("--beta", beta), read_range("--gamma", gamma)
    if min(gammas) < 0:
        raise typer.BadParameter(
            f"a spread cannot be negative, as {min(gammas):g} is", param_hint="'--gamma'"
        )
    if len(betas) * len(gammas) > _MOST:
        raise typer.BadParameter(
            f"{len(betas)} x {len(gammas)} points are more than {_MOST}", param_hint="'--beta'"
        )
    if n < 1:
        raise typer.BadParameter(f"expected 1 key or more, not {n}", param_hint="'--n'")
    subjects = _subjects(mechanism or [], [read_formula(text) for text in formula or []], n)
    if out is not None:
        _prepare(out)
    from unsoft.cli.theory_data import sparsity_rows

    rows = sparsity_rows(subjects, betas, gammas)
    _print_table(rows, gammas)
    if out is not None:
        from unsoft.cli.theory_figures import figures, write_figure

        for figure in figures(subjects, rows):
            write_figure(figure, out)
            typer.echo(f"{out / figure.name}.html .png .svg .csv .json: {figure.title}")


def read_range(option: str, text: str) -> list[float]:
    """Numbers "a,b,c", or "first:last:count" for that many at equal distances.

    >>> read_range("--beta", "-1, 0"), read_range("--gamma", "0:1:5")
    ([-1.0, 0.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    wrong = typer.BadParameter(
        f"expected numbers as in '0.5,1,2' or 'first:last:count' as in '0.1:4:80', not {text!r}",
        param_hint=f"'{option}'",
    )
    try:
        if ":" in text:
            first, last, count = text.split(":")
            steps = int(count)
            if not 2 <= steps <= _MOST:
                raise wrong
            found = [float(first) + (float(last) - float(first)) * k / (steps - 1) for k in range(steps)]
        else:
            found = [float(part) for part in text.split(",")]
    except ValueError:
        raise wrong from None
    if not all(map(math.isfinite, found)) or len(found) > _MOST:
        raise wrong
    return found


def read_formula(text: str) -> Formula:
    """Reads "weight=...;mass=...;peak=..." (also norm, offset_mass, name); other names are parameters.

    >>> read_formula("weight=exp(tau*s - m); mass=exp(tau*s - m); peak=tau*s; tau=2").params["tau"]
    2.0
    """
    from unsoft.formula import Formula

    parts: dict[str, str] = {}
    params: dict[str, float] = {}
    for piece in filter(str.strip, text.split(";")):
        name, found, content = (x.strip() for x in piece.partition("="))
        if not found or not content or name in parts or name in params:
            raise typer.BadParameter(
                f"expected 'weight=...;mass=...;peak=...', each once, but there is {piece.strip()!r}",
                param_hint="'--formula'",
            )
        if name in _PARTS:
            parts[name] = content
            continue
        try:
            params[name] = float(content)
        except ValueError:
            raise typer.BadParameter(
                f"{name!r} is neither a part ({', '.join(_PARTS)}) nor a parameter with a number,"
                f" in {piece.strip()!r}",
                param_hint="'--formula'",
            ) from None
    if not re.fullmatch(r"[\w .+()-]*", parts.get("name", "")):  # it becomes part of pages and tables
        raise typer.BadParameter(
            f"a name is made of letters, digits and . + - ( ), not {parts['name']!r}",
            param_hint="'--formula'",
        )
    if "weight" not in parts:
        raise typer.BadParameter("a formula needs at least 'weight=...'", param_hint="'--formula'")
    return Formula.from_dict({**parts, "params": params})


def _subjects(names: list[str], own: list[Formula], n: int) -> list[Subject]:
    from unsoft.cli.theory_data import Subject
    from unsoft.mechanisms.core.registry import resolve_formula

    if not names and not own:
        names = list(_DEFAULT)
    subjects = [Subject(name, resolve_formula(name), n, named=True) for name in dict.fromkeys(names)]
    return subjects + [
        Subject(formula.name or str(formula.weight), formula, n, named=False) for formula in own
    ]


def _prepare(out: Path) -> None:
    """Everything that would stop the figures, before any work."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise typer.BadParameter(
            "figures need altair and vl-convert-python; install them with pip install 'unsoft[report]'",
            param_hint="'--out'",
        ) from None
    prepare_folder(out)


def _print_table(rows: list[dict], gammas: list[float]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    every = sorted(set(gammas))
    shown = (
        every
        if len(every) <= _SHOWN
        else [every[round(k * (len(every) - 1) / (_SHOWN - 1))] for k in range(_SHOWN)]
    )
    table = Table(box=box.SIMPLE_HEAD, title="S: 1 even, 0 all on one key", title_justify="left")
    for title in ("mechanism", "beta", *(f"gamma {gamma:.3g}" for gamma in shown), "lowest", "found by"):
        table.add_column(title, justify="left" if title in ("mechanism", "found by") else "right")
    curves: dict[tuple[str, float], dict[float, float]] = {}
    found_by = {}
    for row in rows:
        curves.setdefault((row["mechanism"], row["beta"]), {})[row["gamma"]] = row["S"]
        found_by[row["mechanism"]] = row["found by"]
    for (name, beta), curve in curves.items():
        cells = [_cell(curve[gamma]) for gamma in shown]
        table.add_row(name, f"{beta:g}", *cells, _cell(min(curve.values())), found_by[name])
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(table, markup=False)


def _cell(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
