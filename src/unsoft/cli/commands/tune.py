"""``unsoft tune``: which tile sizes are fastest on this GPU?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, check_file, path_option
from unsoft.cli.mechanisms import Formulas, Names, NamesOption, chosen
from unsoft.cli.terminal import INTERRUPTED, note, progress, show_table

_DTYPES = ("bfloat16", "float16", "float32")


def command(
    mechanism: Names = None,
    mechanism_option: NamesOption = None,
    formula: Formulas = None,
    width: Annotated[list[int] | None, typer.Option(help="Head width; may be repeated (64 and 128).")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    length: Annotated[int, typer.Option(help="Tokens of the call that is timed.")] = 4096,
    out: Annotated[Path | None, path_option("Keep the figures in this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the GPU engine's kernels with many tile sizes and keep the fastest for later calls.

    Some minutes for each mechanism and width, most of it compiling. What has been found stays if you
    interrupt it; 'unsoft cache clear' forgets it.

    \b
    Examples:
      unsoft tune cog
      unsoft tune cog softmax --width 128 --out tiles.json
    """
    widths = width or [64, 128]
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="'--dtype'")
    if not all(1 <= x <= 256 for x in widths):
        raise typer.BadParameter("heads are 1 to 256 wide", param_hint="'--width'")
    if not 16 <= length <= 1 << 20:
        raise typer.BadParameter("use 16 to 1048576 tokens", param_hint="'--length'")
    if out is not None:
        check_file(out)
    from unsoft.cli.installation import gpu_problem
    from unsoft.mechanisms.core.registry import resolve_formula

    names = chosen(mechanism, mechanism_option, formula) or ["softmax", "cog"]
    formulas = {name: resolve_formula(name) for name in names}
    if reason := gpu_problem():
        raise RuntimeError(f"the engine 'triton' cannot run here: {reason}")
    rows, finished = _measure(formulas, widths, dtype, length)
    from unsoft.bench.machine import gpu, versions

    record = {"schema": 1, "gpu": gpu(), "versions": versions(), "finished": finished, "tiles": rows}
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        _show(rows)
    if out is not None:
        from unsoft.files import write_json

        write_json(out, record)
        typer.echo(f"written to {out}", err=as_json)
    if not finished:
        note("interrupted; what was found until then is kept")
        raise typer.Exit(INTERRUPTED)


def _measure(
    formulas: dict[str, Any], widths: list[int], dtype: str, length: int
) -> tuple[list[dict[str, Any]], bool]:
    import torch

    from unsoft.engines.triton.tuning import tune

    rows: list[dict[str, Any]] = []
    try:
        with progress(len(formulas) * len(widths)) as announce:
            for number, (name, width) in enumerate((f, w) for f in formulas for w in widths):
                announce(number, f"{name} {width}", f"{name}, width {width}")
                about = {"mechanism": name, "width": width, "dtype": dtype, "length": length}
                found = tune(formulas[name], width=width, dtype=getattr(torch, dtype), length=length)
                rows += [about | _row(x) for x in found]
    except KeyboardInterrupt:
        return rows, False
    return rows, True


def _row(found: Any) -> dict[str, Any]:
    return {
        "kernel": found.kernel,
        "tile": list(found.sizes),
        "milliseconds": 1e3 * found.seconds,
        "tile before": list(found.before),
        "milliseconds before": 1e3 * found.seconds_before,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    columns = {"mechanism": "left", "width": "right", "kernel": "left", "tile": "left", "ms": "right"}
    table = [
        (r["mechanism"], r["width"], r["kernel"], r["tile"], f"{r['milliseconds']:.3f}")
        + (r["tile before"], f"{r['milliseconds before']:.3f}")
        for r in rows
    ]
    show_table(columns | {"before": "left", "ms before": "right"}, table)
