"""Is steering a real intervention? One table of controls, each with an interval and a rule fixed here.

The effect of directions is the change of a score, item by item, on items that played no part in finding them.
It counts as real if it is there, if no control has as much of it, and if it grows with the strength; with
limits if something else suffers by more than a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.evidence import DOES_NOT_HOLD, HOLDS, LIMITS, Interval, resampled_mean
from unsoft.lab.interpret.steering.directions import Directions

DRAWS = 19
"""Directions of each kind drawn by chance: if none has as much effect, chance has at most 1 in 20."""
DOSES = (-1.0, -0.5, 0.0, 0.5, 1.0)
"""Of the strength."""
VERDICT_RULE = (
    f"{HOLDS!r} if every control passes; {LIMITS!r} if only side effects fail; else {DOES_NOT_HOLD!r}"
)
Measure = Callable[[Directions | None, float], Tensor]
"""Numbers (items,) of a model steered along directions with a strength; None is the model as it is."""


@dataclass(frozen=True)
class Bound:
    """A measure that must not rise by more than the margin; a margin below 0 is a fall that must come."""

    name: str
    measure: Measure
    margin: float
    unit: str
    side_effect: bool = True
    """Something that steering should leave alone; False if it belongs to what is claimed."""


@dataclass(frozen=True)
class Control:
    """One line of the table."""

    name: str
    effect: float
    low: float
    high: float
    rule: str
    passed: bool
    side_effect: bool = False


@dataclass(frozen=True)
class Judgement:
    """The table, the doses, and what they amount to."""

    strength: float
    before: float
    after: float
    controls: list[Control]
    doses: list[dict[str, float]]

    @property
    def verdict(self) -> str:
        """By :data:`VERDICT_RULE`.

        >>> fine, bad = (Control("", 0.0, 0.0, 0.0, "", passed, side_effect=True) for passed in (True, False))
        >>> Judgement(1.0, 0.0, 0.0, [fine], []).verdict, Judgement(1.0, 0.0, 0.0, [bad], []).verdict
        ('holds', 'holds with limits')
        """
        failed = [control for control in self.controls if not control.passed]
        if not failed:
            return HOLDS
        return LIMITS if all(control.side_effect for control in failed) else DOES_NOT_HOLD

    def told(self) -> str:
        """The verdict's reasons in one sentence."""
        first = self.controls[0]
        failed = [control.name for control in self.controls if not control.passed]
        words = (
            f"at strength {self.strength:g} the score went from {self.before:.3f} to {self.after:.3f},"
            f" by {first.effect:+.3f} ({first.low:+.3f} to {first.high:+.3f}) on {first.name}"
        )
        return f"{words}; {len(self.controls) - len(failed)} of {len(self.controls)} controls passed" + (
            f", not {', '.join(failed)}" if failed else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def steps(bounds: int, draws: int = DRAWS) -> int:
    """How often :func:`judge` says that it goes on."""
    return 2 * draws + len(DOSES) + 1 + bounds


def judge(
    score: Measure,
    directions: Directions,
    strength: float,
    *,
    shuffled: Callable[[int], Directions],
    other: Directions,
    bounds: Sequence[Bound],
    items: str,
    draws: int = DRAWS,
    said: Callable[[str], None] = lambda words: None,
) -> Judgement:
    """Measures every control.

    score
        Higher is more of what is wanted; on held-out items, which ``items`` names.
    shuffled
        From a number: directions that were found with the labels of a chance half of the pairs exchanged.
    other
        Directions of another task.

    All of them get the lengths of ``directions``, layer by layer.
    """
    doses = []
    for dose in DOSES:
        said("dose")
        doses.append(score(directions if dose else None, strength * dose).double())
    before, after = doses[DOSES.index(0.0)], doses[-1]
    effect = after - before
    controls = [
        _control(items, resampled_mean(effect), "the interval lies above 0", lambda found: found.low > 0)
    ]

    def by_chance(kind: str, draw: Callable[[int], Directions]) -> Control:
        changes = torch.stack(list(_changes(kind, draw)))
        rule = f"the effect is larger than that of each of {draws} draws"
        passed = bool(effect.mean() > changes.mean(1).max())
        return _control(kind, resampled_mean(changes), rule, lambda found: passed)

    def _changes(kind: str, draw: Callable[[int], Directions]) -> Iterator[Tensor]:
        for number in range(draws):
            said(kind)
            yield score(draw(number).as_long_as(directions), strength).double() - before

    controls.append(by_chance("random direction", directions.random))
    controls.append(by_chance("shuffled labels", shuffled))
    said("another task")
    elsewhere = score(other.as_long_as(directions), strength).double() - before
    ahead = resampled_mean(effect - elsewhere)
    rule = f"the effect less this one lies above 0: {ahead}"
    controls.append(_control("another task", resampled_mean(elsewhere), rule, lambda found: ahead.low > 0))
    controls.append(_dose_response(doses, strength))
    for one in bounds:
        said(one.name)
        change = one.measure(directions, strength).double() - one.measure(None, 0.0).double()
        rule = f"the interval ends at {one.margin:g} {one.unit} or below"
        found = resampled_mean(change)
        passed = found.high <= one.margin
        controls.append(Control(one.name, found.mean, found.low, found.high, rule, passed, one.side_effect))
    rows = [
        {"strength": strength * dose, **asdict(resampled_mean(scores))}
        for dose, scores in zip(DOSES, doses, strict=True)
    ]
    return Judgement(strength, before.mean().item(), after.mean().item(), controls, rows)


def _dose_response(doses: Sequence[Tensor], strength: float) -> Control:
    """Slope of the score over the strength."""
    scores = torch.stack(list(doses))
    places = torch.tensor(DOSES, dtype=torch.float64) * strength
    away = places - places.mean()
    slopes = (away[:, None] * scores).sum(0) / away.square().sum()
    rising = bool((scores.mean(1).diff() > 0).all())
    rule = "the slope's interval lies above 0, and each larger strength gives a higher mean score"
    return _control("dose-response", resampled_mean(slopes), rule, lambda found: found.low > 0 and rising)


def _control(name: str, found: Interval, rule: str, passes: Callable[[Interval], bool]) -> Control:
    return Control(name, found.mean, found.low, found.high, rule, passes(found))
