"""``unsoft compare``: mechanisms side by side, as one page."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, Plugin, check_drawing, check_folder, load_plugin, path_option
from unsoft.cli.claim_chain import print_chain
from unsoft.cli.mechanisms import Formulas, NamesOption, chosen, complete_mechanism
from unsoft.cli.terminal import INTERRUPTED, cell, console, note, progress, say, show_table, warn_if_busy

if TYPE_CHECKING:
    from unsoft.compare.jobs import Answer, Job
    from unsoft.compare.section import Request
    from unsoft.compare.store import Store

_MARKS = {"yes": "●", "partly": "◐", "no": "○", "not run": " "}


def command(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MECHANISM]...",
            help="Names of mechanisms, or two compare.json to see what changed; without any, a selection.",
            show_default=False,
            autocompletion=complete_mechanism,
        ),
    ] = None,
    mechanism_option: NamesOption = None,
    formula: Formulas = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, a minute or so.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every mechanism, long rows, deep stacks.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Inspect a model, and swap each mechanism in: smollm2, minilm, a folder, a name on the hub."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only one section, such as focus or hijack, or claims; may be repeated."),
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(help="One claim alone: its source, its rule, what is measured, the verdict. No page."),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="Trained models: study.db, or what unsoft study exported.", show_default=False),
    ] = None,
    verdicts: Annotated[
        Path | None,
        typer.Option(help="What unsoft neurons or steer found in a model of yours.", show_default=False),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure everything again, whatever earlier runs have kept.")
    ] = False,
    out: Annotated[
        Path, path_option("Folder for the page, its data (JSON, CSV) and figures (PNG, SVG).")
    ] = Path("report"),
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Put mechanisms side by side and write one page that needs no network.

    What is measured is kept, so a run that was interrupted, or asked again, goes on where the last one ended.

    \b
    Examples:
      unsoft compare cog softmax magnitude --quick --out report
      unsoft compare softmax logn+mine --formula "name=mine;weight=tanh(s)/n"
    """
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    files = [name for name in (*(mechanism or ()), *(mechanism_option or ())) if name.endswith(".json")]
    if files:
        if len(files) != 2 or len([*(mechanism or ()), *(mechanism_option or ()), *(formula or ())]) != 2:
            raise typer.BadParameter(
                "to see what changed, give two files compare.json and nothing else", param_hint="'MECHANISM'"
            )
        _two_runs(files, out, as_json)
        return
    load_plugin(plugin)
    names = chosen(mechanism, mechanism_option, formula)
    if claim is None:
        check_drawing()
        check_folder(out)
    from unsoft.bench.machine import cores
    from unsoft.compare.jobs import run
    from unsoft.compare.level import FULL, QUICK, STANDARD
    from unsoft.compare.section import Request, plan
    from unsoft.compare.store import Store, default_folder
    from unsoft.compare.subject import default_names, subjects_of

    level = QUICK if quick else FULL if full else STANDARD
    if all("{" in name for name in names):
        names = [*default_names(level, bool(names)), *names]
    records = [None if file is None else str(file) for file in (study, verdicts)]
    request = Request(subjects_of(names, []), level, model, *records)
    if claim is not None:
        print_chain(claim, request, Store(default_folder()), again)
        return
    _check_sections(request, only or [])
    jobs = plan(request, only or ())
    if any(job.timed for job in jobs):
        warn_if_busy()
    store = Store(default_folder())
    with progress(len(jobs), refresh=False) as announce:  # a thread that draws would be copied with us

        def told(job: Job, number: int, left: float) -> None:
            announce(number, job.name, f"{job.title}, about {left:.0f} s left")

        answers, finished = run(jobs, store, told, again=again, processes=len(cores()))
    _write(out, request, answers, finished, store, as_json)
    if any(answer.disturbed for answer in answers):
        note(
            "other programs used the machine while times were taken; they are shown, but the next run takes"
            " them again"
        )
    if not finished:
        note("interrupted; the page shows what was measured until then, the next run goes on from there")
        raise typer.Exit(INTERRUPTED)
    for job, answer in zip(jobs, answers, strict=True):
        if job.required and answer.problem:
            note(f"{job.title} could not be measured: {answer.problem}")
            raise typer.Exit(1)


