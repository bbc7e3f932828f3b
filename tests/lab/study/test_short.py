"""Sweeps in shorter runs, budgets, and the table of language models."""

import itertools
from dataclasses import replace

import pytest

from tests.lab.study.made_up import MadeUpWorkers, result, runs
from unsoft.lab.records import write_packaged
from unsoft.lab.study import budget, make_study, read_records, run_study, summarise, write_records
from unsoft.lab.study.driver import key_of
from unsoft.lab.study.plan import label_of
from unsoft.lab.study.store import NAME, StudyStore
from unsoft.lab.training.trainer import evaluations_of

RATES = [0.0003, 0.001, 0.003, 0.01, 0.03]
STUDY = {
    "name": "s",
    "seeds": [5, 6, 7],
    "lrs": RATES,
    "sweep": "short",
    "tuning_steps": 4,
    "eliminate": 0.2,
    "group": [
        {
            "task": "copy",
            "settings": {"steps": 8},
            "mechanisms": ["softmax", "cog", "relu2"],
            "variant": [{"label": "again", "mechanism": "softmax", "rate_of": "softmax", "seed_offset": 100}],
        }
    ],
}
BEST = {"softmax": 0.003, "cog": 0.03, "relu2": 0.001}
TOP = {"softmax": 0.7, "cog": 0.8, "relu2": 0.4}


def answer(job):
    spec = job["spec"]
    far = abs(RATES.index(spec["lr"]) - RATES.index(BEST[spec["mechanism"]]))
    return result(job, TOP[spec["mechanism"]] - 0.01 * far, steps=spec["steps"])


def test_a_short_sweep_ends_inside_and_completes_one_mechanism_after_another(tmp_path):
    workers = MadeUpWorkers(answer)
    workers.slots = 1
    study = make_study(STUDY)
    state = run_study(study, tmp_path, workers=workers)
    jobs = [
        (job["spec"]["mechanism"], job["spec"]["lr"], job["spec"]["steps"], job["spec"]["seed"])
        for job in workers.jobs
    ]
    assert jobs == [
        *(("softmax", rate, 4, 5) for rate in (0.001, 0.003, 0.01)),
        *(("softmax", 0.003, 8, seed) for seed in (6, 7)),
        *(("cog", rate, 4, 5) for rate in (0.001, 0.003, 0.01, 0.03)),  # the end of the list
        *(("cog", 0.03, 8, seed) for seed in (6, 7)),
        *(("relu2", rate, 4, 5) for rate in (0.001, 0.003, 0.01, 0.0003)),  # 0.3 worse than softmax
        *(("softmax", 0.003, 8, seed) for seed in (106, 107)),
    ]
    assert (state.total, state.done, state.waiting) == (len(jobs), len(jobs), 0)
    found = {one.mechanism: one for one in summarise(read_records(tmp_path / NAME))}
    assert {name: one.seeds for name, one in found.items()} == {
        "softmax": 2,
        "cog": 2,
        "relu2": 0,
        "again": 2,
    }
    assert found["cog"].difference.mean == pytest.approx(0.1) and found["again"].difference.mean == 0
    assert found["softmax"].edge == "" and found["cog"].edge == "largest"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tuning_steps": None}, "'tuning_steps' and sweep"),
        ({"seeds": 1}, "more seeds than 'tuning_seeds'"),
        ({"sweep": "tuned", "tuning_steps": None}, "'eliminate' needs sweep"),
    ],
)
def test_a_short_sweep_that_cannot_run_is_an_error(changes, problem):
    content = {name: value for name, value in (STUDY | changes).items() if value is not None}
    with pytest.raises(ValueError, match=problem):
        make_study(content)


def test_the_rate_of_a_later_variant_is_an_error():
    group = STUDY["group"][0] | {"variant": [{"mechanism": "sinh", "rate_of": "gpam"}]}
    with pytest.raises(ValueError, match="must be a variant before it"):
        make_study(STUDY | {"group": [group]})


def test_steps_of_a_time_are_measured_once(tmp_path, monkeypatch):
    measured = []

    def made_up(specs, seconds=5.0):
        measured.append([spec.mechanism for spec in specs])
        return [1.0, 1.6][: len(specs)]

    monkeypatch.setattr("unsoft.lab.study.plan.seconds_per_step", made_up)
    variant = {"label": "slow", "mechanism": "sinh", "as_costly_as": "softmax"}
    group = {"task": "copy", "mechanisms": ["softmax"], "variant": [variant], "settings": {"steps": 8}}
    study = make_study({"name": "s", "seeds": 1, "sweep": "none", "group": [group]})

    def answer(job):
        return result(job, 0.5, steps=job["spec"]["steps"])

    for _ in range(2):
        run_study(study, tmp_path / "one", workers=MadeUpWorkers(answer))
    records = read_records(tmp_path / "one" / NAME)
    assert [run.steps for run in records] == [8, 5] and measured == [["softmax", "sinh"]]
    workers = MadeUpWorkers(answer)  # another machine
    run_study(study, tmp_path / "two", workers=workers, earlier=records)
    assert not workers.jobs and len(measured) == 1


