"""Learned gates on keys: the radius and the trust after training, by task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from unsoft.lab.compare.jobs import Missing, Results, Rows
from unsoft.lab.compare.section import BASELINE, PRICE, ROSIC, Finding, Section
from unsoft.lab.compare.sections.hijack import CROWD, Gate
from unsoft.lab.compare.sections.training import STUDY, jobs, recorded, records_of, summaries_of
from unsoft.lab.evidence import AT_CEILING, PARTLY, UNDECIDED, Estimate, grade, t_interval
from unsoft.lab.study.read import default_studies, default_study
from unsoft.lab.study.record import Record
from unsoft.lab.study.rule import FEWEST
from unsoft.lab.study.summary import SCORE, Difference, ResultSummary, current, difference, room_above

AGREE = 2.0
"""Radii that differ by at most this factor count as equal."""
AS_GOOD = 0.01
"""Scores that differ by at most this count as equal."""
TRUSTS = CROWD**0.5
"""A gate trusts geometry if a crowd counts as no more than this: half of the way from all to one, as on the
scoreboard."""
SECTION = Section(
    order=92, group=PRICE, title="Learned gates", question="What do gates on keys learn?", recorded=recorded
)
SECTION.about_mechanisms = ("magnitude",)
SECTION.jobs(jobs)


@dataclass(frozen=True)
class TrainedGate:
    """A gate on keys, trained on one task."""

    summary: ResultSummary
    runs: list[Record]
    """Runs at the rate that validation chose, and those at other rates that are as good."""
    gain: Difference | None
    """Gain over softmax, on the test that the study's rule is about."""
    room: float | None
    """How much better than softmax any mechanism could be on that test."""

    @property
    def name(self) -> str:
        return self.summary.group

    @property
    def radii(self) -> list[float]:
        return [_mean(run, "t") for run in self.runs]

    @property
    def settled(self) -> bool:
        """True if equally good runs agree on the radius, whatever seed and rate they had."""
        return max(self.radii) <= AGREE * min(self.radii)

    @property
    def counts(self) -> Estimate:
        """Count of a crowd of clones under the learned gates, over seeds."""
        return t_interval([counted(_mean(run, "beta"), _mean(run, "gamma")) for run in self.summary.runs])

    @property
    def at_ceiling(self) -> bool:
        """True if softmax leaves no room for a gate to help."""
        return self.room is not None and self.room < AS_GOOD

    @property
    def helps(self) -> bool:
        gain = self.gain
        return gain is not None and gain.low is not None and gain.low > 0 and gain.mean >= AS_GOOD


def _mean(run: Record, name: str) -> float:
    """Return the mean of a parameter over layers and heads, the geometric mean for the radius."""
    values = [x for key, own in run.learned.items() if key.rpartition(".")[2] == name for x in own]
    return math.exp(fmean(map(math.log, values))) if name == "t" else fmean(values)


def counted(beta: float, gamma: float) -> float:
    """Return what a crowd of clones counts as: the gates of all of them over the gate of a single key.

    >>> round(counted(1.0, 0.0), 1), round(counted(0.0, 0.0), 1)
    (35.4, 50.0)
    """
    gate = Gate(beta, gamma, 1.0)
    return CROWD * gate.of(1 / (CROWD + gate.eps)) / gate.of(1 / (1 + gate.eps))


def trained_gates(results: Results) -> list[TrainedGate]:
    """Return every gate with t, beta and gamma on record, whatever it is called."""
    records = records_of(results)
    every = summaries_of(results)
    softmax = {(one.study, one.group): one for one in every if one.mechanism == BASELINE}
    gates = []
    for one in every:
        if not {"t", "beta", "gamma"} <= one.learned.keys():
            continue
        task = (one.study, one.group)
        own = [r for r in current(records) if (r.study, r.group, r.mechanism) == (*task, one.mechanism)]
        best = max(run.merit or 0.0 for run in one.runs)
        good = [run for run in own if run.learned and (run.merit or 0.0) >= best - AS_GOOD]
        control = softmax.get(task)
        on = _judged_on(*task)
        gain = None if control is None else difference(one.runs, control.runs, on)
        room = None if control is None else room_above(control, on)
        gates.append(TrainedGate(one, good, gain, room))
    return gates


