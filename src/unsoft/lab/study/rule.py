"""Rules that turn the results of a study into a verdict, written before the study runs and stored with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import unsoft.lab.evidence as evidence
from unsoft.checks import finite
from unsoft.lab.evidence import AT_CEILING, NOT_SUPPORTED, PARTLY, SUPPORTED, UNDECIDED
from unsoft.lab.report.page import listed
from unsoft.lab.study import summary
from unsoft.lab.study.record import Record
from unsoft.lab.study.summary import SCORE, STATISTICS, Difference, ResultSummary, summarise

FEWEST = 3
"""Fewest seeds for a decision."""
_ROUNDING = 1e-9
METHOD = (
    "Supported: the mean of the paired differences is at least the margin, and their 95 % confidence interval"
    " (Student's t) lies above 0. Not supported: the whole interval lies below the margin. At ceiling: the"
    " baseline leaves less room than the margin, so the rule decides nothing. Otherwise undecided."
)
"""How every rule is applied, for pages and the terminal."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``mechanism`` must beat every mechanism of ``over`` by ``margin``, on seeds that both have.

    Supported: the mean of the paired differences is at least the margin, and their confidence interval lies
    above 0 (above the margin, if that is negative). Not supported: for one of ``over`` the whole interval
    lies below the margin. Otherwise it is undecided. A positive difference means a better score. For
    statistics of attention a positive difference means more, whatever the task's metric: list the mechanism
    that must have less in ``over``.

    At ceiling: one of ``over`` leaves less room up to the best possible score than the margin, so that no
    mechanism could pass. A rule with a negative margin is at ceiling, too, if there is less room than it
    tolerates, unless it is refuted: where the baseline solves the task, not being worse shows only that the
    task is easy.

    With ``at_most`` the statistic of ``mechanism`` itself is judged: supported if its confidence interval
    lies below that bound, not supported if it lies above. If a mechanism of ``over`` does not exceed the
    bound either, there was nothing to remove, and a rule that passes is at ceiling.
    """

    group: str
    mechanism: str
    over: Sequence[str]
    margin: float = 0.0
    on: str = SCORE
    """The compared quantity: "score", a harder test such as "repeats=64", or a statistic of attention such as
    "head_diversity"."""
    at_most: float | None = None
    """Bound of a statistic of attention, instead of a margin."""

    def __post_init__(self) -> None:
        if not self.over:
            raise ValueError("study: a rule needs at least one mechanism in 'over'")
        if self.mechanism in self.over:
            raise ValueError(f"study: a rule compares {self.mechanism!r} with itself, which decides nothing")
        for name in ("margin", "at_most"):
            value = getattr(self, name)
            try:
                finite("study", name, 0.0 if value is None and name == "at_most" else value)
            except (TypeError, ValueError):
                raise ValueError(f"study: {name!r} of a rule must be a number, not {value!r}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. A bound is left out if there is none: stored rules of earlier versions have no
        such field."""
        content = asdict(self) | {"over": list(self.over)}
        return {name: value for name, value in content.items() if name != "at_most" or value is not None}

    @property
    def text(self) -> str:
        """The rule as a sentence.

        >>> Rule(group="census", mechanism="cog", over=["softmax"], margin=0.1).text
        'census: cog must beat softmax by 0.1 on the test'
        """
        where = f"the test with {self.on}" if "=" in self.on else "the test" if self.on == SCORE else ""
        most, others = f"{abs(self.margin):g}", listed(self.over)
        if self.at_most is not None:
            does = f"have at most {self.at_most:g} {self.on}, and {others} more than that"
        elif where and self.margin > 0:
            does = f"beat {others} by {most} on {where}"
        elif where and self.margin == 0:
            does = f"beat {others} on {where}"
        elif where:
            does = f"be at most {most} worse than {others} on {where}"
        elif self.margin > 0:  # a statistic of attention is neither good nor bad
            does = f"have at least {most} more {self.on} than {others}"
        else:
            does = f"have at most {most} less {self.on} than {others}"
        return f"{self.group}: {self.mechanism} must {does}"

    def judge(self, summaries: Sequence[ResultSummary]) -> tuple[str, str]:
        """Return the verdict and the numbers it is based on, as text."""
        finished = {one.mechanism: one for one in summaries if one.group == self.group and one.seeds}
        judged = [self._judge_over(other, finished) for other in self.over]
        reasons = "; ".join(reason for _, reason in judged)
        return evidence.worst(
            [outcome for outcome, _ in judged]
        ), f"{self.group}, {self.mechanism}: {reasons}"

    def _judge_over(self, other: str, finished: Mapping[str, ResultSummary]) -> tuple[str, str]:
        """Return the verdict on one of ``over``, from the mechanisms that have results."""
        if missing := [name for name in (self.mechanism, other) if name not in finished]:
            return UNDECIDED, f"over {other}: no result of {listed(missing)}"
        mine, theirs = finished[self.mechanism], finished[other]
        if self.at_most is not None:
            return self._below(mine, theirs)
        gain = summary.difference(mine.runs, theirs.runs, self.on)
        room = summary.room_above(theirs, self.on)
        outcome = self._verdict(gain, room)
        left = f", which leaves {max(room or 0.0, 0.0):.3f}" if outcome == AT_CEILING else ""
        return outcome, f"over {other} {_describe(gain)}{left}"

    def _below(self, mine: ResultSummary, theirs: ResultSummary) -> tuple[str, str]:
        """Return the verdict on the bound ``at_most``, and the values of both mechanisms."""
        assert self.at_most is not None
        pair = [
            [value for run in one.runs if (value := summary.value_of(run, self.on)) is not None]
            for one in (mine, theirs)
        ]
        if min(map(len, pair)) < FEWEST:
            return UNDECIDED, f"{self.on} of both on {min(map(len, pair))} seeds"
        own, baseline = (evidence.t_interval(values, (0.0, STATISTICS[self.on])) for values in pair)
        reason = f"{self.on} {own}, of {theirs.mechanism} {baseline}, {len(pair[0])} seeds"
        if own.lower > self.at_most:
            return NOT_SUPPORTED, reason
        if own.upper > self.at_most:
            return UNDECIDED, reason
        return SUPPORTED if baseline.value > self.at_most else AT_CEILING, reason

    def _verdict(self, gain: Difference | None, room: float | None) -> str:
        if gain is None or gain.low is None or gain.high is None or gain.seeds < FEWEST:
            return UNDECIDED
        is_full = room is not None and (room < abs(self.margin) - _ROUNDING or room <= 0)
        if is_full:  # even the best mechanism would not pass, but a rule of no harm can fail
            return NOT_SUPPORTED if self.margin < 0 and gain.high < self.margin else AT_CEILING
        if gain.mean >= self.margin - _ROUNDING and gain.low > min(self.margin, 0.0):
            return SUPPORTED
        return NOT_SUPPORTED if gain.high < self.margin else UNDECIDED


