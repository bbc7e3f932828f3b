"""Results of trained models: the records of studies, with one claim for each study of the package."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean

from unsoft.lab.compare.jobs import Job, Missing, Results, Rows
from unsoft.lab.compare.section import (
    AFTER_TRAINING,
    PRICE,
    TRAINED,
    Claim,
    Finding,
    Request,
    ScoreColumn,
    Section,
)
from unsoft.lab.evidence import Estimate, between, t_interval
from unsoft.lab.records import PACKAGED, command_for
from unsoft.lab.report.comparison import Part
from unsoft.lab.study.plan import earlier_words
from unsoft.lab.study.read import default_studies, default_study, language_studies
from unsoft.lab.study.record import DONE, Record, read_records
from unsoft.lab.study.rule import METHOD, verdict
from unsoft.lab.study.summary import CONTROL, ResultSummary, summarise
from unsoft.modules.registry import resolve

STUDY = "study"
_NEEDED = (
    *("study", "group", "task", "mechanism", "base", "seed", "lr", "point", "sweep", "choose_on", "swept"),
    *("status", "score", "validation", "best_validation", "metric", "higher_is_better", "chance", "known"),
    *("shortcut", "harder", "validation_by", "learned", "attention", "machine", "finished", "key"),
    "curve",  # between equal rates, the one that learned earlier is chosen
)
"""Fields of a study's record that the page keeps."""


def jobs(request: Request) -> list[Job]:
    path = Path(request.study) if request.study else PACKAGED
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    question, required = {"name": STUDY, "content": content}, request.study is not None
    prepare = partial(read_records, path) if required else None
    work = partial(rows_of, path)
    return [Job(STUDY, "", question, work, 0.1, prepare=prepare, required=required, is_record=True)]


def rows_of(path: Path) -> Rows:
    """Return the finished runs in a file, as the page keeps them."""
    if not path.is_file():
        return []
    return [
        {name: value for name, value in record.to_row().items() if name in _NEEDED}
        for record in read_records(path)
        if record.status == DONE
    ]


@lru_cache(maxsize=2)  # every column and claim reads them
def records_of(results: Results) -> list[Record]:
    return [Record.from_row(row) for row in results.get(STUDY)]


@lru_cache(maxsize=2)
def summaries_of(results: Results) -> list[ResultSummary]:
    """Return the summaries of all studies."""
    return summarise(records_of(results))


def over_softmax(results: Results, label: str) -> Estimate | None:
    """Return the paired difference to softmax, as a share of the way from chance to the best known score.

    Tasks count equally: differences of runs with the same seed are averaged over tasks, the first seeds of
    all tasks with each other, then the second, and so on. The interval is Student's t over these averages. It
    is about other seeds, not about other tasks. Softmax itself is the reference, 0.
    """
    pairs = pairs_of(results, label)
    if not pairs or label == CONTROL:
        return Estimate(0.0) if pairs else None
    by_task = [share_gains(one, softmax) for one, softmax in pairs]
    rounds = list(zip(*by_task, strict=False))  # seeds that every task has
    return t_interval([fmean(gains) for gains in rounds]) if rounds else None


def share_gains(one: ResultSummary, softmax: ResultSummary) -> list[float]:
    """Return the difference on each shared seed, as a share of the way from chance to the best known."""
    best = 1.0 if one.known is None else one.known
    assert one.chance is not None
    theirs = {run.seed: run.score for run in softmax.runs}
    scores = [(run.score, theirs.get(run.seed)) for run in one.runs]
    return [(a - b) / (best - one.chance) for a, b in scores if a is not None and b is not None]


def pairs_of(results: Results, label: str) -> list[tuple[ResultSummary, ResultSummary]]:
    """Return a mechanism and softmax on each task that both were trained on.

    If the mechanism was trained as a variant only, such as magnitude with its gate on the mass, it is the
    first variant of each task.
    """
    by_task: dict[tuple[str, str], dict[str, ResultSummary]] = {}
    for one in summaries_of(results):
        if one.runs and one.chance not in (None, 1.0 if one.known is None else one.known):
            by_task.setdefault((one.study, one.group), {})[one.mechanism] = one
    tasks = [own for own in by_task.values() if CONTROL in own]
    exact = [(own[label], own[CONTROL]) for own in tasks if label in own]
    if exact:
        return exact
    name = _full_name(label)
    return [
        (next(one for one in own.values() if _full_name(one.runs[0].base) == name), own[CONTROL])
        for own in tasks
        if any(_full_name(one.runs[0].base) == name for one in own.values())
    ]


