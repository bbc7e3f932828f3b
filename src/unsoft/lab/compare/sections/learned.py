"""What does training make of a gate on keys? The radius and the trust that models have learned, by task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from unsoft.lab.compare.jobs import Missing, Results
from unsoft.lab.compare.section import ROSIC, TRAINED, Finding, Section, claim
from unsoft.lab.compare.sections.hijack import CROWD, Gate
from unsoft.lab.compare.sections.training import STUDY, jobs, records_of, summaries_of
from unsoft.lab.evidence import LIMITS, UNDECIDED, Estimate, grade, t_interval
from unsoft.lab.report.comparison import Part
from unsoft.lab.study.read import default_studies, default_study
from unsoft.lab.study.record import Record
from unsoft.lab.study.rule import FEWEST, SCORE
from unsoft.lab.study.summary import CONTROL, Difference, Summary, current, difference

AGREE = 2.0
"""Radii that differ by a factor of no more than this count as the same."""
AS_GOOD = 0.01
"""Scores that differ by no more than this count as the same."""
TRUSTS = CROWD**0.5
"""A gate trusts geometry if a crowd counts as no more than this: half of the way from all to one, as on the
scoreboard."""


@dataclass(frozen=True)
class Task:
    """A task on which a gate on keys was trained."""

    summary: Summary
    runs: list[Record]
    """Those at the rate that validation chose, and those at other rates that are as good."""
    gain: Difference | None
    """Over softmax, on the test that the study's rule is about."""

    @property
    def name(self) -> str:
        return self.summary.group

    @property
    def radii(self) -> list[float]:
        return [_mean(run, "t") for run in self.runs]

    @property
    def settled(self) -> bool:
        """Do runs that are equally good agree on the radius, whatever seed and rate they had?"""
        return max(self.radii) <= AGREE * min(self.radii)

    @property
    def counts(self) -> Estimate:
        """What a crowd of clones counts as under the gates that were learned, over seeds."""
        return t_interval([counted(_mean(run, "beta"), _mean(run, "gamma")) for run in self.summary.runs])

    @property
    def helps(self) -> bool:
        found = self.gain
        return found is not None and found.low is not None and found.low > 0 and found.mean >= AS_GOOD


def _mean(run: Record, name: str) -> float:
    """Of a parameter of the gate, over layers and heads; of the radius the geometric mean."""
    found = [x for key, values in run.learned.items() if key.rpartition(".")[2] == name for x in values]
    return math.exp(fmean(map(math.log, found))) if name == "t" else fmean(found)


def counted(beta: float, gamma: float) -> float:
    """What a crowd of clones counts as: the gates of all of them over the gate of one key alone.

    >>> round(counted(1.0, 0.0), 1), round(counted(0.0, 0.0), 1)
    (35.4, 50.0)
    """
    gate = Gate(beta, gamma, 1.0)
    return CROWD * gate.of(1 / (CROWD + gate.eps)) / gate.of(1 / (1 + gate.eps))


def tasks(results: Results) -> list[Task]:
    """All tasks on record in which a gate with t, beta and gamma was trained, whatever it is called."""
    records = records_of(results)
    every = summaries_of(results)
    softmax = {(one.study, one.group): one for one in every if one.mechanism == CONTROL}
    found = []
    for one in every:
        if not {"t", "beta", "gamma"} <= one.learned.keys():
            continue
        place = (one.study, one.group)
        own = [r for r in current(records) if (r.study, r.group, r.mechanism) == (*place, one.mechanism)]
        best = max(run.merit or 0.0 for run in one.runs)
        good = [run for run in own if run.learned and (run.merit or 0.0) >= best - AS_GOOD]
        control = softmax.get(place)
        gain = None if control is None else difference(one, control, _judged_on(*place))
        found.append(Task(one, good, gain))
    return found


def _judged_on(study: str, group: str) -> str:
    """The test that a study's rule is about."""
    rules = default_study(study).rules if study in default_studies() else ()
    return next((rule.on for rule in rules if rule.group == group), SCORE)


