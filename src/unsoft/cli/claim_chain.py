"""One claim in the terminal: the sentence of its source, the rule, what was measured, the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from unsoft.cli.terminal import INTERRUPTED, cell, note, progress, show_table

if TYPE_CHECKING:
    from unsoft.lab.compare.jobs import Answer, Job
    from unsoft.lab.compare.section import Request
    from unsoft.lab.compare.store import Store

_MOST = 24
"""Rows of a measurement that are shown; compare.json has all."""


def print_chain(name: str, request: Request, store: Store, again: bool) -> None:
    """Runs what the claim needs, and prints the whole chain."""
    from unsoft.lab.compare.claim import KINDS
    from unsoft.lab.compare.single import claim_named, follow

    try:
        claim = claim_named(name)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="'--claim'") from None
    done = 0
    with progress(1) as announce:

        def told(job: Job, number: int, left: float) -> None:
            announce(done, job.name, job.title)

        try:
            chain = follow(claim, request, store, told, again=again)
        except KeyboardInterrupt:
            note("interrupted; what was measured until then is kept")
            raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{claim.source}: “{claim.text}”")
    typer.echo(f"kind: {claim.kind} ({KINDS[claim.kind]})")
    if claim.rule:
        typer.echo(f"rule: {claim.rule}")
    if claim.refuted:
        typer.echo(f"refuted if: {claim.refuted}")
    for answer in chain.answers:
        _print_answer(answer)
    verdict, found = chain.finding
    typer.echo(f"verdict: {verdict}\n{found}")


def _print_answer(answer: Answer) -> None:
    about = f"{answer.name} of {answer.mechanism}" if answer.mechanism else answer.name
    kept = f"kept from {answer.measured[:10]}" if answer.cached else "measured now"
    typer.echo(
        f"data: {about}, {len(answer.rows)} rows, {kept}{f'; {answer.problem}' if answer.problem else ''}"
    )
    plain = [row for row in answer.rows if isinstance(row, dict)][:_MOST]
    names = list(dict.fromkeys(key for row in plain for key in row))
    if plain:
        shown = [[cell(row.get(key)) for key in names] for row in plain]
        show_table(dict.fromkeys(names, "right"), shown, box=False)
    if len(answer.rows) > len(plain):
        typer.echo(f"... and {len(answer.rows) - len(plain)} more rows")
