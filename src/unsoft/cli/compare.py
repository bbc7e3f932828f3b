"""``unsoft compare``: mechanisms side by side, as one page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.folder import check_folder, prepare_folder

if TYPE_CHECKING:
    from unsoft.compare.job import Answer, Job
    from unsoft.compare.level import Level
    from unsoft.compare.store import Store
    from unsoft.compare.subject import Subject

_INTERRUPTED = 130


def compare(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help="Names of mechanisms, or two compare.json to see what changed; without any, a selection.", show_default=False),
    ] = None,
    formula: Annotated[
        list[str] | None, typer.Option(help='One of your own, "weight=...;mass=...;peak=..."; may be repeated.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, less than a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every mechanism, long rows, deep stacks.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Inspect a model, and swap each mechanism in: smollm2, minilm, a folder, or a name on the hub.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this section (focus, hijack, sign, collapse, solver, cost, claims, model); may be repeated."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure everything anew, whatever earlier runs have kept.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page, its data (JSON, CSV) and figures (PNG, SVG).")] = Path("report"),
) -> None:  # fmt: skip
    """Put mechanisms side by side and write one page that needs no network.

    What is measured is kept, so a run that was interrupted, or asked again, takes up where the last one ended.
    """
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    names = list(mechanism or [])
    if any(name.endswith(".json") for name in names):
        _two_runs(names, out)
        return
    from unsoft.cli.bench import warn_if_busy
    from unsoft.cli.theory import read_formula

    own = [read_formula(text) for text in formula or []]
    _prepare(out)
    from unsoft.compare.level import FULL, QUICK, STANDARD, mechanisms_of
    from unsoft.compare.model import INSPECTION, Model
    from unsoft.compare.plan import SECTIONS, plan
    from unsoft.compare.run import run
    from unsoft.compare.store import Store, default_folder
    from unsoft.compare.subject import subjects_of

    sections = (*SECTIONS, "model")
    if unknown := [section for section in only or [] if section not in sections]:
        raise typer.BadParameter(
            f"there is no section {unknown[0]!r}; there are {', '.join(sections)}", param_hint="'--only'"
        )
    if "model" in (only or ()) and model is None:
        raise typer.BadParameter("the section 'model' needs --model", param_hint="'--only'")
    level = QUICK if quick else FULL if full else STANDARD
    subjects = subjects_of(
        names
        or (mechanisms_of(level) if not own else ("softmax", "cog", "relu2", "linear-relu", "magnitude")),
        own,
    )
    jobs = plan(subjects, level, only or ())
    if model is not None:  # first, so that a model that cannot be loaded is told before anything is measured
        jobs = Model(model).jobs(subjects) + jobs
    if any(job.timed for job in jobs):
        warn_if_busy()
    store = Store(default_folder())
    with _progress(len(jobs)) as announce:
        answers, finished = run(jobs, store, announce, again=again)
    _write(out, store, subjects, answers, level, finished)
    if any(answer.disturbed for answer in answers):
        typer.echo(
            "unsoft: other programs used the machine while times were taken; they are shown, but the next run takes them anew",
            err=True,
        )
    if not finished:
        typer.echo(
            "unsoft: interrupted; the page shows what was measured until then, the next run goes on from there",
            err=True,
        )
        raise typer.Exit(_INTERRUPTED)
    if failed := next((answer for answer in answers if answer.name == INSPECTION and answer.problem), None):
        typer.echo(f"unsoft: {failed.mechanism} could not be inspected: {failed.problem}", err=True)
        raise typer.Exit(1)


def _write(
    out: Path, store: Store, subjects: list[Subject], answers: list[Answer], level: Level, finished: bool
) -> None:
    from unsoft.compare.library import vega
    from unsoft.compare.model import model_variables, swap_table
    from unsoft.compare.record import record
    from unsoft.files import write_whole
    from unsoft.report.comparison.figures import figures, map_figure
    from unsoft.report.comparison.files import PAGE, write_pictures, write_record, write_tables
    from unsoft.report.comparison.page import comparison_page, provenance
    from unsoft.report.results import Results

    content = record(subjects, answers, level, finished=finished, command=_command(), out=str(out))
    results = Results(content)
    drawn = figures(results)
    formulas = {s.label: s.formula for s in subjects if s.formula is not None}
    page = comparison_page(results, drawn, formulas, vega(store), model_variables(answers))
    for folder in (out, out / "data", out / "figures"):
        prepare_folder(folder)
    write_whole(out / PAGE, page.encode())
    written = [out / PAGE, write_record(out, content)]
    tables = write_tables(out, drawn, content)
    maps = map_figure(results)
    specs = {figure.name: figure.for_file() for figure in drawn} | ({} if maps is None else {"maps": maps})
    for name in write_pictures(out, specs):
        _say(f"drawing {name}")
    _print(content)
    _print_swaps(swap_table(answers))
    typer.echo(f"{provenance(content['answers'])} (--again measures anew)")
    typer.echo(
        f"{written[0]}: the page\n{written[1]}: everything measured\n{out / 'data'}: {len(tables)} tables\n{out / 'figures'}: {len(specs)} figures as PNG and SVG"
    )


def _print(content: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from unsoft.report.claims import NOT_RUN, VERDICTS
    from unsoft.report.escape import printable
    from unsoft.report.page import number
    from unsoft.report.scoreboard import QUESTIONS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mechanism")
    shown = [
        q
        for q in QUESTIONS
        if any(row["cells"][q.name]["value"] is not None for row in content["scoreboard"])
    ]
    for question in shown:
        table.add_column(question.title, justify="right")
    marks = {"yes": "●", "partly": "◐", "no": "○", "not run": " "}
    for row in content["scoreboard"]:
        cells = [row["cells"][question.name] for question in shown]
        table.add_row(
            printable(row["mechanism"]), *(f"{number(c['value'])} {marks[c['reading']]}" for c in cells)
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=150)
    if shown:
        console.print(table)
    counts = {
        verdict: sum(claim["verdict"] == verdict for claim in content["claims"]) for verdict in VERDICTS
    }
    if counts[NOT_RUN] < len(content["claims"]):
        console.print(
            "claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        )


def _print_swaps(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    if found["before"] is None:
        typer.echo(f"perplexity: {found['problem']}")
        return
    from unsoft.report.escape import printable
    from unsoft.report.page import number

    typer.echo(
        f"perplexity on {found['text']}, {found['tokens']} tokens: {number(found['before'])} as the model is"
    )
    for row in found["rows"]:
        typer.echo(
            f"  {printable(row['mechanism']):20} {number(row['after']):>9} after the swap, {row['times']:.4g} times that"
        )
    for row in found["refused"]:
        typer.echo(f"  {printable(row['mechanism']):20} not swapped: {row['problem']}")


def _two_runs(names: list[str], out: Path) -> None:
    if len(names) != 2 or not all(name.endswith(".json") for name in names):
        raise typer.BadParameter(
            "to see what changed, give two files compare.json and nothing else", param_hint="'MECHANISM'"
        )
    check_folder(out)
    from unsoft.report.comparison.two_runs import (
        caveats,
        changed_claims,
        differences,
        read_record,
        two_runs_page,
    )

    try:
        first, second = (read_record(Path(name)) for name in names)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="'MECHANISM'") from None
    _prepare(out)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from unsoft.files import write_whole
    from unsoft.report.escape import printable
    from unsoft.report.page import number

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("mechanism", "question", "first", "second", "change", ""):
        table.add_column(title)
    rows = [row for row in differences(first, second) if row["word"] != "same"]
    for row in rows:
        table.add_row(
            printable(row["mechanism"]),
            row["question"],
            *(number(row[x]) for x in ("first", "second", "change")),
            row["word"],
        )
    console = Console(highlight=False, markup=False)
    console.print(table if rows else "no number changed")
    for sentence in caveats(first, second):
        console.print(sentence)
    for claim in changed_claims(first, second):
        console.print(f"{claim['claim']} {claim['first']} -> {claim['second']}")
    prepare_folder(out)
    write_whole(out / "changes.html", two_runs_page(first, second, (names[0], names[1])).encode())
    typer.echo(str(out / "changes.html"))


def _prepare(out: Path) -> None:
    """Everything that would stop the page, before any work."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise typer.BadParameter(
            "the page needs altair and vl-convert-python; install them with pip install 'unsoft[report]'",
            param_hint="'--out'",
        ) from None
    check_folder(out)


def _command() -> str:
    return shlex.join(["unsoft", *sys.argv[1:]])


def _say(line: str) -> None:
    from rich.console import Console

    if Console(stderr=True).is_terminal:
        typer.echo(f"{line}\x1b[K", err=True, nl=False)
        typer.echo("\r", err=True, nl=False)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Job, int, float], None]]:
    """A bar on a terminal, else a line whenever another kind of measurement begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        said: list[str] = []

        def announce(job: Job, number: int, left: float) -> None:
            if not said or said[-1] != job.name:
                said.append(job.name)
                typer.echo(f"[{number + 1}/{total}] {job.title}, about {left:.0f} s left", err=True)

        yield announce
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda job, number, left: bar.update(
            task, completed=number, description=f"{job.title}, about {left:.0f} s left"
        )
