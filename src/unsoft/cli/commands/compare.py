"""``unsoft compare``: mechanisms side by side, as one page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unsoft.cli import arguments, terminal
from unsoft.cli.arguments import AsJson, DryRun, Open, path_option, unset, wrong
from unsoft.cli.completion import complete_claim, complete_model, complete_section
from unsoft.cli.mechanisms import Names, read_mechanisms
from unsoft.cli.terminal import cell, interrupted, note, print_json, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.compare.jobs import Answer, Job
    from unsoft.lab.compare.section import Request
    from unsoft.lab.compare.store import AnswerStore

Language = Literal["en", "zh"]
_MOST_ROWS = 24
"""Rows of a measurement that ``--claim`` shows; compare.json has all."""


def command(
    mechanism: Names = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, a minute or so.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every mechanism, long rows, deep stacks.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Inspect a model, and swap each mechanism in: smollm2, minilm, a folder, a name on the hub.",
            autocompletion=complete_model,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only one section, such as focus or hijack, or claims; may be repeated.",
            metavar="SECTION",
            autocompletion=complete_section,
        ),
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            help="One claim alone: its source, its rule, what is measured, the verdict. No page.",
            autocompletion=complete_claim,
        ),
    ] = None,
    study: Annotated[Path | None, unset("Trained models: study.db, or what unsoft study exported.")] = None,
    verdicts: Annotated[Path | None, unset("What unsoft neurons or steer found in a model of yours.")] = None,
    again: Annotated[
        bool,
        typer.Option("--force", "--again", help="Measure everything again, whatever earlier runs have kept."),
    ] = False,
    out: Annotated[
        Path, path_option("Folder for the page, its data (JSON, CSV) and figures (PNG, SVG).")
    ] = Path("report"),
    open: Open = False,
    lang: Annotated[Language, typer.Option(help="Language of the page's fixed texts.")] = "en",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Compare mechanisms with softmax on one page.

    Measurements are kept: rerun the same command to resume an interrupted run.

    \b
    Examples:
      unsoft compare cog softmax magnitude --quick --out report
      unsoft compare softmax "name=mine;weight=tanh(s)/n" logn+mine
    """
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    names = read_mechanisms(mechanism)
    if claim is None:
        arguments.check_drawing()
        arguments.check_folder(out)
    from unsoft.lab.bench.machine import cores
    from unsoft.lab.compare.candidate import candidates_of
    from unsoft.lab.compare.jobs import Results, run
    from unsoft.lab.compare.plan import plan
    from unsoft.lab.compare.section import FULL, QUICK, STANDARD, Request, default_names
    from unsoft.lab.compare.store import AnswerStore, default_folder

    level = QUICK if quick else FULL if full else STANDARD
    if all("{" in name for name in names):
        names = [*default_names(level, bool(names)), *names]
    records = [None if file is None else str(file) for file in (study, verdicts)]
    request = Request(candidates_of(names, []), level, model, *records)
    store = AnswerStore(default_folder())
    if claim is not None:
        _print_chain(claim, request, store, again)
        return
    only = only or []
    _check_sections(request, only)
    jobs = plan(request, only)
    if dry_run:
        terminal.print_plan(jobs, as_json=as_json)
        return
    if any(job.timed for job in jobs):
        terminal.warn_if_busy()
    with progress(len(jobs), refresh=False) as announce:  # a thread that draws would be copied with us

        def begins(job: Job, number: int, left: float) -> None:
            announce(number, job.name, f"{job.title}, about {left:.0f} s left")

        answers, finished = run(jobs, store, begins, again=again, processes=len(cores()))
    from unsoft.lab.compare.output import record, views_of, write

    line = shlex.join(["unsoft", *sys.argv[1:]])
    content = record(request, answers, only=only, finished=finished, command=line, out=str(out))
    views = views_of(Results(content), only)
    more: dict[str, Any] = {"only": only, "say": terminal.say, "processes": len(cores()), "lang": lang}
    counts = write(out, content, views, request.candidates, store, **more)
    if as_json:
        print_json(content)
    else:
        _print(out, content, views, counts)
    if any(answer.disturbed for answer in answers):
        note(
            "other programs used the machine while times were taken; they are shown, but the next run takes"
            " them again"
        )
    if not finished:
        raise interrupted("the page shows what was measured until then")
    for job, answer in zip(jobs, answers, strict=True):
        if job.required and answer.problem:
            note(f"{job.title} could not be measured: {answer.problem}")
            raise typer.Exit(1)
    arguments.open_page(out / "index.html", wanted=open)


def _check_sections(request: Request, only: list[str]) -> None:
    """Raise BadParameter for unknown sections, and for sections that need another option."""
    from unsoft.checks import did_you_mean
    from unsoft.lab.compare.plan import CLAIMS, section_names, sections

    known = [*section_names(), CLAIMS]
    for name in only:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise wrong(f"there is no section {name!r}{hint}", "'--only'")
    for section in sections(only) if only and CLAIMS not in only else ():
        if section.needs and not getattr(request, section.needs):
            raise wrong(f"the section {section.name!r} needs --{section.needs}", "'--only'")


