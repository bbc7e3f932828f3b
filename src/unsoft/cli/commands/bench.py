"""``unsoft bench``: time and memory of mechanisms relative to SDPA."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.arguments import AsJson, Plugin, check_file, load_plugin, path_option, wrong
from unsoft.cli.mechanisms import Formulas, Names, NamesOption, chosen
from unsoft.cli.terminal import INTERRUPTED, note, print_json, progress, show_table, warn_if_busy

if TYPE_CHECKING:
    from unsoft.lab.bench.plan import Measured


def command(
    mechanism: Names = None,
    mechanism_option: NamesOption = None,
    formula: Formulas = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, about a minute.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every case, FlexAttention too; half an hour.")
    ] = False,
    out: Annotated[Path | None, path_option("Write results to this JSON file.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this group of steps; may be repeated.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda for the GPU engine on this machine's GPU.")
    ] = "cpu",
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Time mechanisms next to PyTorch's fused softmax (SDPA).

    Without an option: all mechanisms, about six minutes. An interrupted run keeps its results so far.
    On a GPU the first run compiles every kernel, which takes most of the time: name a few mechanisms first.

    \b
    Examples:
      unsoft bench --quick
      unsoft bench cog relu2 --only main --out bench.json
      unsoft bench cog softmax --device cuda --out gpu.json
    """
    load_plugin(plugin)
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    if out is not None:
        check_file(out)
    from unsoft.files import write_json
    from unsoft.lab.bench.plan import FULL, QUICK, STANDARD, choose, gpu_steps, steps
    from unsoft.lab.bench.record import record
    from unsoft.lab.bench.timing import Timing

    level = QUICK if quick else FULL if full else STANDARD
    names = chosen(mechanism, mechanism_option, formula) or None
    if device != "cpu":
        _check_device(device)
    todo = choose(steps(level, names) if device == "cpu" else gpu_steps(level, names), only)
    warn_if_busy()
    results: list[Measured] = []
    finished = False
    with suppress(KeyboardInterrupt), progress(len(todo), refresh=False) as announce:
        for number, step in enumerate(todo):
            announce(number, f"{number} {step.title}", step.title)
            results += step.measure()
            if out is not None:  # after every step, so that a run that is killed leaves its results
                write_json(out, record(level.name, results, finished=False, device=device))
        finished = True
    content = record(level.name, results, finished=finished, device=device)
    if as_json:
        print_json(content)
    else:
        _show(results)
    if out is not None:
        write_json(out, content)
        typer.echo(f"written to {out}", err=as_json)
    if not finished:
        note("interrupted; the figures above are those measured until then")
        raise typer.Exit(INTERRUPTED)
    bad = [x for x in results if isinstance(x, Timing) and x.ratio is None]
    if bad:
        note("some results are wrong or missing; their times are not shown")
        for problem in dict.fromkeys(f"{x.engine}: {x.problem}" for x in bad if x.problem):
            note(problem)
        raise typer.Exit(1)


def _check_device(device: str) -> None:
    from unsoft.cli.installation import gpu_problem

    if device != "cuda":
        raise wrong(f"{device!r} is neither cpu nor cuda", "'--device'")
    if reason := gpu_problem(device):
        raise RuntimeError(f"--device: the engine 'triton' cannot run here: {reason}")


def _show(results: list[Measured]) -> None:
    from unsoft.lab.bench.machine import machine, versions
    from unsoft.lab.bench.record import tables

    typer.echo(f"{machine()}; " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    for table in tables(results):
        show_table(table.columns, table.rows, title=table.title, keys=2)