def parts(results: Results) -> Iterator[Part]:
    found = tasks(results)
    if found:
        titles = ("task", "mechanism", "t", "β", "γ", f"{CROWD} clones count as", "gain over softmax")
        rows = []
        for task in found:
            learned = [f"{mean:.3g} ({low:.3g} to {high:.3g})" for mean, low, high in _learned(task)]
            gain = None if task.gain is None else task.gain.mean
            values = (task.name, task.summary.mechanism, *learned, str(task.counts), gain)
            rows.append(dict(zip(titles, values, strict=True)))
        text = (
            "Parameters of gates on keys after training: mean, smallest and largest over seeds. At the start"
            f" {CROWD} clones count as {counted(1.0, 0.0):.0f}."
        )
        yield Part(
            "What gates have learned", text, [{"name": n, "title": n, "help": ""} for n in titles], rows
        )


def _learned(task: Task) -> list[tuple[float, float, float]]:
    return [task.summary.learned[name] for name in ("t", "beta", "gamma")]


def _trained(results: Results) -> list[Task]:
    results.rows(STUDY)  # or the claim is not run
    found = tasks(results)
    if not found:
        raise Missing("no gate on keys was trained: unsoft study --default census, then --study FILE")
    return found


@claim(
    ROSIC,
    TRAINED,
    "The model learns the best radius t.",
    refuted=(f"In no task do equally good runs agree on t within a factor of {AGREE:g}."),
    rule=(
        "A best radius would not depend on how it was learned. Runs of one task, at any seed and learning"
        f" rate, whose validation scores lie within {AS_GOOD:g} of the best: holds if their t agree to"
        f" a factor of {AGREE:g} in every task; with limits if in some; undecided below {FEWEST} seeds or"
        " two such rates."
    ),
)
def _learned_radius(results: Results) -> Finding:
    found = _trained(results)
    rates = [len({run.point for run in task.runs}) for task in found]
    if min(task.summary.seeds for task in found) < FEWEST or max(rates) < 2:
        return UNDECIDED, f"it takes {FEWEST} seeds, and two learning rates that are as good, to see it"
    settled = [task.settled for task in found]
    return grade(all(settled), any(settled)), "; ".join(
        f"{task.name}: t from {min(task.radii):.3g} to {max(task.radii):.3g} in {len(task.runs)} runs at"
        f" {count} learning rates whose scores are within {AS_GOOD:g}"
        for task, count in zip(found, rates, strict=True)
    )


@claim(
    ROSIC,
    TRAINED,
    "Learned β and γ trust geometry only where it helps.",
    refuted="Gates trust geometry where it does not help, or do not where it does, in every task.",
    rule=(
        f"A gate trusts geometry if with its β and γ {CROWD} clones count as at most {TRUSTS:.1f}."
        f" Geometry helps if the gate gains {AS_GOOD:g} over softmax on the test of the study's rule,"
        " interval above 0. Holds if gates trust in every task where it helps and in no other; with"
        " limits if that is so in some; undecided without tasks of both kinds."
    ),
)
def _learned_trust(results: Results) -> Finding:
    found = [task for task in _trained(results) if task.gain is not None and task.gain.seeds >= FEWEST]
    trusting = [task.counts.value <= TRUSTS for task in found]
    helped = [task.helps for task in found]
    said = "; ".join(
        f"{task.name}: {CROWD} clones count as {task.counts}, gain over softmax {task.gain.mean:+.3f}"
        for task in found
        if task.gain is not None
    )
    if len(set(helped)) < 2:
        lack = "where geometry helps" if not any(helped) else "where geometry does not help"
        return UNDECIDED, f"no task {lack} is on record; {said}"
    right = [trusts == helps for trusts, helps in zip(trusting, helped, strict=True)]
    return (LIMITS if any(right) and not all(right) else grade(all(right))), said


SECTION = Section(
    name="learned",
    order=92,
    title="Learned gates",
    question="What do gates on keys learn?",
    jobs=jobs,
    parts=parts,
    claims=[_learned_radius, _learned_trust],
)