def verdict(rules: Sequence[Rule], records: Sequence[Record]) -> tuple[str, str]:
    """Return the verdict of a claim and its reasons: supported if all its rules are, partly if some of them
    are at ceiling.

    >>> verdict([], [])
    ('undecided', 'the study has no rule')
    """
    if not rules:
        return UNDECIDED, "the study has no rule"
    summaries = summarise(records)
    judged = [rule.judge(summaries) for rule in rules]
    outcomes = [outcome for outcome, _ in judged]
    outcome = PARTLY if set(outcomes) == {SUPPORTED, AT_CEILING} else evidence.worst(outcomes)
    sweeps = sorted({one.sweep_words for one in summaries})
    sentences = [*(reason for _, reason in judged), *sweeps, *edge_words(summaries)]
    return outcome, ". ".join(sentences)


_OUTCOMES = {
    SUPPORTED: "beats {}",
    NOT_SUPPORTED: "does not beat {}",
    UNDECIDED: "is not clearly different from {}",
    AT_CEILING: "cannot be told from {}, which leaves no room",
}


def verdict_sentence(rules: Sequence[Rule], records: Sequence[Record], claim: str = "") -> str:
    """Return the verdict as one sentence: that of the claim or of the only rule, else that of each rule.

    >>> from unsoft.lab.study.record import Record
    >>> run = {"study": "s", "group": "copy", "task": "copy", "lr": 0.1, "point": "lr=0.1", "status": "done"}
    >>> runs = [
    ...     Record(**run, key=f"{name}{k}", mechanism=name, seed=k, score=score + k / 100, validation=score)
    ...     for name, score in (("softmax", 0.5), ("cog", 0.75))
    ...     for k in range(3)
    ... ]
    >>> verdict_sentence([Rule(group="copy", mechanism="cog", over=["softmax"], margin=0.0)], runs)
    'supported: cog beats softmax on copy (+0.250, all equal, 3 seeds).'
    """
    outcome = f"{verdict(rules, records)[0]}: " if claim or len(rules) == 1 else ""
    if claim:
        return outcome + claim
    summaries, parts = summarise(records), []
    for rule in rules:
        decided, reason = rule.judge(summaries)
        numbers = reason.partition(": ")[2].replace(f"over {rule.over[0]} ", "", 1)
        numbers = numbers.replace(" (", ", ", 1).rstrip(")") if len(rule.over) == 1 else numbers
        words = _OUTCOMES[decided].format(listed(rule.over))
        if rule.at_most is not None:
            words = f"with at most {rule.at_most:g} {rule.on} is {decided}"
        parts.append(f"{rule.mechanism} {words} on {rule.group} ({numbers})")
    return f"{outcome}{'; '.join(parts)}." if parts else ""


def edge_words(summaries: Sequence[ResultSummary]) -> list[str]:
    """Return a warning for each end of the sweep that is some mechanism's best rate.

    >>> from unsoft.lab.study.record import Record
    >>> run = {"study": "s", "group": "g", "task": "copy", "mechanism": "cog", "seed": 0, "status": "done"}
    >>> rates = [Record(**run, key=f"{x}", lr=x, point=f"lr={x}", validation=x) for x in (0.1, 0.2, 0.3)]
    >>> edge_words(summarise(rates))
    ['the largest rate tried was the best for cog, so a larger one may be better']
    """
    warnings = []
    for edge, beyond in (("largest", "larger"), ("smallest", "smaller")):
        if names := list(dict.fromkeys(one.mechanism for one in summaries if one.edge == edge)):
            best = f"the {edge} rate tried was the best for {listed(names)}"
            warnings.append(f"{best}, so a {beyond} one may be better")
    return warnings


def _describe(gain: Difference | None) -> str:
    if gain is None:
        return "not measured"
    if gain.low is None or gain.high is None:
        return f"{gain.mean:+.3f} with {gain.seeds} seed"
    return f"{gain.mean:+.3f} ({evidence.between(gain.low, gain.high)}, {gain.seeds} seeds)"
