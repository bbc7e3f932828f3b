"""The store: what is kept is found again, and nothing half-written or foreign is."""

import pytest

from unsoft.compare.job import Job
from unsoft.compare.run import run
from unsoft.compare.store import Store, key_of


def job(name, compute, **question):
    return Job(name, "", {"name": name, **question}, compute, 1.0)


def test_what_was_put_is_found(tmp_path):
    store = Store(tmp_path / "deep" / "store")
    assert store.get("a" * 40) is None
    store.put("a" * 40, {"rows": [{"x": 0.1}]})
    assert store.get("a" * 40)["rows"] == [{"x": 0.1}]
    assert [path.name for path in store.folder.iterdir()] == ["a" * 40 + ".json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "other", "rows": []}', '{"rows": []}'])
def test_a_damaged_file_is_as_if_absent(tmp_path, content):
    store = Store(tmp_path)
    (tmp_path / ("b" * 40 + ".json")).write_text(content)
    assert store.get("b" * 40) is None


def test_the_key_is_of_the_question():
    assert key_of({"a": 1, "b": [2, "x"]}) == key_of({"b": [2, "x"], "a": 1})
    assert len({key_of({"a": 1}), key_of({"a": 2}), key_of({"b": 1})}) == 3


def test_an_interrupt_keeps_what_is_done_and_the_next_run_goes_on(tmp_path):
    calls = []

    def first():
        calls.append("first")
        return [1]

    def stopped():
        calls.append("stopped")
        raise KeyboardInterrupt

    answers, finished = run([job("first", first), job("second", stopped)], Store(tmp_path))
    assert not finished and [a.name for a in answers] == ["first"]
    answers, finished = run([job("first", first), job("second", lambda: [2])], Store(tmp_path))
    assert finished and calls == ["first", "stopped"]
    assert [(a.rows, a.cached) for a in answers] == [([1], True), ([2], False)]


def test_one_failure_does_not_spoil_the_others(tmp_path):
    def fails():
        raise ValueError("cannot\n  do it")

    answers, finished = run([job("bad", fails), job("good", lambda: [3])], Store(tmp_path))
    assert finished and answers[0].problem == "cannot do it" and answers[1].rows == [3]


def test_another_question_is_asked_anew(tmp_path):
    run([job("x", lambda: [1], size=1)], Store(tmp_path))
    answers, _ = run([job("x", lambda: [2], size=2)], Store(tmp_path))
    assert answers[0].rows == [2] and not answers[0].cached


def test_the_estimate_follows_the_pace(tmp_path):
    left, now = [], [0.0]

    def work():
        now[0] += 2.0
        return [0]

    jobs = [Job(str(k), "", {"k": k}, work, 10.0) for k in range(3)]
    run(jobs, Store(tmp_path), lambda job, number, seconds: left.append(seconds), clock=lambda: now[0])
    assert left == [30.0, 4.0, 2.0]  # expected 10 s each, but each took 2
