"""``unsoft bench``: time and memory of mechanisms relative to SDPA."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.arguments import AsJson, ToFile, check_file, write_result, wrong
from unsoft.cli.mechanisms import Names, read_mechanisms
from unsoft.cli.terminal import interrupted, note, progress, show_table, warn_if_busy

if TYPE_CHECKING:
    from unsoft.lab.bench.plan import Measured


def command(
    mechanism: Names = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, about a minute.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every case, FlexAttention too; half an hour.")
    ] = False,
    to: ToFile = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this group of steps; may be repeated.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda for the GPU engine on this machine's GPU.")
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Time mechanisms next to PyTorch's fused softmax (SDPA).

    Without an option: all mechanisms, about six minutes. An interrupted run keeps its results so far.
    On a GPU the first run compiles every kernel, which takes most of the time: name a few mechanisms first.

    \b
    Examples:
      unsoft bench --quick
      unsoft bench cog relu2 --only main --to bench.json
      unsoft bench cog softmax --device cuda --to gpu.json
    """
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    check_file(to, "'--to'")
    from unsoft.files import write_json
    from unsoft.lab.bench.plan import FULL, QUICK, STANDARD, choose, gpu_steps, steps
    from unsoft.lab.bench.record import record
    from unsoft.lab.bench.timing import Timing

    level = QUICK if quick else FULL if full else STANDARD
    names = read_mechanisms(mechanism) or None
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
            if to is not None:  # after every step, so that a run that is killed leaves its results
                write_json(to, record(level.name, results, finished=False, device=device))
        finished = True
    content = record(level.name, results, finished=finished, device=device)
    if not as_json:
        _show(results)
    write_result(content, to, as_json=as_json)
    if not finished:
        raise interrupted("the figures above are those measured until then")
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
