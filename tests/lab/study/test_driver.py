"""The driver: what is done is not done again, what fails stops nobody, and a stop loses nothing."""

import os
import signal
import sqlite3
from dataclasses import replace

import pytest

from tests.lab.study.made_up import MadeUpWorkers, result
from unsoft.lab.study import make_study, read_records, run_study
from unsoft.lab.study.driver import DATA, key_of
from unsoft.lab.study.store import NAME, StudyStore
from unsoft.lab.study.worker import LOST, NODE_LOST

GROUP = {
    "task": "copy",
    "knobs": {"length": 3, "vocabulary": 4},
    "settings": {"steps": 8, "batch": 4, "width": 16, "heads": 1},
    "mechanisms": ["softmax", "cog"],
}


def study(**changes):
    return make_study({"name": "mine", "seeds": 3, "group": [GROUP], **changes})


def fine(job):
    return result(job, score=0.5)


def run(tmp_path, answer=fine, made=None, **options):
    workers = MadeUpWorkers(answer)
    state = run_study(made or study(), tmp_path, workers=workers, **options)
    return state, workers.jobs


def test_a_rerun_skips_what_is_done(tmp_path):
    state, jobs = run(tmp_path)
    assert (state.total, state.done, len(jobs)) == (10, 10, 10)
    found = read_records(tmp_path / NAME)[0]
    assert (found.harder, found.attention) == ({"length=6": 0.25}, {"first_token": [0.5]})
    state, jobs = run(tmp_path)
    assert (state.done, jobs) == (10, [])
    state, jobs = run(tmp_path, made=study(seeds=4))  # more seeds: only those are run
    assert (state.total, state.done) == (12, 12) and [job["spec"]["seed"] for job in jobs] == [3, 3]


def test_finished_runs_of_another_machine_are_not_repeated(tmp_path):
    run(tmp_path / "there")
    exported = read_records(tmp_path / "there" / NAME)
    state, jobs = run(tmp_path / "here", earlier=[*exported[:6], replace(exported[6], status="failed")])
    assert state.done == 10 and {job["spec"]["seed"] for job in jobs} == {1, 2} and len(jobs) == 4
    assert read_records(tmp_path / "here" / NAME)[0] == exported[0]


def test_another_study_of_the_store_takes_over_equal_runs(tmp_path):
    run(tmp_path)
    state, jobs = run(tmp_path, made=study(name="other"))
    assert state.done == 10 and jobs == []
    assert {record.study for record in read_records(tmp_path / NAME)} == {"mine", "other"}


def test_runs_of_other_code_stay_valid_and_are_counted(tmp_path, monkeypatch):
    assert run(tmp_path)[0].other_code == 0
    monkeypatch.setattr("unsoft.lab.study.driver.code_digest", lambda plugin: "later")
    state, jobs = run(tmp_path)
    assert (state.done, state.other_code, jobs) == (10, 10, [])
    state, jobs = run(tmp_path, made=study(seeds=4))
    assert (state.other_code, [job["code"] for job in jobs]) == (10, ["later"] * 2)


def test_an_interrupted_run_of_other_code_resumes_with_the_code_of_now(tmp_path, monkeypatch):
    run(tmp_path, lambda job: {"status": "failed", "error": "of a bug", "wall": 1.0})
    monkeypatch.setattr("unsoft.lab.study.driver.code_digest", lambda plugin: "later")
    state, jobs = run(tmp_path, retry=True)
    assert {job["code"] for job in jobs} == {"later"} and (state.done, state.other_code) == (10, 0)


