"""Shipped records can be repeated: a change that alters what a run finds must increase RESULTS and rerun
them.
"""

import pytest

from unsoft.lab.records import PACKAGED
from unsoft.lab.study import default_study, read_records
from unsoft.lab.study.plan import Run
from unsoft.lab.study.read import default_studies
from unsoft.lab.training import train
from unsoft.lab.training.callbacks import StopOnSignal

RECORDS = read_records(PACKAGED)
TOLERANCE = 0.01
"""Other processors, and other versions of the kernels, round differently."""


def run_of(record):
    """The run of a record, from the definition of its study."""
    study = default_study(record.study).with_sizes()
    for group in study.groups:
        for variant in group.variants:
            for point in study.points:
                run = Run(group=group, variant=variant, point=point, seed=record.seed, swept=record.swept)
                if run.position == (record.group, record.mechanism, record.seed, record.point):
                    return run
    raise AssertionError(f"{record.study} does not run {record.label} any more")


def curve_of(result):
    return [[row["step"], row["eval_score"]] for row in result.history if "eval_score" in row]


def test_the_first_points_of_a_recorded_curve(one_thread, monkeypatch):
    """100 of 250 steps, with the chance level and the transition to 0.98."""
    (record,) = [
        one
        for one in RECORDS
        if (one.study, one.mechanism, one.seed, one.point) == ("opposition", "cog", 0, "lr=0.003")
    ]

    def stop_early(self, args, state, control, **options):
        control.should_training_stop = state.global_step >= 100

    monkeypatch.setattr(StopOnSignal, "on_step_end", stop_early)
    curve = curve_of(train(run_of(record).spec))
    assert [step for step, _ in curve] == [25, 50, 75, 100]
    for (_, score), (_, recorded) in zip(curve, record.curve, strict=False):
        assert score == pytest.approx(recorded, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("study", [name for name in default_studies() if not name.startswith("language")])
def test_a_record_of_every_study(study, one_thread):
    """The cheapest run of each, to the end. Versions of the kernels round differently, and runs at high
    rates amplify it, so only the first points are compared closely."""
    mine = [one for one in RECORDS if one.study == study and one.lr <= 0.01]
    record = min(mine, key=lambda one: one.wall)
    result = train(run_of(record).spec)
    curve = curve_of(result)
    print(f"{study}: {record.label}: equal {curve == record.curve}, score {result.score} was {record.score}")
    assert [step for step, _ in curve] == [step for step, _ in record.curve]
    for (step, score), (_, recorded) in list(zip(curve, record.curve, strict=True))[:3]:
        assert score == pytest.approx(recorded, abs=TOLERANCE), f"at step {step}"
    assert result.score == pytest.approx(record.score, abs=0.1)