def _check_sections(request: Request, only: list[str]) -> None:
    """Wrong names of sections, and sections that need another option."""
    from unsoft.compare.section import CLAIMS, sections

    known = {section.name: section for section in sections()}
    for name in only:
        if name not in known and name != CLAIMS:
            there = ", ".join((*known, CLAIMS))
            raise typer.BadParameter(
                f"there is no section {name!r}; there are {there}", param_hint="'--only'"
            )
        needs = known[name].needs if name in known else ""
        if needs and not getattr(request, needs):
            raise typer.BadParameter(f"the section {name!r} needs --{needs}", param_hint="'--only'")


def _write(
    out: Path, request: Request, answers: list[Answer], finished: bool, store: Store, as_json: bool
) -> None:
    from unsoft.bench.machine import cores
    from unsoft.compare.jobs import Results
    from unsoft.compare.output import PAGE, RECORD, record, views_of, write
    from unsoft.report.comparison.page import provenance

    line = shlex.join(["unsoft", *sys.argv[1:]])
    content = record(
        request.subjects,
        answers,
        request.level,
        finished=finished,
        command=line,
        out=str(out),
        model=request.model,
        study=request.study,
    )
    views = views_of(Results(content))
    counts = write(out, content, views, request.subjects, store, say, len(cores()))
    if as_json:
        typer.echo(json.dumps(content, indent=1))
        return
    _print_scoreboard(content)
    for part in (part for view in views for part in view["parts"] if part.in_terminal):
        typer.echo(f"{part.heading}\n{part.text}")
        names = [column["name"] for column in part.columns]
        columns = {
            column["title"]: "right" if name != names[0] else "left"
            for name, column in zip(names, part.columns, strict=True)
        }
        if part.rows:
            show_table(columns, [[cell(row[name]) for name in names] for row in part.rows], box=False)
    typer.echo(f"{provenance(content['answers'])} (--again measures everything again)")
    typer.echo(f"{out / PAGE}: the page\n{out / RECORD}: everything measured")
    typer.echo(
        f"{out / 'data'}: {counts['tables']} tables\n{out / 'figures'}: {counts['figures']} figures as PNG"
        " and SVG"
    )


def _print_scoreboard(content: dict[str, Any]) -> None:
    """The columns that have an answer, and how many claims got which verdict."""
    board = content["scoreboard"]
    shown = [
        column
        for column in content["columns"]
        if any(row["cells"][column["name"]]["value"] is not None for row in board)
    ]
    if shown:
        rows = []
        for row in board:
            cells = [row["cells"][column["name"]] for column in shown]
            shown_cells = (
                f"{'≥ ' if c['beyond'] else ''}{cell(c['value'])} {_MARKS[c['reading']]}" for c in cells
            )
            rows.append([cell(row["mechanism"]), *shown_cells])
        show_table({"mechanism": "left"} | {column["title"]: "right" for column in shown}, rows, box=False)
    verdicts = [claim["verdict"] for claim in content["claims"] if claim["counts"]]
    counts = [(verdicts.count(verdict), verdict) for verdict in content["verdicts"] if verdict in verdicts]
    if len(counts) > 1:
        said = ", ".join(f"{count} {verdict}" for count, verdict in counts)
        typer.echo(f"claims that could have failed: {said}")


def _two_runs(names: list[str], out: Path, as_json: bool) -> None:
    check_drawing()
    check_folder(out)
    from unsoft.files import write_whole
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
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "changes.html", two_runs_page(first, second, (names[0], names[1])).encode())
    if as_json:
        changes = {"differences": differences(first, second), "claims": changed_claims(first, second)}
        typer.echo(json.dumps(changes | {"caveats": caveats(first, second)}, indent=1))
        return
    fields = ("mechanism", "question", "first", "second", "change", "word")
    rows = [
        [cell(row[field]) for field in fields] for row in differences(first, second) if row["word"] != "same"
    ]
    if rows:
        show_table({field if field != "word" else "": "left" for field in fields}, rows, box=False)
    else:
        typer.echo("no number changed")
    screen = console()
    for sentence in caveats(first, second):
        screen.print(sentence)
    for claim in changed_claims(first, second):
        screen.print(f"{claim['claim']} {claim['first']} -> {claim['second']}")
    typer.echo(str(out / "changes.html"))