def test_another_version_of_the_results_runs_again_unless_told_otherwise(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr("unsoft.lab.study.driver.RESULTS", 2)
    assert run(tmp_path, any_code=True)[1] == []
    state, jobs = run(tmp_path)
    assert len(jobs) == state.done == 10


def test_other_data_of_a_task_changes_the_keys_of_its_runs_only(monkeypatch):
    specs = [{"task": "census"}, {"task": "copy"}]
    census, copy = map(key_of, specs)
    monkeypatch.setitem(DATA, "census", 2)
    assert key_of(specs[0]) != census and key_of(specs[1]) == copy


def test_runs_that_compared_rotated_keys_no_longer_count(monkeypatch):
    gates = {"task": "census", "mechanism": "magnitude+softmax"}
    specs = [gates | {"rotary": True}, {"task": "recall", "mechanism": "density"}, gates]
    specs += [{"task": "recall", "mechanism": "cog"}]
    before = [key_of(spec) for spec in specs]
    monkeypatch.setattr("unsoft.lab.study.driver.GEOMETRY", 3)
    assert [key_of(spec) == key for spec, key in zip(specs, before, strict=True)] == [
        False,
        False,
        True,
        True,
    ]


def test_tuned_takes_the_best_rate_by_validation_and_not_by_the_test(tmp_path):
    def answer(job):
        best = job["spec"]["lr"] == 0.01
        return result(job, score=0.1 if best else 0.9, validation=0.8 if best else 0.2)

    _, jobs = run(tmp_path, answer)
    later = [job["spec"] for job in jobs if job["spec"]["seed"] > 0]
    assert len(later) == 4 and {spec["lr"] for spec in later} == {0.01}
    assert len([job for job in jobs if job["spec"]["seed"] == 0]) == 6


def test_tuned_takes_the_best_rate_where_the_study_chooses(tmp_path):
    """In training's difficulty the smallest rate is the best, on longer examples the largest."""

    def answer(job):
        rate = job["spec"]["lr"]
        longer = {"value": 6, "score": 0.5, "validation": rate}
        return result(job, score=0.5, validation=1 - rate, score_by=[longer])

    for place, wanted in (("", 0.001), ("length=6", 0.01)):
        _, jobs = run(tmp_path / f"s{place}", answer, made=study(group=[GROUP | {"choose_on": place}]))
        assert {job["spec"]["lr"] for job in jobs if job["spec"]["seed"] > 0} == {wanted}
        found = read_records(tmp_path / f"s{place}" / NAME)
        assert {record.choose_on for record in found} == {place}
        assert found[0].validation_by == {"length=6": found[0].lr}


@pytest.mark.parametrize("any_code", [False, True])
def test_runs_that_did_not_measure_what_rates_are_chosen_by_are_repeated(tmp_path, any_code):
    run(tmp_path, lambda job: result(job, score=0.5, score_by=[]))
    harder = study(group=[GROUP | {"choose_on": "length=6"}])
    assert len(run(tmp_path, made=harder, any_code=any_code)[1]) == 10


def test_full_runs_every_seed_at_every_rate(tmp_path):
    state, jobs = run(tmp_path, made=study(sweep="full"))
    places = {(job["spec"]["mechanism"], job["spec"]["lr"], job["spec"]["seed"]) for job in jobs}
    assert len(jobs) == len(places) == state.total == 18


def test_a_failing_run_is_recorded_and_stops_nobody(tmp_path):
    def answer(job):
        if job["spec"]["mechanism"] == "cog" and job["spec"]["lr"] == 0.01:
            return {"status": "failed", "error": "DivergenceError: the loss is nan", "wall": 1.0}
        return result(job, score=job["spec"]["lr"])

    state, _ = run(tmp_path, answer)
    assert (state.done, state.failed) == (9, 1)
    (failed,) = [record for record in read_records(tmp_path / NAME) if record.status == "failed"]
    assert (failed.mechanism, failed.lr, failed.error) == ("cog", 0.01, "DivergenceError: the loss is nan")
    # The rate at which it failed is not chosen.
    chosen = {
        record.lr for record in read_records(tmp_path / NAME) if record.mechanism == "cog" and record.seed
    }
    assert chosen == {0.003}
    assert run(tmp_path)[1] == []
    assert len(run(tmp_path, answer, retry=True)[1]) == 1


def test_a_dead_worker_costs_a_try_and_a_third_death_the_run(tmp_path):
    deaths = {}

    def answer(job):
        spec = job["spec"]
        place = (spec["mechanism"], spec["lr"])
        deaths[place] = deaths.get(place, 0) + 1
        lost = {"status": LOST, "error": "its worker died (exit code -9)", "wall": 0.0}
        often = 9 if place == ("cog", 0.001) else 1
        return lost if deaths[place] <= often and spec["seed"] == 0 else result(job, score=0.5)

    state, _ = run(tmp_path, answer)
    assert (state.done, state.failed) == (9, 1)
    records = read_records(tmp_path / NAME)
    assert [r.error for r in records if r.error] == ["its worker died (exit code -9), 3 times"]
    # A run that was begun twice does not say what a step costs.
    assert {(r.attempts, r.seconds_per_step) for r in records if r.status == "done"} == {(1, 0.5), (2, None)}


def test_a_lost_node_is_not_the_failure_of_its_run(tmp_path):
    """Its run is begun again; one that loses every node is left for the next call, which resumes it."""
    begun = {}

    def answer(job):
        spec = job["spec"]
        place = (spec["mechanism"], spec["lr"], spec["seed"])
        begun[place] = begun.get(place, 0) + 1
        lost = {"status": NODE_LOST, "error": "its node was lost (power)", "wall": 0.0}
        often = {("cog", 0.001, 0): 99, ("softmax", 0.01, 0): 4}.get(place, 0)
        return lost if begun[place] <= often else result(job, score=0.5)

    state, _ = run(tmp_path, answer)
    assert (state.failed, state.lost) == (0, "its node was lost (power)")
    left = [record for record in read_records(tmp_path / NAME) if record.status != "done"]
    assert [(r.status, r.mechanism, r.lr, r.attempts, r.error) for r in left] == [
        ("cut", "cog", 0.001, 5, "")
    ]
    assert begun["softmax", 0.01, 0] == 5
    state, _ = run(tmp_path)
    assert (state.done, state.lost) == (10, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_runs_and_the_same_call_goes_on(tmp_path, number):
    def answer(job):
        if len(begun) == 3:
            signal.raise_signal(number)
        begun.append(job)
        return result(job, score=0.5)

    begun = []
    state, jobs = run(tmp_path, answer)
    assert state.interrupted and state.done == 4 and state.waiting == 6
    cut = [r for r in read_records(tmp_path / NAME) if r.status == "cut"]
    assert len(cut) == 1
    state, jobs = run(tmp_path)
    assert not state.interrupted and state.done == 10 and len(jobs) == 6
    assert cut[0].spec in [job["spec"] for job in jobs]


def test_runs_of_a_killed_driver_are_run_again(tmp_path):
    run(tmp_path)
    with sqlite3.connect(tmp_path / NAME) as base:
        base.execute("update runs set status = 'running' where seed = 1")
    assert len(run(tmp_path)[1]) == 2


def test_a_second_driver_is_refused(tmp_path):
    with (
        StudyStore(tmp_path / NAME, write=True),
        pytest.raises(ValueError, match=f"process {os.getpid()} on .* is running a study in"),
    ):
        run(tmp_path)
    run(tmp_path)  # free again


def test_the_rule_is_fixed_before_the_first_run(tmp_path):
    rule = {"mechanism": "cog", "over": "softmax", "margin": 0.1}
    run(tmp_path, made=study(rule=[rule]))
    with pytest.raises(ValueError, match="the rule of 'mine' was another one when its first run began"):
        run(tmp_path, made=study(rule=[rule | {"margin": 0.0}]))


def test_a_store_of_something_else_is_one_line(tmp_path):
    (tmp_path / NAME).write_text("no database " * 99)
    with pytest.raises(ValueError, match="is not a store of studies"):
        run(tmp_path)
    with pytest.raises(ValueError, match="is not a store of studies"):
        read_records(tmp_path / NAME)
    with pytest.raises(ValueError, match="there is no file"):
        read_records(tmp_path / "none.db")
