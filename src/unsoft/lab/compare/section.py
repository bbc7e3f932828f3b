"""Parts of a section: the request it answers, its measurements, columns of the scoreboard, and claims."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import unsoft.lab.evidence as evidence
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Missing, Results, Rows, matching
from unsoft.lab.evidence import BY_CONSTRUCTION, NOT_RUN, SUPPORTED, Estimate, between, t_interval
from unsoft.modules.registry import names as all_names

if TYPE_CHECKING:
    from unsoft.lab.report.comparison import Part
    from unsoft.lab.report.figure import ChartControl, Figure

DEFINITION, THEOREM, EXPERIMENT, TRAINED = "definition", "theorem", "experiment", "trained"
KINDS = {
    DEFINITION: "true by construction: shown, never counted",
    THEOREM: "mathematics, checked to the digits that its rule names",
    EXPERIMENT: "a measurement that could have come out otherwise",
    TRAINED: "decided by trained models, from the records of a study",
}
BASELINE = "softmax"
"""The mechanism that every other one is compared with."""
CAPABILITY, DEPTH, COST, AFTER_TRAINING = "Capability", "Depth", "Cost", "Trained"
"""Groups of columns of the scoreboard, in that order."""
FOCUS, SIGNED, DEEP, PRICE = "Focus and duplicates", "Signed weights", "Depth", "Cost and training"
"""Groups of sections in the page's list."""
BETTER, SAME, WORSE = "better", "same", "worse"
COUNTED = (THEOREM, EXPERIMENT, TRAINED)
"""Kinds of claims that could have failed."""
SURVEY, SU, ROSIC = "survey of negative attention 2025", "Su 2023", "Rosić 2026"
"""Sources of claims."""
Finding = tuple[str, str]
"""A verdict, and the sentence with the numbers it rests on."""
Check = Callable[[Results], Finding]
Value = Estimate | float | list[Any] | None
"""A number of the scoreboard: with its confidence interval, alone, as draws, or missing."""
_BESIDE_OWN = ("softmax", "cog", "relu2", "linear-relu", "magnitude")
"""Compared with formulas of one's own unless other mechanisms are named."""
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class ComparisonLevel:
    """Sizes of every measurement."""

    name: str
    mechanisms: tuple[str, ...]
    """Compared unless the user names some; empty for all there are."""
    keys: int
    """Length of the rows whose focus is measured."""
    rows: int
    depth: int
    """Layers of the random networks."""
    seeds: int
    """Random networks that collapse is measured in."""
    lengths: tuple[int, ...]
    """Sequence lengths at which cost is measured."""
    geometries: int
    draws: int
    """Repetitions of everything random, from which confidence intervals come."""
    rounds: int = 5
    seconds: float = 0.0
    """Minimum time for which the mechanisms are timed in turn."""


Size = Callable[[ComparisonLevel], Any] | float
"""A number, or how it follows from the level."""
QUICK = ComparisonLevel(
    name="quick",
    mechanisms=(
        *("softmax", "cog", "softpick", "relu2", "sigmoid", "identity", "gpam", "linear-relu"),
        *("retention", "magnitude"),
    ),
    keys=1024,
    rows=16,
    depth=8,
    seeds=3,
    lengths=(256, 1024),
    geometries=128,
    draws=4,
)
STANDARD = ComparisonLevel(
    name="standard",
    mechanisms=(
        *("softmax", "softmax1", "l2", "cog", "sinh", "swishmax", "softpick", "relu", "relu2", "sigmoid"),
        *("tanh", "identity", "polynomial", "gpam", "differential", "differential2", "linear-relu"),
        *("linear-elu1", "linear-exp", "cosformer", "performer", "retention", "decay", "magnitude"),
        *("magnitude+cog", "logn+softmax", "sink+softmax", "sparsemax", "entmax15", "stick-breaking", "fox"),
        *("rbf", "ssmax", "tda", "deltanet", "gated-deltanet", "density"),
    ),
    keys=2048,
    rows=16,
    depth=12,
    seeds=4,
    lengths=(256, 1024, 2048),
    geometries=256,
    draws=8,
)
FULL = ComparisonLevel(
    name="full",
    mechanisms=(),
    keys=8192,
    rows=64,
    depth=24,
    seeds=8,
    lengths=(256, 512, 1024, 2048, 4096),
    rounds=7,
    seconds=1.0,
    geometries=1024,
    draws=16,
)