def _print(out: Path, content: dict[str, Any], views: list[dict[str, Any]], counts: dict[str, int]) -> None:
    from unsoft.lab.compare.output import PAGE, RECORD
    from unsoft.lab.report.comparison import provenance

    _print_scoreboard(content)
    for part in (part for view in views for part in view["parts"] if part.in_terminal):
        typer.echo(f"{part.heading}\n{part.text}")
        if part.rows:
            first, *others = [column["title"] for column in part.columns]
            rows = [[cell(row[column["name"]]) for column in part.columns] for row in part.rows]
            show_table({first: "left"} | dict.fromkeys(others, "right"), rows, box=False)
    typer.echo(f"{provenance(content['answers'])} (--force measures everything again)")
    typer.echo(f"{out / PAGE}: the page\n{out / RECORD}: everything measured")
    typer.echo(
        f"{out / 'data'}: {counts['tables']} tables\n{out / 'figures'}: {counts['figures']} figures as PNG"
        " and SVG"
    )


def _print_scoreboard(content: dict[str, Any]) -> None:
    """Print the conclusions, and the columns that have an answer, marked against softmax."""
    from unsoft.lab.report.look import answered_columns

    for sentence in content["conclusions"]:
        typer.echo(f"- {sentence}")
    if shown := answered_columns(content):
        rows = []
        for row in content["scoreboard"]:
            cells = (_cell_text(row["cells"][column["name"]], column) for column in shown)
            rows.append([cell(row["mechanism"]), *cells])
        show_table({"mechanism": "left"} | {column["title"]: "right" for column in shown}, rows, box=False)
        for text in dict.fromkeys(column["recorded"] for column in shown if column["recorded"]):
            titles = ", ".join(column["title"] for column in shown if column["recorded"] == text)
            typer.echo(f"not measured by this run: {titles} ({text})")
        typer.echo("against softmax: ✓ better, ≈ no clear difference, ✗ worse")


def _cell_text(answer: Mapping[str, Any], column: Mapping[str, Any]) -> str:
    """Return a number of the scoreboard with its mark, and with what it is the mean of."""
    from unsoft.lab.report.comparison import MARKS
    from unsoft.lab.report.page import brief

    value = answer["value"]
    sign = "≥ " if answer["beyond"] else "+" if column["reference"] is not None and (value or 0) > 0 else ""
    basis = f" ({answer['note'].partition(':')[0]})" if "note" in answer else ""
    mark = MARKS[answer["versus"]["reading"]] if "versus" in answer else ""
    return f"{sign}{'' if value is None else brief(value)}{basis} {mark:1}"


def _print_chain(name: str, request: Request, store: AnswerStore, again: bool) -> None:
    """Measure what one claim needs; print its sentence, its rule, the measurements and the verdict."""
    from unsoft.lab.compare.plan import claim_named, follow
    from unsoft.lab.compare.section import KINDS

    try:
        claim = claim_named(name)
    except ValueError as problem:
        raise wrong(str(problem), "'--claim'") from None
    with progress(1) as announce:

        def begins(job: Job, number: int, left: float) -> None:
            announce(0, job.name, job.title)

        try:
            answers, (verdict, numbers) = follow(claim, request, store, begins, again=again)
        except KeyboardInterrupt:
            raise interrupted("what was measured until then is kept") from None
    typer.echo(f"{claim.source}: “{claim.text}”")
    typer.echo(f"kind: {claim.kind} ({KINDS[claim.kind]})")
    if claim.rule:
        typer.echo(f"rule: {claim.rule}")
    if claim.refuted:
        typer.echo(f"refuted if: {claim.refuted}")
    for answer in answers:
        _print_answer(answer)
    typer.echo(f"found: {numbers}\nverdict: {verdict}")


def _print_answer(answer: Answer) -> None:
    about = f"{answer.name} of {answer.mechanism}" if answer.mechanism else answer.name
    kept = f"kept from {answer.measured[:10]}" if answer.cached else "measured now"
    if answer.is_record:
        kept = "read from a record"
    problem = f"; {answer.problem}" if answer.problem else ""
    typer.echo(f"data: {about}, {len(answer.rows)} rows, {kept}{problem}")
    plain = [row for row in answer.rows if isinstance(row, dict)][:_MOST_ROWS]
    names = list(dict.fromkeys(key for row in plain for key in row))
    if plain:
        shown = [[cell(row.get(key)) for key in names] for row in plain]
        show_table(dict.fromkeys(names, "right"), shown, box=False)
    if len(answer.rows) > len(plain):
        typer.echo(f"... and {len(answer.rows) - len(plain)} more rows")
