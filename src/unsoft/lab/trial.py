"""From an idea to a verdict: check a mechanism, compare it with softmax and its closest relative, and say
the result in one paragraph.

Measurements, figures and the page are those of :mod:`unsoft.lab.compare`, training runs those of
:mod:`unsoft.lab.study`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch

from unsoft.errors import MechanismError
from unsoft.formula import Formula
from unsoft.formula.display import chart, curve
from unsoft.formula.stabilise import Normalise
from unsoft.lab.bench.machine import cores
from unsoft.lab.compare.candidate import Candidate, in_braces, is_name, read_formula
from unsoft.lab.compare.jobs import Job, Results, Rows, run
from unsoft.lab.compare.plan import plan
from unsoft.lab.compare.section import QUICK, Request
from unsoft.lab.compare.store import AnswerStore, default_folder
from unsoft.lab.report.page import listed
from unsoft.lab.study.driver import State, run_study
from unsoft.lab.study.read import make_study
from unsoft.lab.study.store import NAME, StudyStore
from unsoft.lab.study.summary import ResultSummary, Summaries, room_above, summarise
from unsoft.mechanisms import formulas
from unsoft.modules.registry import label_of, resolve
from unsoft.notebook import data_frame, html_table

BASELINE = "softmax"
LARGER = "softmax as large"
SECTIONS = (
    *("focus", "needle", "hijack", "sign", "opposition", "deletion", "learning", "irrelevance"),
    *("collapse", "cost"),
)
TASKS = ("opposition", "recall", "focus")
SEEDS = 5
MARGIN = 0.02
"""Smallest difference of scores that counts: less room than this above softmax is "at ceiling", and an
interval inside of it is "equal"."""
_OF_OTHERS = ("focus-relu2", "focus-identity", "focus-softmax")
_COST = {"training": "training", "decoding": "decoding", "memory": "memory"}
_NOISE = 0.03
"""Relative difference of times below which they are equal."""
_TITLES = {
    **{"task": "task", "mechanism": "mechanism", "score": "score", "interval": "95 % CI"},
    **{"gain": f"over {BASELINE}", "gain_interval": "95 % CI of the difference", "seeds": "seeds"},
    **{"rate": "learning rate", "parameters": "parameters", "time": "ms/step"},
}
"""Columns of the table of trained models."""
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Subject:
    """The mechanism to try, and how its weights are normalised."""

    candidate: Candidate
    note: str
    """One line about a normaliser that was chosen, or ""."""
    text: str
    """The argument, as given."""


@dataclass(frozen=True)
class Trial:
    """Result of :func:`try_formula`. ``verdict`` is the paragraph; the rest is what it rests on."""

    subject: Subject
    closest: str
    record: Mapping[str, Any] = field(repr=False)
    """The record of the comparison, see :func:`unsoft.lab.compare.output.record`."""
    trained: Summaries = field(default_factory=Summaries)
    failures: str = ""
    """Number of training runs that failed, and why."""
    finished: bool = True
    runs: tuple[int, int] = (0, 0)
    """Training runs that are done, and all of them."""

    @property
    def name(self) -> str:
        return self.subject.candidate.label

    @property
    def results(self) -> Results:
        return Results(self.record)

    @property
    def checks(self) -> str:
        """One line if all checks passed, else one more for each that failed."""
        rows = self.results.get("checks", self.name)
        if not rows:
            return f"checks: not run ({self.results.problem('checks', self.name) or 'interrupted'})"
        failed = rows[0]["failed"]
        head = f"checks: {rows[0]['comparisons']} comparisons, "
        return "\n".join([head + (f"{len(failed)} failed" if failed else "all pass"), *failed])

    @property
    def verdict(self) -> str:
        """One paragraph: better, equal and worse than softmax, the cost, and what stays undecided."""
        trained, measured = _by_reading(_trained(self)), _by_reading(_measured(self))
        parts = []
        for found, where in ((trained, "trained, "), (measured, "at initialisation, " if trained else "")):
            said = [
                f"{word} {listed(found[word])}"
                for word in ("better at", "equal at", "worse at")
                if word in found
            ]
            parts += [where + "; ".join(said)] if said else []
        busy = any(answer["disturbed"] for answer in self.record["answers"])
        costs = "cost not compared, the machine was busy" if busy else ", ".join(_costs(self))
        parts += [costs] if costs else []
        undecided = {**measured, **trained}.get("undecided")
        parts += [f"undecided: {listed(undecided)}"] if undecided else []
        parts.append(f"closest relative: {self.closest}")
        text = f"{self.name} vs {BASELINE}: {'; '.join(parts)}."
        if " failed" in self.checks:
            text = f"Numerical checks failed, see the list of checks. {text}"
        if not self.trained:
            text += f" Not trained yet: unsoft try {shlex.quote(self.subject.text)} --train."
        done, total = self.runs
        progress = f": {done} of {total} training runs are done" if total else ""
        missing = "" if self.finished else f"Interrupted{progress}."
        return " ".join(filter(None, (text, self.failures, missing)))

    def rows(self) -> list[dict[str, Any]]:
        """Return the scoreboard and the scores of trained models, one row per mechanism."""
        rows = self.results.scores()
        for row in rows:
            own = [one for one in self.trained if one.mechanism == row["mechanism"]]
            row |= {f"trained {one.task}": one.mean for one in own}
        return rows

    def to_pandas(self) -> Any:
        """Return one row per mechanism as a DataFrame."""
        return data_frame(self.rows())

    def plot(self) -> Any:
        """Return an Altair chart of the weight against the logit, beside softmax and the closest relative."""
        every = [self.subject.candidate, *_others(self.closest)]
        return chart({one.label: curve(one.row()) for one in every})

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.verdict)}</p>{html_table(self.rows())}"

    def __str__(self) -> str:
        return self.verdict

    def write(self, out: Path, say: Callable[[str], None] = lambda _: None) -> Path:
        """Write the page of the comparison with the paragraph on top; return its path."""
        from unsoft.lab.compare.output import PAGE, views_of, write

        views = [self._view(), *views_of(self.results, SECTIONS)]
        for view in views:  # figures of other formulas, which a paper drew
            view["figures"] = [figure for figure in view["figures"] if figure.name not in _OF_OTHERS]
        every = [self.subject.candidate, *_others(self.closest)]
        store = AnswerStore(default_folder())
        write(out, dict(self.record), views, every, store, only=SECTIONS, say=say, processes=len(cores()))
        return out / PAGE

    def _view(self) -> dict[str, Any]:
        """Return the paragraph, checks, properties and trained models as the first section of the page."""
        from unsoft.lab.report.comparison import Part

        formula = self.subject.candidate.formula
        head, *failed = self.checks.splitlines()
        parts = [Part("", head), *(Part("", line) for line in failed)]
        if formula is not None:
            texts = formula.properties.texts()
            written = f"Stabilised form of the weight: {formula.weight}"
            parts.append(Part.table("Properties", written, list(texts), [list(texts.values())]))
        if rows := [row for row in self.trained.rows() if row["seeds"]]:
            text = f"Learning rates chosen by validation; differences to {BASELINE} of equal size, by seed."
            cells = [[row[name] for name in _TITLES] for row in rows]
            parts.append(Part.table("Trained", text, list(_TITLES.values()), cells))
        view = {
            "name": "verdict",
            "title": "Checks and training",
            "question": "Checks and training" if self.trained else "Checks",
            "about": self.subject.note,
            "recorded": "",
        }
        return view | {"group": "Results", "folded": False, "controls": (), "figures": [], "parts": parts}


def read_subject(text: str | Formula, normalise: Normalise | None = None, name: str | None = None) -> Subject:
    """Return the mechanism of a name, a formula text or a Formula.

    Without ``normalise``, a weight with exponentials is divided by the sum of its sizes, any other by the
    number of keys, unless it mentions n.

    >>> read_subject("tanh(s)*exp(abs(s))").note
    'normalise=abs (chosen: exponentials of both signs): weights are divided by their absolute sum'
    >>> read_subject("cog").note
    ''
    """
    if isinstance(text, str) and is_name(text):
        if normalise is not None or name is not None:
            raise ValueError(f"try: {text!r} is a name; normalise and name are for formulas")
        if text.strip() == BASELINE:
            raise ValueError("try: softmax is the baseline; try another mechanism, such as 'cog'")
        resolve(text)
        return Subject(Candidate(label_of(text), text), "", text)
    formula, note = (text, "") if isinstance(text, Formula) else read_formula(text, normalise, name)
    shown = str(text) if isinstance(text, str) else str(formula.weight)
    label = formula.name or (shown if len(shown) <= 40 else "this formula")
    return Subject(Candidate(label, in_braces(formula, label)), note, shown)


def closest_to(candidate: Candidate) -> str:
    """Return the built-in formula whose weights are most similar, by the cosine over rows of random logits.

    >>> closest_to(Candidate("mine", Formula("tanh(2*s)/n")))
    'tanh'
    """
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(64, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        own = candidate.row()(logits).flatten()
        similar = {}
        for name, formula in formulas().items():
            if formula.symbols.all or formula == candidate.formula or name == candidate.mechanism:
                continue
            other = formula.row(logits).flatten()
            similar[name] = float(own @ other / (own.norm() * other.norm()).clamp(min=1e-300))
    return max(similar, key=lambda name: similar[name])


def _others(closest: str) -> list[Candidate]:
    return [Candidate(name, name) for name in dict.fromkeys((BASELINE, closest))]


def check(candidate: Candidate) -> Rows:
    """Run the quick test suite; return the number of comparisons and the failures."""
    from unsoft.testing import check_mechanism

    mechanism = candidate.formula or candidate.mechanism
    try:
        return [{"comparisons": check_mechanism(mechanism, quick=True).cases, "failed": []}]
    except MechanismError as failure:
        text = str(failure)
        count = re.search(r": (\d+) comparisons", text)
        return [{"comparisons": int(count[1]) if count else 0, "failed": _failures(text) or [text]}]


def _failures(text: str) -> list[str]:
    """Return one line for each failed property, with the engines on which it failed and one of the cases.

    >>> _failures("  sizes: same on auto: FAILED: x: error 2\\n  sizes: same on tiled: FAILED: x: error 3")
    ['sizes: same (auto, tiled): x: error 2']
    """
    lines = re.findall(r"^  (.+?) on (\S+): FAILED: (.*)$", text, re.MULTILINE)
    engines: dict[str, list[str]] = {}
    cases: dict[str, str] = {}
    for name, engine, case in lines:
        engines.setdefault(name, []).append(engine)
        cases.setdefault(name, case)
    return [f"{name} ({', '.join(own)}): {cases[name]}" for name, own in engines.items()]


def _request(subject: Subject, closest: str) -> Request:
    return Request([subject.candidate, *_others(closest)], QUICK)


def jobs_of(subject: Subject, closest: str = "") -> list[Job]:
    """Return the measurements of a trial, without training."""
    request = _request(subject, closest or closest_to(subject.candidate))
    question = {"name": "checks", "mechanism": subject.candidate.identity}
    checks = Job("checks", subject.candidate.label, question, partial(check, subject.candidate), 20.0)
    return [checks, *plan(request, SECTIONS)]


def try_formula(
    mechanism: str | Formula,
    *,
    normalise: Normalise | None = None,
    name: str | None = None,
    train: bool = False,
    out: str | Path | None = None,
    tasks: Sequence[str] = TASKS,
    seeds: int = SEEDS,
    settings: Mapping[str, Any] | None = None,
    plugin: str = "",
    again: bool = False,
    tell: Tell = lambda done, total, text: None,
) -> Trial:
    """Check a mechanism and compare it with softmax and its closest relative.

    mechanism
        A formula as written in a paper, "tanh(s)*exp(abs(s))", a :class:`unsoft.Formula`, or a name.
    normalise
        What weights are divided by: "sum", "abs", "square" or "count". A sensible one is chosen by default.
    train
        Also train small models on ``tasks`` with ``seeds`` seeds and three learning rates each, paired with
        softmax at equal parameters. ``settings`` change the runs, such as {"steps": 100}. Takes up to 15
        minutes on two cores; ``out`` keeps the runs, so that the same call resumes.
    out
        The folder for the page; without it nothing is written. Training without it uses a temporary folder.
    again
        Measure again, whatever earlier calls have kept.
    tell
        Called with the number of finished steps, all steps and what runs now.
    """
    subject = read_subject(mechanism, normalise, name)
    closest = closest_to(subject.candidate)
    jobs = jobs_of(subject, closest)

    def begins(job: Job, number: int, left: float) -> None:
        tell(number, len(jobs), f"{job.title}, about {left:.0f} s left")

    store = AnswerStore(default_folder())
    answers, finished = run(jobs, store, begins, again=again, processes=len(cores()))
    from unsoft.lab.compare.output import record

    command = shlex.join(["unsoft", "try", subject.text])
    request = _request(subject, closest)
    content = record(request, answers, only=SECTIONS, finished=finished, command=command, out=str(out or ""))
    trained, failures, runs = Summaries(), "", (0, 0)
    if train and finished:
        trained, state = _train(subject, closest, out, tasks, seeds, settings or {}, plugin, tell)
        finished, runs = not state.waiting, (state.done, state.total)
        failures = f"{state.failed} training runs failed: {state.errors[0]}" if state.errors else ""
    trial = Trial(subject, closest, content, trained, failures, finished, runs)
    content["conclusions"] = [trial.verdict]
    if out is not None:
        trial.write(Path(out))
    return trial


def _train(
    subject: Subject,
    closest: str,
    out: str | Path | None,
    tasks: Sequence[str],
    seeds: int,
    settings: Mapping[str, Any],
    plugin: str,
    tell: Tell,
) -> tuple[Summaries, State]:
    """Train the mechanism, its closest relative, and softmax, also as large as the mechanism if it has more
    parameters."""
    from tempfile import TemporaryDirectory

    label, name = subject.candidate.label, str(subject.candidate.mechanism)
    variants = [{"mechanism": one, "label": one} for one in dict.fromkeys((BASELINE, closest))]
    variants.insert(1, {"mechanism": name, "label": label})
    variants.append({"mechanism": BASELINE, "label": LARGER, "as_large_as": label})
    groups = [{"task": task, "variant": variants, "settings": dict(settings)} for task in tasks]
    study = make_study({"name": "try", "seeds": seeds, "group": groups})

    def told(state: State) -> None:
        left = "" if state.seconds_left is None else f", about {state.seconds_left / 60:.0f} min left"
        tell(state.done, state.total, f"training on {', '.join(tasks)}{left}")

    with TemporaryDirectory() as temporary:
        folder = Path(temporary if out is None else out) / "study"
        state = run_study(study, folder, workers=len(cores()), plugin=plugin, tell=told)
        with StudyStore(folder / NAME) as store:
            records = store.records("try")
    sized = {one.group for one in records if one.mechanism == LARGER}
    parts = [
        summarise([r for r in records if r.group == task], LARGER if task in sized else BASELINE)
        for task in tasks
    ]
    return Summaries(one for part in parts for one in part), state


def _trained(trial: Trial) -> Iterator[tuple[str, str]]:
    """Yield how each task came out, and the task with the difference to softmax and its interval."""
    for one in trial.trained:
        if one.mechanism != trial.name or one.difference is None:
            continue
        gain = one.difference
        base = _baseline(trial.trained, one.task)
        room = None if base is None else room_above(base)
        text = f"{one.task} ({_signed(gain.mean)}"
        if gain.low is None or gain.high is None:
            yield "undecided", f"{one.task} (too few seeds)"
            continue
        text += f", 95 % CI {_signed(gain.low)} to {_signed(gain.high)})"
        if gain.low > 0 and gain.mean >= MARGIN:
            yield "better at", text
        elif gain.high < 0 and gain.mean <= -MARGIN:
            yield "worse at", text
        elif room is not None and room < MARGIN and gain.low > -MARGIN:
            yield "undecided", f"{one.task} (at ceiling)"
        elif gain.low > -MARGIN and gain.high < MARGIN:
            yield "equal at", one.task
        else:
            yield "undecided", text


def _signed(x: float) -> str:
    return f"{x:+.2f}".replace("-", "\u2212")


def _baseline(summaries: Summaries, task: str) -> ResultSummary | None:
    own = {one.mechanism: one for one in summaries if one.task == task}
    return own.get(LARGER, own.get(BASELINE))


def _measured(trial: Trial) -> Iterator[tuple[str, str]]:
    """Yield how each column of the scoreboard came out, costs aside, with its difference to softmax."""
    words = {"better": "better at", "worse": "worse at", "same": "equal at"}
    for column, own, _ in _cells(trial):
        if column["name"] in _COST or "versus" not in own:
            continue
        reading = own["versus"]["reading"]
        effect = f" ({own['versus']['text']})" if reading != "same" else ""
        title, comma, when = column["title"].rstrip("?").partition(", ")
        yield words[reading], f"{title} ({when})" + effect if comma else title + effect


def _cells(trial: Trial) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the columns in which both the mechanism and softmax have a number, with the two cells."""
    board = {row["mechanism"]: row["cells"] for row in trial.record["scoreboard"]}
    for column in trial.record["columns"]:
        own, base = (board[label][column["name"]] for label in (trial.name, BASELINE))
        if own["value"] is not None and base["value"] is not None:
            yield column, own, base


def _costs(trial: Trial) -> Iterator[str]:
    """Yield time and memory of training and decoding as a percentage of softmax's."""
    for column, own, base in _cells(trial):
        what = _COST.get(column["name"])
        if what is None or not base["value"] or not own["value"] or not math.isfinite(own["value"]):
            continue
        ratio = own["value"] / base["value"]
        times = max(ratio, 1 / ratio)
        size = f"{times:.1f} times" if times >= 2 else f"{100 * abs(ratio - 1):.0f} %"
        if times - 1 < _NOISE:
            yield f"same {what}{' time' if what != 'memory' else ''}"
        elif what == "memory":
            yield f"{size} {'more' if ratio > 1 else 'less'} memory"
        else:
            yield f"{size} {'slower' if ratio > 1 else 'faster'} in {what}"


def _by_reading(found: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for word, text in found:
        grouped.setdefault(word, []).append(text)
    return grouped