def default_names(level: ComparisonLevel, own: bool) -> tuple[str, ...]:
    """Return the mechanisms to compare if the user names none; ``own`` if there are formulas besides."""
    if own:
        return _BESIDE_OWN
    return level.mechanisms or tuple(dict.fromkeys((*STANDARD.mechanisms, *all_names())))


@dataclass(frozen=True)
class Request:
    """Candidates and settings of a comparison."""

    candidates: Sequence[Candidate]
    level: ComparisonLevel
    model: str | None = None
    study: str | None = None
    """A file with records of trained models, in place of those that come with the package."""
    verdicts: str | None = None
    """A file with verdicts of interventions inside a model, added to those that come with the package."""

    def with_references(self, *names: str) -> list[Candidate]:
        """Return the candidates and these mechanisms, which claims are about."""
        labels = {candidate.label for candidate in self.candidates}
        return [*self.candidates, *(Candidate(name, name) for name in names if name not in labels)]


def job(
    name: str,
    candidate: Candidate | None,
    compute: Callable[..., Rows],
    expected: float,
    *,
    timed: bool = False,
    **sizes: Any,
) -> Job:
    """Return the measurement ``compute(candidate, **sizes)``, or ``compute(**sizes)`` without a candidate.

    The sizes are part of the question, so they must be plain data that decide the answer.
    """
    question = {"name": name, **sizes}
    call = partial(compute, **sizes)
    if candidate is not None:
        question["mechanism"] = candidate.identity
        call = partial(compute, candidate, **sizes)
    return Job(name, "" if candidate is None else candidate.label, question, call, expected, timed)


@dataclass(frozen=True)
class Claim:
    """A claim of the literature: its kind, the rule that decides it, and the check that applies the rule.

    ``rule`` says how the claim is decided and ``refuted`` which outcome would be against it: both are written
    before the number is known. ``check`` computes the verdict; what it reads is what must be measured.

    A rule must be able to pass and to fail. tests/lab/compare/test_claims.py holds results for both outcomes
    of every experiment (``FLIPS``). If the measured baseline leaves less room than the rule asks for, the
    check returns the verdict "at ceiling".
    """

    name: str
    source: str
    text: str
    kind: str
    rule: str
    refuted: str
    check: Check

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"claim {self.name}: there is no kind {self.kind!r}")
        if not self.rule:
            raise ValueError(f"claim {self.name}: it needs its rule in words")
        if self.kind in (EXPERIMENT, TRAINED) and not self.refuted:
            raise ValueError(f"claim {self.name}: it must say which outcome would refute it")

    @property
    def counts(self) -> bool:
        """True if it could have failed."""
        return self.kind in COUNTED

    def judge(self, results: Results) -> Finding:
        """Return the verdict, "not run" with the reason if a measurement is missing."""
        try:
            verdict, numbers = self.check(results)
        except Missing as reason:
            return NOT_RUN, str(reason)
        return (BY_CONSTRUCTION if self.kind == DEFINITION and verdict == SUPPORTED else verdict), numbers


