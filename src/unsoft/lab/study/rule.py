"""A rule that turns results into a verdict. It is written before the study runs, and kept with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unsoft.lab.evidence import DOES_NOT_HOLD, HOLDS, UNDECIDED, worst
from unsoft.lab.study.record import Record
from unsoft.lab.study.summary import Difference, Summary, difference, summarise

SCORE = "score"
FEWEST = 3
"""Seeds without which nothing is decided."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``mechanism`` must beat every mechanism of ``over`` by ``margin``, on seeds that both have.

    Holds: the mean of the paired differences is at least the margin, and their interval lies above 0 (above
    the margin, if that is negative). Does not hold: for one of ``over`` the whole interval lies below the
    margin. Else it is undecided. Differences count in the direction in which scores are better; of what
    attention does, more is more, whatever the task's metric: who must have less stands in ``over``.
    """

    group: str
    mechanism: str
    over: Sequence[str]
    margin: float
    on: str = SCORE
    """What is compared: "score", a harder test such as "repeats=64", or what attention does, such as
    "head_diversity"."""

    def __post_init__(self) -> None:
        if not self.over:
            raise ValueError("study: a rule needs at least one mechanism in 'over'")
        if (
            isinstance(self.margin, bool)
            or not isinstance(self.margin, (int, float))
            or not math.isfinite(self.margin)
        ):
            raise ValueError(f"study: 'margin' of a rule must be a number, not {self.margin!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"over": list(self.over)}

    @property
    def text(self) -> str:
        """The rule in words.

        >>> Rule(group="census", mechanism="cog", over=["softmax"], margin=0.1).text
        'census: cog must beat softmax by 0.1 on the test'
        """
        where = f"the test with {self.on}" if "=" in self.on else "the test" if self.on == SCORE else ""
        most, others = f"{abs(self.margin):g}", _list(self.over)
        if where and self.margin > 0:
            does = f"beat {others} by {most} on {where}"
        elif where:
            does = f"be at most {most} worse than {others} on {where}"
        elif self.margin > 0:  # what attention does is neither good nor bad: more is more
            does = f"have at least {most} more {self.on} than {others}"
        else:
            does = f"have at most {most} less {self.on} than {others}"
        return f"{self.group}: {self.mechanism} must {does}"

    def judge(self, summaries: Sequence[Summary]) -> tuple[str, str]:
        """The verdict and what it is based on, in words with numbers."""
        there = {one.mechanism: one for one in summaries if one.group == self.group}
        verdicts, words = [], []
        for other in self.over:
            mine, theirs = there.get(self.mechanism), there.get(other)
            missing = [
                name
                for name, one in ((self.mechanism, mine), (other, theirs))
                if one is None or not one.seeds
            ]
            if mine is None or theirs is None or missing:
                verdicts.append(UNDECIDED)
                words.append(f"over {other}: no result of {_list(missing)}")
                continue
            found = difference(mine, theirs, self.on)
            verdicts.append(self._verdict(found))
            words.append(f"over {other} {_said(found)}")
        return worst(verdicts), f"{self.group}, {self.mechanism}: " + "; ".join(words)

    def _verdict(self, found: Difference | None) -> str:
        if found is None or found.low is None or found.high is None or found.seeds < FEWEST:
            return UNDECIDED
        if found.mean >= self.margin and found.low > min(self.margin, 0.0):
            return HOLDS
        return DOES_NOT_HOLD if found.high < self.margin else UNDECIDED


def verdict(rules: Sequence[Rule], records: Sequence[Record]) -> tuple[str, str]:
    """Of a claim with several rules: it holds if all hold, and does not if one does not.

    >>> verdict([], [])
    ('undecided', 'the study has no rule')
    """
    if not rules:
        return UNDECIDED, "the study has no rule"
    summaries = summarise(records)
    found = [rule.judge(summaries) for rule in rules]
    sweeps = sorted({one.sweep_words for one in summaries})
    words = [*(words for _, words in found), *sweeps, *edge_words(summaries)]
    return worst([each for each, _ in found]), ". ".join(words)


def edge_words(summaries: Sequence[Summary]) -> list[str]:
    """Return a warning for each end of the sweep that is some mechanism's best rate.

    >>> from unsoft.lab.study.record import Record
    >>> place = {"study": "s", "group": "g", "task": "copy", "mechanism": "cog", "seed": 0, "status": "done"}
    >>> rates = [Record(**place, key=f"{x}", lr=x, point=f"lr={x}", validation=x) for x in (0.1, 0.2, 0.3)]
    >>> edge_words(summarise(rates))
    ['the largest rate tried was the best for cog, so a larger one may be better']
    """
    found = []
    for edge, beyond in (("largest", "larger"), ("smallest", "smaller")):
        names = list(dict.fromkeys(one.mechanism for one in summaries if one.edge == edge))
        if names:
            found.append(
                f"the {edge} rate tried was the best for {_list(names)}, so a {beyond} one may be better"
            )
    return found


def read_rule(content: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> Rule:
    """From plain data; ``groups`` are the mechanisms of each group, of which a rule may speak."""
    known = ("group", "mechanism", "over", "margin", "on")
    for name in content:
        if name not in known:
            raise ValueError(f"study: a rule has no {name!r}; it has {', '.join(known)}")
    for name in ("mechanism", "over", "margin"):
        if name not in content:
            raise ValueError(f"study: a rule needs {name!r}")
    over = [content["over"]] if isinstance(content["over"], str) else content["over"]
    if not isinstance(over, list):
        raise ValueError(f"study: 'over' of a rule must be a list of mechanisms, not {over!r}")
    group = content.get("group", next(iter(groups)))
    for name, value in (("group", group), ("on", content.get("on", SCORE))):
        if not isinstance(value, str):
            raise ValueError(f"study: {name!r} of a rule must be a text, not {value!r}")
    made = Rule(**{**content, "group": group, "over": over})
    if group not in groups:
        raise ValueError(f"study: a rule is about {group!r}, and the study has {', '.join(groups)}")
    for label in (made.mechanism, *made.over):
        if label not in groups[group]:
            raise ValueError(f"study: a rule is about {label!r}, and {group} has {', '.join(groups[group])}")
    return made


def _said(found: Difference | None) -> str:
    if found is None:
        return "not measured"
    if found.low is None or found.high is None:
        return f"{found.mean:+.3f} with {found.seeds} seed"
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}, {found.seeds} seeds)"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