def _judged_on(study: str, group: str) -> str:
    """Return the test that a study's rule is about."""
    rules = default_study(study).rules if study in default_studies() else ()
    return next((rule.on for rule in rules if rule.group == group), SCORE)


_TITLES = ("task", "mechanism", "t", "β", "γ", f"{CROWD} clones count as", "gain over softmax")


@SECTION.table("What gates have learned", *_TITLES)
def _table(results: Results) -> Rows:
    """Parameters of gates on keys after training: mean, smallest and largest over seeds.

    At the start 50 clones count as 35.
    """
    rows = []
    for gate in trained_gates(results):
        parameters = (gate.summary.learned[name] for name in ("t", "beta", "gamma"))
        learned = [f"{mean:.3g} ({low:.3g} to {high:.3g})" for mean, low, high in parameters]
        gain = None if gate.gain is None else gate.gain.mean
        rows.append((gate.name, gate.summary.mechanism, *learned, str(gate.counts), gain))
    return rows


def _trained(results: Results) -> list[TrainedGate]:
    results.rows(STUDY)  # raises Missing without records
    gates = trained_gates(results)
    if not gates:
        raise Missing("no gate on keys was trained: unsoft study census, then --study FILE")
    return gates


@SECTION.trained(ROSIC, "The model learns the best radius t.")
def _learned_radius(results: Results) -> Finding:
    """A best radius would not depend on how it was learned. Runs of one task, at any seed and learning rate,
    whose validation scores lie within 0.01 of the best: supported if their t agree to a factor of 2 in every
    task; partly if in some; undecided below 3 seeds or two such rates.

    Refuted: In no task do equally good runs agree on t within a factor of 2.
    """
    gates = _trained(results)
    rates = [len({run.point for run in gate.runs}) for gate in gates]
    if min(gate.summary.seeds for gate in gates) < FEWEST or max(rates) < 2:
        return UNDECIDED, f"it takes {FEWEST} seeds, and two learning rates that are as good, to see it"
    settled = [gate.settled for gate in gates]
    return grade(all(settled), any(settled)), "; ".join(
        f"{gate.name}: t from {min(gate.radii):.3g} to {max(gate.radii):.3g} in {len(gate.runs)} runs at"
        f" {count} learning rates whose scores are within {AS_GOOD:g}"
        for gate, count in zip(gates, rates, strict=True)
    )


@SECTION.trained(ROSIC, "Learned β and γ trust geometry only where it helps.")
def _learned_trust(results: Results) -> Finding:
    """A gate trusts geometry if with its β and γ 50 clones count as at most 7.1. Geometry helps if the gate
    gains 0.01 over softmax on the test of the study's rule, interval above 0. A task in which softmax leaves
    less room than 0.01 is at ceiling and does not count. Supported if gates trust in every task where
    geometry helps and in no other; partly if in some, or if all tasks of one kind are at ceiling; undecided
    without tasks of both kinds.

    Refuted: Gates trust geometry where it does not help, or do not where it does, in every task.
    """
    gates = [one for one in _trained(results) if one.gain is not None and one.gain.seeds >= FEWEST]
    numbers = "; ".join(
        f"{gate.name}: {CROWD} clones count as {gate.counts}, gain over softmax {gate.gain.mean:+.3f}"
        + (f", at ceiling (softmax leaves {gate.room:.3f})" if gate.at_ceiling else "")
        for gate in gates
        if gate.gain is not None
    )
    open_gates = [gate for gate in gates if not gate.at_ceiling]
    if gates and not open_gates:
        return AT_CEILING, numbers
    helped = {gate.helps for gate in open_gates}
    right = [(gate.counts.value <= TRUSTS) == gate.helps for gate in open_gates]
    if len(helped) == 2:
        return grade(all(right), any(right)), numbers
    lack = "where geometry helps" if helped == {False} else "where geometry does not help"
    outcome = PARTLY if right and all(right) and len(open_gates) < len(gates) else UNDECIDED
    return outcome, f"no task {lack} leaves room to tell; {numbers}"