@dataclass(frozen=True)
class ScoreColumn:
    """A column of the scoreboard: a number for each mechanism, its confidence interval, and a reading.

    ``yes`` and ``partly`` are thresholds of the number; above them is good unless ``low_is_good``. ``noise``
    is the relative change that repeated runs of the same code show.
    """

    name: str
    title: str
    help: str
    answer: Callable[[Results, str], Value]
    """Returns the number of a mechanism. Draws are listed in the same order for every mechanism, so that they
    can be paired with those of softmax; None is a draw that ended at ``limit``."""
    yes: float = 0.0
    partly: float = 0.0
    low_is_good: bool = False
    noise: float = 1e-6
    unit: str = ""
    why: str = ""
    """The reference points that the thresholds come from."""
    limit: float | None = None
    """The end of the measured range: a value that reaches it is shown as "at least"."""
    possible: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest value that the quantity can have; confidence intervals are clipped to it."""
    reference: float | None = None
    """The number of softmax where others are shown as the difference to it: one whose confidence interval
    contains the reference reads "partly"."""
    note: Callable[[Results, str], str] | None = None
    """Remark on one number, such as the tasks that it is a mean over."""
    badness: Callable[[float], float] | None = None
    """For a number that is best in the middle: its distance from there, which thresholds apply to."""
    group: str = CAPABILITY
    need: str = ""
    """Need that this column answers, for the cards of the page."""
    draws: Callable[[Results, str], Sequence[float | None]] | None = None
    """The draws behind the number if ``answer`` returns something else than their mean."""
    margin: float = 0.0
    """The smallest difference to softmax that is worth mentioning: below it a mechanism is "the same"."""
    is_ratio: bool = False
    """True to compare with softmax by a factor, False by a difference."""

    @property
    def aim(self) -> str:
        """The direction of better numbers: "lower", "higher", or "1"."""
        return "1" if self.badness else "lower" if self.low_is_good else "higher"

    @property
    def thresholds(self) -> str:
        """The thresholds as text."""
        up_to = "up to" if self.low_is_good or self.badness else "from"
        unit = self.unit if self.badness is None else "times too many or too few"
        return f"● {up_to} {self.yes:.3g}, ◐ {up_to} {self.partly:.3g} {unit}".rstrip()

    def estimate(self, results: Results, label: str) -> Estimate | None:
        """Return the number of a mechanism; of draws their mean, a lower bound if one ended at the limit."""
        answer = self.answer(results, label)
        if isinstance(answer, list):
            if not answer:
                return None
            return t_interval(answer) if self.limit is None else evidence.censored_mean(answer, self.limit)
        return answer if isinstance(answer, Estimate) or answer is None else Estimate(answer)

    def cell(self, results: Results, label: str) -> dict[str, Any]:
        """Return value, reading, confidence interval and note of one mechanism as plain data."""
        estimate = self.estimate(results, label)
        if estimate is None:
            return {"value": None, "reading": self.reading(None), "beyond": False}
        is_limit = self.limit is not None and estimate.value >= self.limit
        beyond = is_limit or estimate.high == math.inf
        reading = self.reading(estimate.value)
        if self.reference is not None and estimate.lower <= self.reference <= estimate.upper:
            reading = "partly"
        cell: dict[str, Any] = {"value": estimate.value, "reading": reading, "beyond": beyond}
        # Equal draws would have an interval of width 0, which is not certainty; a bound has none either.
        if not beyond and between(estimate.low, estimate.high) not in ("", "all equal"):
            low, high = max(estimate.lower, self.possible[0]), min(estimate.upper, self.possible[1])
            cell |= {"low": low, "high": high}
        if self.note is not None and (note := self.note(results, label)):
            cell["note"] = note
        versus = None if label == BASELINE else self.versus(results, label, estimate)
        return cell | {"versus": versus} if versus else cell

    def versus(self, results: Results, label: str, estimate: Estimate) -> dict[str, Any] | None:
        """Return the difference to softmax (or the factor), with its interval and reading, as plain data.

        It is paired by draw where there are draws. "better" and "worse" need an interval that excludes
        equality by more than the noise of repeated runs, and a difference of at least ``margin``; a single
        random draw decides nothing.
        """
        if self.reference is not None:
            return self._compared(estimate, self.reference, 0.0)
        base = self.estimate(results, BASELINE)
        if base is None:
            return None
        draws: list[Any] = [(self.draws or self.answer)(results, name) for name in (label, BASELINE)]
        if not all(isinstance(one, list) for one in draws):
            change = estimate.value / base.value if self.is_ratio else estimate.value - base.value
            return self._compared(Estimate(change), base.value, estimate.value)
        pairs = list(zip(*draws, strict=False))
        if not pairs:
            return None
        limit = math.inf if self.limit is None else self.limit
        mine, theirs = zip(*(tuple(limit if x is None else x for x in pair) for pair in pairs), strict=True)
        differences = [a - b for a, b in zip(mine, theirs, strict=True)]
        paired = evidence.paired_ratio(mine, theirs) if self.is_ratio else t_interval(differences)
        compared = self._compared(paired, base.value, estimate.value)
        if len(pairs) < 2:
            compared["reading"] = SAME
        return compared | {"bound": any(None in pair for pair in pairs)}

    def _compared(self, change: Estimate, base: float, value: float) -> dict[str, Any]:
        equal, sign = (1.0 if self.is_ratio else 0.0), -1.0 if self.low_is_good else 1.0
        room = self.noise if self.is_ratio or self.reference is not None else self.noise * abs(base)
        ends = sorted((sign * (change.lower - equal), sign * (change.upper - equal)))
        if self.badness is not None:  # how much nearer to the aim
            nearer = math.log(self.badness(base) / self.badness(value)) if math.isfinite(value) else -math.inf
            ends, room = [nearer, nearer], self.noise
        reading = BETTER if ends[0] > room else WORSE if ends[1] < -room else SAME
        if abs(change.value - equal) < self.margin:
            reading = SAME
        interval = {"low": change.low, "high": change.high} if change.low is not None else {}
        return {"value": change.value, "reading": reading, "bound": False} | interval

    def reading(self, value: float | None) -> str:
        """Return yes, partly, no, or not run."""
        if value is None:
            return NOT_RUN
        sign = -1.0 if self.low_is_good or self.badness else 1.0
        value = value if self.badness is None else self.badness(value)
        if sign * value >= sign * self.yes:
            return "yes"
        return "partly" if sign * value >= sign * self.partly else "no"


class Measurement(Protocol):
    """Decorator of a measurement, which may yield its rows; callers get them as a list."""

    def __call__(self, compute: Callable[P, Iterable[Any]], /) -> Callable[P, Rows]: ...


@dataclass(kw_only=True)
class Section:
    """One question about mechanisms: how it is measured, drawn, scored, and which claims it decides.

    A section is one file. It creates ``SECTION`` and decorates its functions with the methods below.

    >>> SECTION = Section(order=15, question="How heavy is the heaviest key?")
    >>> @SECTION.each(0.1)
    ... def heaviest(candidate: Candidate) -> Rows:
    ...     return [{"weight": float(candidate.row()(torch.zeros(4)).max())}]
    >>> @SECTION.column("heaviest", "heaviest key", yes=0.9, partly=0.5)
    ... def weight(results: Results, label: str) -> list[float]:
    ...     "Largest of four equal weights. 1 is the largest possible."
    ...     return [row["weight"] for row in results.get("heaviest", label)]
    >>> import torch
    >>> heaviest(Candidate("softmax", "softmax")), [column.help for column in SECTION.columns]
    ([{'weight': 0.25}], ['largest of four equal weights'])
    """

    order: int
    """Its position among the others."""
    name: str = ""
    """The name of its file, which :func:`unsoft.lab.compare.plan.sections` sets."""
    title: str = ""
    """In the page's list of sections; its name unless given."""
    question: str = ""
    """The heading of the section."""
    about: str | None = ""
    """What to know before looking at the figures: a text, or the docstring of the file, without its title."""
    group: str = ""
    """Its group in the page's list of sections, one of FOCUS, SIGNED, DEEP and PRICE."""
    about_mechanisms: Sequence[str] = ()
    """Names without modifiers: the page shows the section only if one of these is compared, and folded."""
    controls: Sequence[ChartControl] = ()
    needs: str = ""
    """The field of a request (and of its record) without which there is nothing to measure or to show."""
    evidence: str = ""
    """The section that shows its claims, if that is another one."""
    recorded: Callable[[Results], str] | None = None
    """For a section that reads a record: returns what was recorded, on which machine and when. Sections
    without it are measured by the run, or kept from an earlier run of the same code."""
    columns: list[ScoreColumn] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    measured: list[Callable[[Request], list[Job]]] = field(default_factory=list)
    stated: list[Callable[[Request], list[Job]]] = field(default_factory=list)
    drawn: list[Callable[[Results], Iterable[Figure]]] = field(default_factory=list)
    tables: list[Callable[[Results], Iterable[Part]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        title, _, rest = (self.about or "").partition("\n\n")
        self.about = " ".join((rest or title).split())

    @property
    def is_shown(self) -> bool:
        """True if it has a place on the page."""
        return bool(self.drawn or self.tables)

    def jobs(self, function: F) -> F:
        """Decorate a function from a request to the measurements of its mechanisms."""
        self.measured.append(function)
        return function

    def facts(self, function: F) -> F:
        """Decorate a function from a request to measurements that claims need whatever is compared."""
        self.stated.append(function)
        return function

    def figures(self, function: F) -> F:
        """Decorate a function from results to figures."""
        self.drawn.append(function)
        return function

    def parts(self, function: F) -> F:
        """Decorate a function from results to tables and texts."""
        self.tables.append(function)
        return function

    def each(self, seconds: Size, *references: str, name: str = "", **sizes: Size) -> Measurement:
        """Decorate a measurement of one mechanism: it is a job for every candidate and for ``references``.

        ``name`` is that of the function unless given, ``seconds`` what it takes on an ordinary machine. Other
        arguments of the function are the fields of the level with their names, or computed from the level by
        ``sizes``. The function may yield its rows.
        """
        return self._measurement(self.measured, references, seconds, name, sizes)

    def fact(self, seconds: Size, name: str = "", **sizes: Size) -> Measurement:
        """Decorate a measurement that claims need; the arguments are those of :meth:`each`."""
        return self._measurement(self.stated, None, seconds, name, sizes)

    def _measurement(
        self,
        kind: list[Callable[[Request], list[Job]]],
        references: Sequence[str] | None,
        seconds: Size,
        name: str,
        sizes: Mapping[str, Size],
    ) -> Measurement:
        def decorated(compute: Callable[P, Iterable[Any]]) -> Callable[P, Rows]:
            parameters = inspect.signature(compute).parameters.values()
            required = [one.name for one in parameters if one.default is one.empty]

            @wraps(compute)
            def rows(*args: P.args, **kwargs: P.kwargs) -> Rows:
                return list(compute(*args, **kwargs))

            @wraps(compute)  # of which the store takes the file of the section
            def jobs(request: Request) -> list[Job]:
                known = {**vars(request.level), **sizes, "seconds": seconds}
                given = {key: x(request.level) if callable(x) else x for key, x in known.items()}
                used = {key: given[key] for key in required if key in known}
                candidates = [None] if references is None else request.with_references(*references)
                title = name or compute.__name__.replace("_", " ")
                return [job(title, one, rows, given["seconds"], **used) for one in candidates]

            kind.append(jobs)
            return rows

        return decorated

    def column(self, name: str, title: str, **options: Any) -> Callable[[F], F]:
        """Decorate the answer of a :class:`ScoreColumn`, whose other fields are ``options``.

        Unless they are given, ``help`` is the first sentence of the docstring and ``why`` the rest of it.
        """

        def decorated(answer: F) -> F:
            first, _, rest = _words(answer).partition(". ")
            texts = {"help": first[:1].lower() + first[1:], "why": rest}
            self.columns.append(ScoreColumn(name=name, title=title, answer=answer, **texts | options))
            return answer

        return decorated

    def lines(
        self,
        name: str,
        title: str,
        x: tuple[str, str],
        y: tuple[str, str],
        *,
        note: str = "",
        only: Sequence[str] | None = None,
        joined: bool = False,
        reference: tuple[float, str] | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Decorate a function from results to the rows of a figure with one line for each mechanism.

        ``x`` and ``y`` are a column of the rows and the title of its axis, ``options`` those of
        :func:`unsoft.lab.report.figure.by_mechanism`. ``note`` is the docstring unless given, ``only`` the
        mechanisms of a figure that is about some, ``reference`` a height with its meaning. Rows of the kind
        "theory" are lines and those "measured" dots, which are joined where there is no theory if ``joined``.
        """

        def decorated(rows_of: F) -> F:
            def figures(results: Results) -> Iterable[Figure]:
                from unsoft.lab.report.figure import Figure, by_mechanism, reference_line

                rows = rows_of(results)
                theory, dots = (matching(rows, kind=x) for x in ("theory", "measured"))
                known = {row["mechanism"] for row in theory}
                theory += [row for row in dots if joined and row["mechanism"] not in known]
                more = options | {"x_title": x[1], "y_title": y[1]} | ({"dots": dots} if dots else {})
                labels = [label for label in results.labels if only is None or label in only]
                if rows:
                    chart = by_mechanism(labels, theory if dots else rows, x[0], y[0], **more)
                    chart = chart if reference is None else chart + reference_line(*reference)
                    yield Figure(name, title, note or _words(rows_of), rows, chart)

            self.drawn.append(figures)
            return rows_of

        return decorated

    def table(self, heading: str, *titles: str) -> Callable[[F], F]:
        """Decorate a function from results to the rows of a table, which is explained by the docstring."""

        def decorated(rows_of: F) -> F:
            def made(results: Results) -> Iterable[Part]:
                from unsoft.lab.report.comparison import Part

                if rows := rows_of(results):
                    yield Part.table(heading, _words(rows_of), titles, rows)

            self.tables.append(made)
            return rows_of

        return decorated

    def claim(
        self, source: str, text: str, *, kind: str, rule: str = "", refuted: str = ""
    ) -> Callable[[Check], Claim]:
        """Decorate the check of a claim.

        The claim is named after the function, with hyphens. Unless they are given, its rule is the docstring
        up to the word "Refuted:", and what follows is the outcome that would refute it.

        >>> section = Section(order=1)
        >>> @section.experiment(SURVEY, "Water is wet.")
        ... def _wet(results: Results) -> Finding:
        ...     "Supported if a finger gets wet. Refuted: It is dry."
        ...     return SUPPORTED, "it did"
        >>> _wet.name, _wet.rule, _wet.refuted, section.claims == [_wet]
        ('wet', 'Supported if a finger gets wet.', 'It is dry.', True)
        """

        def decorated(check: Check) -> Claim:
            name = check.__name__.strip("_").replace("_", "-")
            how, _, against = (rule or _words(check)).partition(" Refuted: ")
            self.claims.append(Claim(name, source, text, kind, how, refuted or against, check))
            return self.claims[-1]

        return decorated

    definition = partialmethod(claim, kind=DEFINITION)
    theorem = partialmethod(claim, kind=THEOREM)
    experiment = partialmethod(claim, kind=EXPERIMENT)
    trained = partialmethod(claim, kind=TRAINED)

    def view(self, results: Results) -> dict[str, Any] | None:
        """Return what the page shows, or None if there is nothing."""
        names = {part for label in results.labels for part in re.split(r"[+(\s]", label)}
        if self.about_mechanisms and not names & set(self.about_mechanisms):
            return None
        figures = [figure for function in self.drawn for figure in function(results)]
        parts = [part for function in self.tables for part in function(results)]
        if not figures and not parts:
            return None
        fields = ("name", "title", "question", "about", "group")
        texts: dict[str, Any] = {name: getattr(self, name) for name in fields}
        texts["folded"] = bool(self.about_mechanisms)
        texts["recorded"] = self.recorded(results) if self.recorded else ""
        return texts | {"controls": self.controls, "figures": figures, "parts": parts}


def _words(function: Callable[..., object]) -> str:
    """Return the docstring of a function in one line."""
    return " ".join((function.__doc__ or "").split())
