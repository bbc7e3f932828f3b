"""Output of ``unsoft study``: the table of a study with its verdict, the default studies, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unsoft.cli import terminal
from unsoft.cli.terminal import cell, has_bar, print_json, show_table

if TYPE_CHECKING:
    from unsoft.lab.study import Record, ResultSummary, Study
    from unsoft.lab.study.driver import State


def _read(out: Path, name: str) -> tuple[Study, list[Record], list[ResultSummary]]:
    from unsoft.lab.study import Study, summarise
    from unsoft.lab.study.store import NAME, StudyStore

    with StudyStore(out / NAME) as store:
        records, definition = store.records(name), store.definition(name)
    assert definition is not None
    return Study.from_dict(definition), records, summarise(records)


def study_record(out: Path, name: str) -> dict[str, Any]:
    """Return a study as plain data: the results by task and mechanism, and the verdict if it has rules."""
    from unsoft.lab.study import verdict
    from unsoft.lab.study.rule import verdict_sentence

    study, records, summaries = _read(out, name)
    content = {"study": name, "claim": study.claim, "source": study.source, "limits": study.limits}
    if rules := study.judged_by:
        content |= dict(zip(("verdict", "why"), verdict(rules, records), strict=True))
        content["sentence"] = verdict_sentence(rules, records, study.claim)
    rows = [asdict(replace(one, runs=())) for one in summaries]
    return content | {"results": [{key: row[key] for key in row if key != "runs"} for row in rows]}


def print_study(out: Path, name: str) -> None:
    """Print the table of a study, its verdict, and how rates were chosen."""
    from unsoft.lab.study import verdict
    from unsoft.lab.study.rule import edge_words, verdict_sentence

    study, records, summaries = _read(out, name)
    if not any(one.seeds for one in summaries):
        return
    titles = {"task": "whole", "mechanism": "whole"} | dict.fromkeys(
        ("score", "95 % CI", "over softmax", "its 95 % CI", "seeds", "rate", "parameters", "ms/step"), "right"
    )
    rows = [_row(one) for one in summaries if one.seeds]
    show_table(titles, rows, title=f"{name} ({summaries[0].sweep_words})")
    for one in {one.group: one for one in summaries if one.seeds}.values():
        shortcut = "" if one.shortcut is None else f", shortcut {cell(one.shortcut)}"
        better = "higher" if one.higher_is_better else "lower"
        typer.echo(
            f"{one.group}: {one.metric}, {better} is better; chance {cell(one.chance)}{shortcut},"
            f" known solution {cell(one.known)}"
        )
    if study.rules:
        _, why = verdict(study.rules, records)
        typer.echo(f"{study.source}: “{study.claim}”" if study.source else study.claim)
        for rule in study.rules:
            typer.echo(f"rule: {rule.text}")
        typer.echo(f"found: {why}")
        if study.limits:
            typer.echo(f"limits: {study.limits}")
    else:  # with a rule they are part of the reasons
        for warning in edge_words(summaries):
            typer.echo(warning)
    if sentence := verdict_sentence(study.judged_by, records, study.claim):
        typer.echo(f"verdict: {sentence}")


def _row(one: ResultSummary) -> list[str]:
    row = one.row()
    del row["failed"]  # ``status`` lists failed runs
    row["gain"] = None if row["gain"] is None else f"{row['gain']:+.3f}"
    return [one.group, *("" if value is None else cell(value) for value in row.values())]


def print_defaults(*, as_json: bool) -> None:
    """Print the studies that come with unsoft."""
    from unsoft.lab.study.read import default_studies, read_study

    titles = {"name": "whole", "source": "left", "claim": "left", "runs": "right"}
    rows = []
    for name, path in default_studies().items():
        study = read_study(path)
        rows.append([name, study.source, study.claim, len(study)])
    if as_json:
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
    else:
        show_table(titles, rows)


def print_costs(studies: Sequence[Study], workers: int | None, *, as_json: bool) -> None:
    """Print runs, tokens and hours of studies, from a probe of ten seconds each."""
    from unsoft.lab.bench.machine import cores
    from unsoft.lab.study.budget import costs

    titles = {"study": "whole", "task": "whole", "mechanism": "whole"} | dict.fromkeys(
        ("runs", "tokens", "hours", "of them evaluation", "time"), "right"
    )
    rows: list[list[Any]] = []
    for study in studies:
        for one in costs(study.with_sizes()):
            how = "measured" if one.measured else "by FLOPs"
            hours = one.seconds / 3600, one.evaluation_seconds / 3600
            rows.append([study.name, one.group, one.mechanism, one.runs, one.tokens, *hours, how])
    if as_json:
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
        return
    shown = [[*row[:4], f"{row[4] / 1e6:.2f}M", f"{row[5]:.2f}", f"{row[6]:.2f}", row[7]] for row in rows]
    show_table(titles, shown)
    count = workers or len(cores())
    runs, tokens, hours = (sum(row[k] for row in rows) for k in (3, 4, 5))
    typer.echo(
        f"{runs} runs, {tokens / 1e6:.1f}M tokens, {hours:.1f} hours of one worker:"
        f" about {hours / count:.1f} hours with {count}, evaluations included. A sweep whose best rate is at"
        " its end is widened"
    )


@contextmanager
def progress(name: str) -> Iterator[Callable[[State], None]]:
    """Yield a function that shows the state of a running study: a bar in a terminal, else a line for each
    run.
    """
    with terminal.progress(1) as announce:

        def tell(state: State) -> None:
            known = state.seconds_left is not None and state.waiting
            left = f"{_time(state.seconds_left or 0)} left" if known else ""
            ended = state.done + state.failed
            if has_bar():
                running = "; ".join(state.running[:3]) + (" ..." if len(state.running) > 3 else "")
                announce(ended, name, f"{name}  {left}  {running}", state.total)
            if state.ended is not None and (state.ended.error or not has_bar()):
                line = f"{name}: {ended} of {state.total}, {_describe(state)}"
                typer.echo(f"{line}{', ' * bool(left)}{left}", err=True)

        yield tell


def _describe(state: State) -> str:
    run = state.ended
    assert run is not None
    if run.error:
        return f"{run.label} failed: {run.error}"
    return f"{run.label}: " + (run.status if run.score is None else f"{run.metric} {run.score:.4f}")


def _time(seconds: float) -> str:
    """
    >>> _time(59), _time(7300)
    ('1 min', '2 h 2 min')
    """
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