def trained_on(results: Results, label: str) -> str:
    """Return the number of tasks, the variant if the mechanism itself was not trained, and their names."""
    pairs = pairs_of(results, label)
    if label == CONTROL:
        return "reference"
    variants = dict.fromkeys(one.mechanism for one, _ in pairs if one.mechanism != label)
    count = f"{len(pairs)} task{'s' * (len(pairs) != 1)}"
    tasks = [one.group if one.group == one.study else f"{one.group} ({one.study})" for one, _ in pairs]
    return f"{', '.join([count, *variants])}: {', '.join(tasks)}"


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


def recorded(results: Results) -> str:
    """Return which record the numbers come from, with its machine and date."""
    records = records_of(results)
    if not records:
        return ""
    file = results.record.get("study")
    return f"{f'record {file}' if file else 'record shipped with unsoft'}: {where_and_when(records)}"


def parts(results: Results) -> Iterator[Part]:
    records = records_of(results)
    if not records:
        yield Part("", "No trained models are on record: give the store of a study with --study FILE.")
        return
    rows = []
    for one in summaries_of(results):
        if one.mean is not None:
            gain = one.difference
            difference = (None, "reference") if gain is None else (gain.mean, between(gain.low, gain.high))
            score = (one.group, one.mechanism, one.mean, between(one.low, one.high))
            rows.append((*score, *difference, one.seeds, one.chance, one.known))
    sweeps = "; ".join(dict.fromkeys(one.sweep_words for one in summaries_of(results)))
    text = (
        "Scores on the test, with 95 % confidence intervals (Student's t over seeds). Learning rates:"
        f" {sweeps}. Made with: {command_for(records)}. `--study FILE` reads another record."
    )
    titles = ("task", "mechanism", "score", "95 % CI", "over softmax", "its 95 % CI", "seeds")
    yield Part.table("Trained from scratch", text, (*titles, "chance", "best known"), rows)


def _judge(name: str, results: Results) -> Finding:
    results.rows(STUDY)  # raises Missing without records
    return judge(name, records_of(results))


def judge(name: str, records: list[Record]) -> Finding:
    """Return the verdict of a study on its claim, from records that may contain other studies."""
    own = [record for record in records if record.study == name]
    if not own:
        raise Missing(
            f"no run of the study {name!r} is on record: unsoft study --default {name}, then --study FILE"
        )
    study = default_study(name)
    outcome, numbers = verdict(study.rules, own)
    limits = study.limits and f"limits: {study.limits.rstrip('.')}"
    words = (numbers, limits, earlier_words(study, own), where_and_when(own))
    return outcome, "; ".join(filter(None, words))


def claim(name: str, check: Callable[[str, Results], Finding]) -> Claim:
    """Return the claim of a study."""
    study = default_study(name)
    rule = "; ".join(one.text for one in study.rules)
    return Claim(
        f"trained-{name}",
        study.source,
        study.claim,
        TRAINED,
        f"{rule[:1].upper()}{rule[1:]}. {METHOD}",
        "For one of them the whole interval lies below the margin.",
        partial(check, name),
    )


SECTION = Section(
    name="training",
    order=90,
    group=PRICE,
    title="Trained",
    question="Does it help after training?",
    jobs=jobs,
    parts=parts,
    recorded=recorded,
    columns=[
        ScoreColumn(
            "trained",
            "trained vs softmax",
            "difference to softmax after training, paired by seed, on the tasks that both were trained on, as"
            " a share of the way from chance to the best known score",
            over_softmax,
            0.05,
            -0.05,
            unit="share",
            why=(
                "0 is softmax. Yes from 0.05 and no below −0.05, if the confidence interval does not contain"
                " 0; partly is no clear difference. Tasks count equally; the interval is over seeds."
            ),
            noise=1e-3,
            note=trained_on,
            reference=0.0,
            margin=0.02,
            group=AFTER_TRAINING,
            need="score higher after training",
        )
    ],
    claims=[claim(name, _judge) for name in default_studies() if name not in language_studies()],
)
