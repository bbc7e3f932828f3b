"""Results of trained models: the records of studies, with one claim for each study of the package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from weakref import WeakKeyDictionary

from unsoft.lab.compare.jobs import Job, Missing, Results, Rows
from unsoft.lab.compare.section import TRAINED, Claim, Finding, Request, ScoreColumn, Section
from unsoft.lab.evidence import Estimate, t_interval
from unsoft.lab.records import PACKAGED, command_for
from unsoft.lab.report.comparison import Part
from unsoft.lab.study.plan import earlier_words
from unsoft.lab.study.read import default_studies, default_study
from unsoft.lab.study.record import DONE, Record, read_records
from unsoft.lab.study.rule import verdict
from unsoft.lab.study.summary import ResultSummary, summarise
from unsoft.modules.registry import resolve

STUDY = "study"
_NEEDED = (
    *("study", "group", "task", "mechanism", "base", "seed", "lr", "point", "sweep", "choose_on", "swept"),
    *("status", "score", "validation", "best_validation", "metric", "higher_is_better", "chance", "known"),
    *("shortcut", "harder", "validation_by", "learned", "attention", "machine", "finished", "key"),
    "curve",  # between equal rates, the one that learned earlier is chosen
)
"""Fields of a study's record that the page keeps."""
_READ: WeakKeyDictionary[Results, list[Record]] = WeakKeyDictionary()
_SUMMARISED: WeakKeyDictionary[Results, list[ResultSummary]] = WeakKeyDictionary()
"""Parsed records and summaries by results, since every column and claim reads them."""


def jobs(request: Request) -> list[Job]:
    path = Path(request.study) if request.study else PACKAGED
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    question, required = {"name": STUDY, "content": content}, request.study is not None
    prepare = partial(read_records, path) if required else None
    return [Job(STUDY, "", question, partial(rows_of, path), 0.1, prepare=prepare, required=required)]


def rows_of(path: Path) -> Rows:
    """Return the finished runs in a file, as the page keeps them."""
    if not path.is_file():
        return []
    return [
        {name: value for name, value in record.to_row().items() if name in _NEEDED}
        for record in read_records(path)
        if record.status == DONE
    ]


def records_of(results: Results) -> list[Record]:
    if results not in _READ:
        _READ[results] = [Record.from_row(row) for row in results.get(STUDY)]
    return _READ[results]


def summaries_of(results: Results) -> list[ResultSummary]:
    """Return the summaries of all studies."""
    if results not in _SUMMARISED:
        _SUMMARISED[results] = summarise(records_of(results))
    return _SUMMARISED[results]


def _share(summary: ResultSummary, score: float) -> float | None:
    """Return the score as a share of the way from chance to the best known."""
    best = 1.0 if summary.known is None else summary.known
    if summary.chance is None or best == summary.chance:
        return None
    return (score - summary.chance) / (best - summary.chance)


def trained_score(results: Results, label: str) -> Estimate | None:
    """Return the mean share over tasks, with its interval over seeds.

    Seeds are paired by their number within a study, since studies need not have the same ones.
    """
    rounds: dict[int, list[float]] = {}
    for summary in _trained_as(results, label):
        for number, run in enumerate(summary.runs):
            share = None if run.score is None else _share(summary, run.score)
            if share is not None:
                rounds.setdefault(number, []).append(share)
    most = max((len(shares) for shares in rounds.values()), default=0)
    whole = [sum(shares) / len(shares) for shares in rounds.values() if len(shares) == most]
    return t_interval(whole) if whole else None


def trained_on(results: Results, label: str) -> str:
    """Name the tasks that a score is the mean over, and the variants that were trained there."""
    tasks = []
    for one in _trained_as(results, label):
        if one.chance is not None and one.runs:
            tasks.append(one.group if one.mechanism == label else f"{one.group} as {one.mechanism}")
    return f"mean over {', '.join(tasks)}"


def _trained_as(results: Results, label: str) -> list[ResultSummary]:
    """Return one summary per task: of the mechanism, or else of its first variant that was trained.

    A variant is, for example, magnitude with its gate on the mass.
    """
    by_task: dict[tuple[str, str], ResultSummary] = {}
    for summary in summaries_of(results):
        task = (summary.study, summary.group)
        is_variant = summary.runs and _full_name(summary.runs[0].base) == _full_name(label)
        if summary.mechanism == label or (is_variant and task not in by_task):
            by_task[task] = summary
    return list(by_task.values())


@cache
def _full_name(name: str) -> str:
    """Return the name with the default base: "magnitude" is "magnitude+softmax"."""
    try:
        family = getattr(resolve(name), "family", None)
    except (ValueError, TypeError):  # the label of a formula, or a mechanism that no longer exists
        return name
    return name if family is None or not isinstance(family.base, str) else f"{name}+{family.base}"


def where_and_when(records: list[Record]) -> str:
    """Return the number of runs, their machines and their dates as text."""
    days = sorted(record.finished[:10] for record in records if record.finished)
    machines = sorted({record.machine for record in records if record.machine})
    when = "" if not days else f", {days[0]}" if days[0] == days[-1] else f", {days[0]} to {days[-1]}"
    return f"{len(records)} runs on {' and '.join(machines) or 'a machine that is not named'}{when}"


def parts(results: Results) -> Iterator[Part]:
    records = records_of(results)
    if not records:
        yield Part("", "No trained models are on record: give the store of a study with --study FILE.")
        return
    rows = []
    for one in summaries_of(results):
        if one.mean is not None:
            interval = "" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
            score = (one.group, one.mechanism, one.mean, interval)
            rows.append((*score, one.seeds, one.chance, one.known, one.sweep_words))
    file = results.record.get("study")
    packaged = f"A record that comes with unsoft, made with: {command_for(records)}"
    text = f"{f'From {file}' if file else packaged}. {where_and_when(records)}. `--study FILE` reads another."
    titles = ("task", "mechanism", "score", "interval", "seeds", "chance", "best known", "sweep")
    yield Part.table("Trained from scratch", text, titles, rows)


def _judge(name: str, results: Results) -> Finding:
    results.rows(STUDY)  # raises Missing without records
    own = [record for record in records_of(results) if record.study == name]
    if not own:
        raise Missing(
            f"no run of the study {name!r} is on record: unsoft study --default {name}, then --study FILE"
        )
    study = default_study(name)
    outcome, numbers = verdict(study.rules, own)
    return outcome, "; ".join(filter(None, (numbers, earlier_words(study, own), where_and_when(own))))


def _claim(name: str) -> Claim:
    study = default_study(name)
    rule = "; ".join(one.text for one in study.rules)
    return Claim(
        f"trained-{name}",
        study.source,
        study.claim,
        TRAINED,
        f"{rule[:1].upper()}{rule[1:]}: the mean of paired differences reaches the margin and their"
        f" interval lies above 0; undecided below three seeds.",
        "For one of them the whole interval lies below the margin.",
        partial(_judge, name),
    )


SECTION = Section(
    name="training",
    order=90,
    title="Trained",
    question="What becomes of it in training?",
    jobs=jobs,
    parts=parts,
    columns=[
        ScoreColumn(
            "trained",
            "trained score",
            "mean over tasks of a study: 0 is chance, 1 the best that is known to be possible; of a variant"
            " (magnitude on mass) where the mechanism itself was not trained",
            trained_score,
            0.9,
            0.5,
            unit="share",
            why="0 is chance, 1 the best known: yes from nine tenths of the way, partly from half of it.",
            noise=1e-3,
            note=trained_on,
        )
    ],
    claims=[_claim(name) for name in default_studies()],
)
