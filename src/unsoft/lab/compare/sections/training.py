"""Results of trained models: the records of studies, with one claim for each study of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from unsoft.lab.compare.jobs import Job, Missing, Results, Rows, record_job
from unsoft.lab.compare.section import AFTER_TRAINING, PRICE, TRAINED, Claim, Finding, Request, Section
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


def recorded(results: Results) -> str:
    """Return which record the numbers come from, with its machine and date."""
    records = records_of(results)
    if not records:
        return ""
    file = results.record.get("study")
    return f"{f'record {file}' if file else 'record shipped with unsoft'}: {where_and_when(records)}"


SECTION = Section(
    order=90, group=PRICE, title="Trained", question="Does it help after training?", recorded=recorded
)


@SECTION.jobs
def jobs(request: Request) -> list[Job]:
    path = Path(request.study) if request.study else PACKAGED
    required = request.study is not None
    prepare = partial(read_records, path) if required else None
    return [record_job(STUDY, [path], partial(rows_of, path), prepare=prepare, required=required)]


def rows_of(path: Path) -> Rows:
    """Return the finished runs in a file, as the page keeps them."""
    if not path.is_file():
        return []
    return [
        {name: value for name, value in record.to_row().items() if name in _NEEDED}
        for record in read_records(path)
        if record.status == DONE
    ]


@lru_cache(maxsize=4)  # every column and claim reads them
def records_of(results: Results, name: str = STUDY) -> list[Record]:
    return [Record.from_row(row) for row in results.get(name)]


@lru_cache(maxsize=2)
def summaries_of(results: Results) -> list[ResultSummary]:
    """Return the summaries of all studies."""
    return summarise(records_of(results))


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
    same = [[one for one in own.values() if _full_name(one.runs[0].base) == name] for own in tasks]
    return [(one[0], own[CONTROL]) for one, own in zip(same, tasks, strict=True) if one]


def trained_on(results: Results, label: str) -> str:
    """Return the number of tasks, the variant if the mechanism itself was not trained, and their names."""
    pairs = pairs_of(results, label)
    if label == CONTROL:
        return "reference"
    variants = dict.fromkeys(one.mechanism for one, _ in pairs if one.mechanism != label)
    number = len({one.task for one, _ in pairs})
    count = f"{number} task{'s' * (number != 1)}"
    tasks = [one.group if one.group == one.study else f"{one.group} ({one.study})" for one, _ in pairs]
    return f"{', '.join([count, *variants])}: {', '.join(tasks)}"


@SECTION.column(
    "trained",
    "trained vs softmax",
    yes=0.05,
    partly=-0.05,
    noise=1e-3,
    note=trained_on,
    reference=0.0,
    margin=0.02,
    unit="share",
    group=AFTER_TRAINING,
    need="score higher after training",
)
def over_softmax(results: Results, label: str) -> Estimate | None:
    """Difference to softmax after training, paired by seed, on the tasks that both were trained on, as a
    share of the way from chance to the best known score.

    0 is softmax. Yes from 0.05 and no below −0.05, if the confidence interval does not contain 0; partly is
    no clear difference. Tasks count equally; the interval is over seeds.
    """
    # Differences of runs with the same seed are averaged over studies of a task, then over tasks: the first
    # seeds of all with each other, then the second, and so on. The interval is about other seeds, not tasks.
    pairs = pairs_of(results, label)
    if not pairs or label == CONTROL:
        return Estimate(0.0) if pairs else None
    by_task: dict[str, list[list[float]]] = {}
    for one, softmax in pairs:
        by_task.setdefault(one.task, []).append(share_gains(one, softmax))
    means = _averages([_averages(gains) for gains in by_task.values()])
    return t_interval(means) if means else None


def _averages(rows: list[list[float]]) -> list[float]:
    """Return the means of the first numbers, of the second, and so on, as long as every row has one."""
    return [fmean(numbers) for numbers in zip(*rows, strict=False)]


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


SCORES = ("mechanism", "score", "95 % CI", "over softmax", "its 95 % CI", "seeds")


def score_cells(one: ResultSummary) -> tuple[Any, ...]:
    """Return the cells of a table with the columns :data:`SCORES`."""
    gain = one.difference
    difference = (None, "reference") if gain is None else (gain.mean, between(gain.low, gain.high))
    return one.mechanism, one.mean, between(one.low, one.high), *difference, one.seeds


@SECTION.parts
def parts(results: Results) -> Iterator[Part]:
    records = records_of(results)
    if not records:
        yield Part("", "No trained models are on record: give the store of a study with --study FILE.")
        return
    known = [one for one in summaries_of(results) if one.mean is not None]
    rows = [(one.group, *score_cells(one), one.chance, one.known) for one in known]
    sweeps = "; ".join(dict.fromkeys(one.sweep_words for one in summaries_of(results)))
    text = (
        "Scores on the test, with 95 % confidence intervals (Student's t over seeds). Learning rates:"
        f" {sweeps}. Made with: {command_for(records)}. `--study FILE` reads another record."
    )
    yield Part.table("Trained from scratch", text, ("task", *SCORES, "chance", "best known"), rows)


def _judge(name: str, results: Results) -> Finding:
    results.rows(STUDY)  # raises Missing without records
    return judge(name, records_of(results))


def judge(name: str, records: list[Record]) -> Finding:
    """Return the verdict of a study on its claim, from records that may contain other studies."""
    own = [record for record in records if record.study == name]
    if not own:
        raise Missing(f"no run of the study {name!r} is on record: unsoft study {name}, then --study FILE")
    study = default_study(name)
    outcome, numbers = verdict(study.rules, own)
    limits = study.limits and f"limits: {study.limits.rstrip('.')}"
    words = (numbers, limits, earlier_words(study, own), where_and_when(own))
    return outcome, "; ".join(filter(None, words))


def claim(name: str, check: Callable[[str, Results], Finding]) -> Claim:
    """Return the claim of a study."""
    study = default_study(name)
    rule = "; ".join(one.text for one in study.rules)
    rule = f"{rule[:1].upper()}{rule[1:]}. {METHOD}"
    refuted = "For one of them the whole interval lies below the margin."
    return Claim(f"trained-{name}", study.source, study.claim, TRAINED, rule, refuted, partial(check, name))


SECTION.claims += [claim(name, _judge) for name in default_studies() if name not in language_studies()]