def test_budgets_and_scales():
    group = {
        "task": "copy",
        "knobs": {"length": 8},
        "mechanisms": ["softmax"],
        "settings": {"batch": 4},
        "budget": {"tokens": 16 * 4 * 20},
    }
    study = make_study({"seeds": 3, "group": [group]})
    assert study.with_sizes().groups[0].variants[0].settings["steps"] == 20
    with pytest.raises(ValueError, match="'budget' must be one of tokens, flops, seconds"):
        make_study({"seeds": 3, "group": [group | {"budget": {"tokens": 0}}]})
    large = budget.scaled(make_study(STUDY), 8)
    spec, before = (next(one.runs()).spec for one in (large, make_study(STUDY)))
    assert (spec.width, spec.heads, spec.layers) == (2 * before.width, 2 * before.heads, 2 * before.layers)
    assert (large.tuning_steps, large.groups[0].settings["steps"], large.name) == (32, 64, "s-8x")
    assert spec.lr == before.lr / 2
    costs = {cost.mechanism: cost for cost in budget.costs(make_study(STUDY), seconds=0.0)}
    assert costs["softmax"].measured and not costs["cog"].measured
    assert [cost.runs for cost in costs.values()] == [5, 5, 5, 2]
    assert costs["cog"].seconds == pytest.approx(costs["softmax"].seconds)
    assert 0 < costs["cog"].evaluation_seconds < costs["cog"].seconds


def test_the_cost_of_a_study_counts_every_evaluation(monkeypatch):
    """With a second for each batch of a test, and a tenth of one for a step."""
    times = itertools.count()
    monkeypatch.setattr(budget, "_clock", lambda: float(next(times)))
    monkeypatch.setattr(budget, "training_seconds", lambda spec, seconds: 0.1)
    group = {
        "task": "census",
        "mechanisms": ["softmax"],
        "settings": {"steps": 20, "evaluations": 4, "heads": 2},
    }
    study = make_study({"seeds": 2, "sweep": "none", "group": [group]})
    (cost,) = budget.costs(study)
    spec = next(study.runs()).spec
    tests = evaluations_of(spec)
    assert [times for _, times in tests] == [4, 1 + spec.layers * 3, *[2] * len(spec.make_task().sweep())]
    each = sum(batches.count * times for batches, times in tests)
    assert cost.evaluation_seconds == pytest.approx(2 * each)
    assert cost.seconds == pytest.approx(2 * (each + 20 * 0.1))


def test_the_remaining_time_counts_tests_once_per_run(tmp_path):
    """Runs of 4 steps take 2 s and runs of 8 steps 4 s, each with 10 s of final tests."""
    told = []

    def answer_slowly(job):
        steps = job["spec"]["steps"]
        outcome = answer(job)
        return outcome | {"wall": 10 + steps / 2, "result": outcome["result"] | {"seconds": steps / 2}}

    workers = MadeUpWorkers(answer_slowly)
    workers.slots = 1
    run_study(make_study(STUDY), tmp_path, workers=workers, tell=told.append)
    left = [(state.total - state.done, state.seconds_left) for state in told if state.ended is not None]
    ahead = [10 + job["spec"]["steps"] / 2 for job in workers.jobs]
    assert left[-2:] == [(1, pytest.approx(ahead[-1], abs=0.1)), (0, 0)]
    assert left[-3] == (2, pytest.approx(sum(ahead[-2:]), abs=0.1))


def test_language_models_have_a_table_of_their_own(tmp_path):
    own = [replace(run, task="language", figures={"copy": [1.0]}) for run in runs("cog", [1.5], group="1M")]
    write_records([*own, *runs("cog", [0.9], study="t")], tmp_path / "all.json")
    assert write_packaged(tmp_path / "all.json", tmp_path / "records.csv") == 2
    header, _ = (tmp_path / "language.csv").read_text().splitlines()
    assert header.startswith("study,size,mechanism,seed,rate,bits_per_byte,")
    assert read_records(tmp_path / "language.csv") == own
    more = [replace(run, seed=1, key="other") for run in own]
    write_records(more, tmp_path / "more.json")
    write_packaged(tmp_path / "more.json", tmp_path / "records.csv")
    assert read_records(tmp_path / "language.csv") == [*own, *more]


def test_a_store_of_an_earlier_version_gets_the_new_column(tmp_path):
    workers = MadeUpWorkers(answer)
    run_study(make_study(STUDY), tmp_path, workers=workers)
    with StudyStore(tmp_path / NAME, write=True) as store:
        store._base.execute("alter table runs drop column figures")
    assert len(read_records(tmp_path / NAME)) == len(workers.jobs)
    again = MadeUpWorkers(answer)
    run_study(make_study(STUDY), tmp_path, workers=again)
    assert not again.jobs and read_records(tmp_path / NAME)[0].figures == {}


def test_the_key_of_a_run_that_was_stored_before_is_unchanged():
    """New fields of a spec are stored only if they are set."""
    run = next(
        make_study(
            STUDY
            | {
                "sweep": "tuned",
                "tuning_steps": None,
                "eliminate": None,
                "group": [{"task": "copy", "mechanisms": ["softmax"]}],
            }
        ).runs()
    )
    content = run.spec.to_dict()
    later = {"init_std", "beta2", "final_lr", "evaluations", "eval_tokens", "rotary"}
    assert (
        not later & set(content)
        and content["weight_decay"] == 0.01
        and content["mlp"] == 2 * content["width"]
    )
    assert label_of(run.point) == "lr=0.0003" and key_of(content) == key_of(dict(content))
