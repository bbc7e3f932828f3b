"""At every size and in every state the mechanism does what its definition says, with and without a cache.

The definition is independent of all engines: plain torch from the paper (:mod:`unsoft.testing.definitions`),
for a formula of your own its text. Sizes and states are those of :mod:`unsoft.testing.grid.point`: a sample
that shows each of them, or all pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unsoft.modules.definition import Definition
from unsoft.modules.spec import LayerSpec, MechanismSpec
from unsoft.testing.grid.checks import decoding, results
from unsoft.testing.grid.point import AXES, COMBINED, EVEN_KEY_HEADS, Point, all_pairs, sample
from unsoft.testing.grid.trial import Trial
from unsoft.testing.measure import Measure, fact

CHECKS: dict[str, Callable[[Trial, str], Iterator[Measure]]] = {
    "output and gradients = definition": results,
    "decoding = definition": decoding,
}
_REFUSED = re.compile(r"argument '(attn_mask|is_causal|engine)'|arguments 'attn_mask'")
"""A ValueError that says so is no failure: the call is one that the mechanism, or the engine,
does not claim to do."""


@dataclass(frozen=True)
class Sizes:
    """A mechanism, and the points that it is tried at."""

    spec: MechanismSpec
    definition: Definition | None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    trials: dict[Point, Trial] = field(default_factory=dict, compare=False)
    """What was computed already; engines and checks share references."""

    def of(self, check: str, engine: str, others: tuple[str, ...]) -> tuple[Point, ...]:
        """The points of one engine: all for "auto", and for each of the others a share,
        so that together they have all."""
        points = _decodable(self.points) if check == "decoding = definition" else self.points
        return points if engine not in others else points[others.index(engine) :: len(others)]

    def measures(self, check: str, engine: str, points: tuple[Point, ...]) -> Iterator[Measure]:
        """One check at some points; whatever is raised is a finding."""
        for point in points:
            trial = self.trials.setdefault(
                point, Trial(self.spec, self.definition, point, str(self.seed), self.options)
            )
            try:
                for measure in CHECKS[check](trial, engine):
                    yield replace(measure, label=f"{point}: {measure.label}", case=str(point))
            except ValueError as error:
                if not _REFUSED.search(str(error)):
                    yield _raised(point, error)
            except Exception as error:
                yield _raised(point, error)


def _decodable(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Points at which tokens come one after the other, and some of the others changed so that they do.

    Every other mask there hides whole keys: caches of fixed size know no others.
    """
    found = [p for p in points if p.causal == "upper left" and p.keys == "same" and p.length]
    for number, point in enumerate(p for p in points[len(COMBINED) :: 3] if p.length > 1):
        mask = point.mask if number % 2 else ("left padding", "none", "right padding")[number // 2 % 3]
        found.append(replace(point, causal="upper left", keys="same", mask=mask))
    return tuple(dict.fromkeys(found))


def _raised(point: Point, error: Exception) -> Measure:
    return replace(fact(f"{point}: raised {type(error).__name__}: {error}", False), case=str(point))


def points_for(
    spec: MechanismSpec, seed: int, *, quick: bool = False, thorough: bool = False
) -> tuple[Point, ...]:
    """A sample for a mechanism; quick: its small points; thorough: every pair of values."""
    name, layer = spec.name, spec.build(LayerSpec(heads=2, head_dim=2))
    axes = AXES if all(part.key_head_multiple == 1 for part in layer.parts) else EVEN_KEY_HEADS
    if thorough:
        return (*COMBINED, *all_pairs(f"{seed} {name}", axes))
    found = sample(f"{seed} {name}", axes)
    return (*COMBINED, *(p for p in found if not quick or _is_small(p)))


def _is_small(point: Point) -> bool:
    longest = max(point.length, point.key_count)
    return longest <= 300 and longest * point.width <= 300 * 128
