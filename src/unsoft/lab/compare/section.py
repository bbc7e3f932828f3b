"""Parts of a section: the request it answers, its measurements, columns of the scoreboard, and claims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Missing, Results, Rows
from unsoft.lab.evidence import (
    AT_CEILING,
    BY_CONSTRUCTION,
    NOT_RUN,
    NOT_TESTABLE,
    SUPPORTED,
    Estimate,
    between,
    paired_ratio,
    t_interval,
)
from unsoft.modules.registry import names as all_names

if TYPE_CHECKING:
    from unsoft.lab.report.comparison import Part
    from unsoft.lab.report.figure import ChartControl, Figure

DEFINITION, THEOREM, EXPERIMENT = "definition", "theorem", "experiment"
TRAINED, ELSEWHERE = "trained", "not testable here"
KINDS = {
    DEFINITION: "true by construction: shown, never counted",
    THEOREM: "mathematics, checked to the digits that its rule names",
    EXPERIMENT: "a measurement that could have come out otherwise",
    TRAINED: "decided by trained models, from the records of a study",
    ELSEWHERE: "this page cannot decide it, for the reason given",
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
_BESIDE_OWN = ("softmax", "cog", "relu2", "linear-relu", "magnitude")
"""Compared with formulas of one's own unless other mechanisms are named."""


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
    rounds: int
    seconds: float
    """Minimum time for which the mechanisms are timed in turn."""
    geometries: int
    draws: int
    """Repetitions of everything random, from which confidence intervals come."""


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
    rounds=5,
    seconds=0.0,
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
    rounds=5,
    seconds=0.0,
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
    before the number is known. ``check`` computes the verdict; what it reads is what must be measured. A
    claim of the kind "not testable here" has the reason in ``needs`` instead of a check.

    A rule must be able to pass and to fail. tests/lab/compare/test_claims.py holds results for both outcomes
    of every experiment (``FLIPS``). Whether they can occur depends on the baseline that was measured: if it
    may leave less room than the rule asks for, give ``ceiling``, which looks at the same results and returns
    the reason why the rule could not pass or could not fail, or "". The verdict is then "at ceiling".
    """

    name: str
    source: str
    text: str
    kind: str
    rule: str = ""
    refuted: str = ""
    check: Callable[[Results], Finding] | None = None
    needs: str = ""
    evidence: str = ""
    """The section that shows it, if that is another one."""
    ceiling: Callable[[Results], str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"claim {self.name}: there is no kind {self.kind!r}")
        if self.kind == ELSEWHERE:
            if not self.needs or self.check is not None:
                raise ValueError(f"claim {self.name}: what cannot be tested has a reason and no check")
        elif self.check is None or not self.rule:
            raise ValueError(f"claim {self.name}: it needs a check and its rule in words")
        if self.kind in (EXPERIMENT, TRAINED) and not self.refuted:
            raise ValueError(f"claim {self.name}: it must say which outcome would refute it")

    @property
    def counts(self) -> bool:
        """True if it could have failed."""
        return self.kind in COUNTED

    def judge(self, results: Results) -> Finding:
        """Return the verdict, "not run" with the reason if a measurement is missing."""
        if self.check is None:
            return NOT_TESTABLE, self.needs
        try:
            verdict, numbers = self.check(results)
            full = self.ceiling(results) if self.ceiling is not None else ""
        except Missing as reason:
            return NOT_RUN, str(reason)
        if full:
            return AT_CEILING, f"{numbers}; {full}"
        return (BY_CONSTRUCTION if self.kind == DEFINITION and verdict == SUPPORTED else verdict), numbers


def claim(
    source: str,
    kind: str,
    text: str,
    *,
    refuted: str = "",
    rule: str = "",
    evidence: str = "",
    ceiling: Callable[[Results], str] | None = None,
) -> Callable[[Callable[[Results], Finding]], Claim]:
    """Return a decorator that makes a check a claim.

    The claim is named after the function, with hyphens. Unless they are given, its rule is the docstring up
    to the word "Refuted:", and what follows is the outcome that would refute it.

    >>> @claim(SURVEY, EXPERIMENT, "Water is wet.")
    ... def _wet(results: Results) -> Finding:
    ...     "Supported if a finger gets wet. Refuted: It is dry."
    ...     return SUPPORTED, "it did"
    >>> _wet.name, _wet.rule, _wet.refuted
    ('wet', 'Supported if a finger gets wet.', 'It is dry.')
    """

    def decorated(check: Callable[[Results], Finding]) -> Claim:
        name = check.__name__.strip("_").replace("_", "-")
        how, _, against = (rule or " ".join((check.__doc__ or "").split())).partition(" Refuted: ")
        return Claim(
            name, source, text, kind, how, refuted or against, check, evidence=evidence, ceiling=ceiling
        )

    return decorated


@dataclass(frozen=True)
class ScoreColumn:
    """A column of the scoreboard: a number for each mechanism, its confidence interval, and a reading.

    ``yes`` and ``partly`` are thresholds of the number; above them is good unless ``low_is_good``. ``noise``
    is the relative change that repeated runs of the same code show.
    """

    name: str
    title: str
    help: str
    answer: Callable[[Results, str], Estimate | float | None]
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
    """The draws behind the number, in the same order for every mechanism, so that they can be paired with
    those of softmax; None is a draw that ended at ``limit``."""
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

    def cell(self, results: Results, label: str) -> dict[str, Any]:
        """Return value, reading, confidence interval and note of one mechanism as plain data."""
        answer = self.answer(results, label)
        estimate = answer if isinstance(answer, Estimate) or answer is None else Estimate(answer)
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
        note = "" if self.note is None else self.note(results, label)
        cell |= {"note": note} if note else {}
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
        answer = self.answer(results, BASELINE)
        if answer is None:
            return None
        base = answer.value if isinstance(answer, Estimate) else answer
        if self.draws is None:
            found = Estimate(estimate.value / base if self.is_ratio else estimate.value - base)
            return self._compared(found, base, estimate.value)
        pairs = list(zip(self.draws(results, label), self.draws(results, BASELINE), strict=False))
        if not pairs:
            return None
        limit = math.inf if self.limit is None else self.limit
        mine, theirs = zip(*(tuple(limit if x is None else x for x in pair) for pair in pairs), strict=True)
        if self.is_ratio:
            found = paired_ratio(mine, theirs)
        else:
            found = t_interval([a - b for a, b in zip(mine, theirs, strict=True)])
        compared = self._compared(found, base, estimate.value)
        if len(pairs) < 2:
            compared["reading"] = SAME
        return compared | {"bound": any(None in pair for pair in pairs)}

    def _compared(self, found: Estimate, base: float, value: float) -> dict[str, Any]:
        equal, sign = (1.0 if self.is_ratio else 0.0), -1.0 if self.low_is_good else 1.0
        room = self.noise if self.is_ratio or self.reference is not None else self.noise * abs(base)
        ends = sorted((sign * (found.lower - equal), sign * (found.upper - equal)))
        if self.badness is not None:  # how much nearer to the aim
            nearer = math.log(self.badness(base) / self.badness(value)) if math.isfinite(value) else -math.inf
            ends, room = [nearer, nearer], self.noise
        reading = BETTER if ends[0] > room else WORSE if ends[1] < -room else SAME
        if abs(found.value - equal) < self.margin:
            reading = SAME
        interval = {"low": found.low, "high": found.high} if found.low is not None else {}
        return {"value": found.value, "reading": reading, "bound": False} | interval

    def reading(self, value: float | None) -> str:
        """Return yes, partly, no, or not run."""
        if value is None:
            return NOT_RUN
        sign = -1.0 if self.low_is_good or self.badness else 1.0
        value = value if self.badness is None else self.badness(value)
        if sign * value >= sign * self.yes:
            return "yes"
        return "partly" if sign * value >= sign * self.partly else "no"


@dataclass(frozen=True)
class Section:
    """One question about mechanisms: how it is measured, drawn, scored, and which claims it decides.

    ``name`` is that of its file, ``order`` its position among the others. Everything else is optional.
    ``jobs`` measure the mechanisms of a request, ``facts`` what claims need besides. ``figures`` and
    ``parts`` are what the page shows; a section without either is not on the page.
    """

    name: str
    order: int
    title: str = ""
    """In the page's list of sections."""
    question: str = ""
    """The heading of the section."""
    about: str = ""
    """What to know before looking at the figures."""
    jobs: Callable[[Request], list[Job]] | None = None
    facts: Callable[[Request], list[Job]] | None = None
    figures: Callable[[Results], Iterable[Figure]] | None = None
    parts: Callable[[Results], Iterable[Part]] | None = None
    controls: Sequence[ChartControl] = ()
    columns: Sequence[ScoreColumn] = ()
    claims: Sequence[Claim] = ()
    group: str = ""
    """Its group in the page's list of sections, one of FOCUS, SIGNED, DEEP and PRICE."""
    about_mechanisms: Sequence[str] = ()
    """Names without modifiers: the page shows the section only if one of these is compared, and folded."""
    needs: str = ""
    """The field of a request (and of its record) without which there is nothing to measure or to show."""
    recorded: Callable[[Results], str] | None = None
    """For a section that reads a record: returns what was recorded, on which machine and when. Sections
    without it are measured by the run, or kept from an earlier run of the same code."""

    def view(self, results: Results) -> dict[str, Any] | None:
        """Return what the page shows, or None if there is nothing."""
        names = {part for label in results.labels for part in re.split(r"[+(\s]", label)}
        if self.about_mechanisms and not names & set(self.about_mechanisms):
            return None
        figures = list(self.figures(results)) if self.figures else []
        parts = list(self.parts(results)) if self.parts else []
        if not figures and not parts:
            return None
        texts: dict[str, Any] = {name: getattr(self, name) for name in ("name", "title", "question", "about")}
        texts |= {"group": self.group, "folded": bool(self.about_mechanisms)}
        texts["recorded"] = self.recorded(results) if self.recorded else ""
        return texts | {"controls": self.controls, "figures": figures, "parts": parts}
