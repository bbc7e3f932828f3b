"""The store: what is kept is found again, and nothing half-written or foreign is."""

import json

import pytest

from unsoft.lab.bench import machine
from unsoft.lab.compare import store
from unsoft.lab.compare.jobs import Job, run
from unsoft.lab.compare.output import read_record, vega
from unsoft.lab.compare.store import AnswerStore, code_digest, folder_digest, key_of


def job(name, compute, **question):
    return Job(name, "", {"name": name, **question}, compute, 1.0)


def test_what_was_put_is_found(tmp_path):
    store = AnswerStore(tmp_path / "deep" / "store")
    assert store.get("a" * 40) is None
    store.put("a" * 40, {"rows": [{"x": 0.1}]})
    assert store.get("a" * 40)["rows"] == [{"x": 0.1}]
    assert [path.name for path in store.folder.iterdir()] == ["a" * 40 + ".json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "other", "rows": []}', '{"rows": []}'])
def test_a_damaged_file_is_as_if_absent(tmp_path, content):
    store = AnswerStore(tmp_path)
    (tmp_path / ("b" * 40 + ".json")).write_text(content)
    assert store.get("b" * 40) is None


def test_an_entry_without_the_fields_of_an_answer_is_measured_again(tmp_path):
    run([job("x", lambda: [1])], AnswerStore(tmp_path))
    (path,) = AnswerStore(tmp_path).files()
    path.write_text(json.dumps({"key": path.stem, "rows": [7]}))
    (answer,), _ = run([job("x", lambda: [2])], AnswerStore(tmp_path))
    assert answer.rows == [2] and not answer.cached


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"kind": "unsoft compare", "schema": 1}', r"another version of unsoft \(schema 1, not"),
        ("[]", "is not a record of unsoft compare"),
        ("{", "is not JSON"),
    ],
)
def test_results_of_an_older_version_are_refused(tmp_path, text, says):
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_record(tmp_path / "compare.json")
    assert (tmp_path / "compare.json").read_text() == text


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

    answers, finished = run([job("first", first), job("second", stopped)], AnswerStore(tmp_path))
    assert not finished and [a.name for a in answers] == ["first"]
    answers, finished = run([job("first", first), job("second", lambda: [2])], AnswerStore(tmp_path))
    assert finished and calls == ["first", "stopped"]
    assert [(a.rows, a.cached) for a in answers] == [([1], True), ([2], False)]


def test_one_failure_does_not_spoil_the_others(tmp_path):
    def fails():
        raise ValueError("cannot\n  do it")

    answers, finished = run([job("bad", fails), job("good", lambda: [3])], AnswerStore(tmp_path))
    assert finished and answers[0].problem == "cannot do it" and answers[1].rows == [3]


def test_another_question_is_asked_anew(tmp_path):
    run([job("x", lambda: [1], size=1)], AnswerStore(tmp_path))
    answers, _ = run([job("x", lambda: [2], size=2)], AnswerStore(tmp_path))
    assert answers[0].rows == [2] and not answers[0].cached


def test_the_estimate_follows_the_pace(tmp_path):
    left, now = [], [0.0]

    def work():
        now[0] += 2.0
        return [0]

    jobs = [Job(str(k), "", {"k": k}, work, 10.0) for k in range(3)]
    run(jobs, AnswerStore(tmp_path), lambda job, number, seconds: left.append(seconds), clock=lambda: now[0])
    assert left == [30.0, 4.0, 2.0]  # expected 10 s each, but each took 2


def test_a_failure_is_never_kept(tmp_path):
    def fails():
        raise ValueError("the folder is not there yet")

    run([job("x", fails)], AnswerStore(tmp_path / "store"))
    assert AnswerStore(tmp_path / "store").files() == []
    answers, _ = run([job("x", lambda: [1])], AnswerStore(tmp_path / "store"))
    assert answers[0].rows == [1] and not answers[0].problem and not answers[0].cached


def test_again_measures_anew_and_keeps_the_new_answer(tmp_path):
    run([job("x", lambda: [1])], AnswerStore(tmp_path))
    answers, _ = run([job("x", lambda: [2])], AnswerStore(tmp_path), again=True)
    assert answers[0].rows == [2] and not answers[0].cached
    answers, _ = run([job("x", lambda: [3])], AnswerStore(tmp_path))
    assert answers[0].rows == [2] and answers[0].cached and answers[0].measured


@pytest.mark.parametrize(("others", "kept"), [(0.0, True), (1.5, False)])
def test_times_of_a_busy_machine_are_not_kept(tmp_path, monkeypatch, others, kept):
    monkeypatch.setattr(machine.Watch, "others", lambda self: others)
    monkeypatch.setattr(machine, "cores", lambda: set(range(2)))

    def timed(compute, timed=True):
        return Job("x", "", {"timed": timed}, compute, 1.0, timed=timed)

    (first,), _ = run([timed(lambda: [1])], AnswerStore(tmp_path))
    assert first.rows == [1] and first.disturbed is not kept
    (second,), _ = run([timed(lambda: [2])], AnswerStore(tmp_path))
    assert second.cached is kept and second.rows == ([1] if kept else [2])
    run([timed(lambda: [3], timed=False)], AnswerStore(tmp_path))
    (other,), _ = run([timed(lambda: [4], timed=False)], AnswerStore(tmp_path))
    assert other.cached and not other.disturbed, "only times suffer from a busy machine"


def test_an_answer_that_can_change_unseen_is_not_kept(tmp_path):
    for _ in range(2):
        (answer,), _ = run(
            [Job("hub", "", {"name": "hub"}, lambda: [1], 1.0, keep=False)], AnswerStore(tmp_path)
        )
        assert not answer.cached
    assert AnswerStore(tmp_path).files() == []


def test_what_every_job_needs_is_prepared_once_before_anything_is_measured(tmp_path):
    calls = []

    def prepare():
        calls.append("prepare")

    def wanting(k):
        return Job(str(k), "", {"k": k}, lambda: calls.append(k) or [k], 1.0, prepare=prepare)

    run([job("first", lambda: calls.append("first") or [0]), wanting(1), wanting(2)], AnswerStore(tmp_path))
    assert calls == ["prepare", "first", 1, 2]
    run([wanting(1), wanting(2)], AnswerStore(tmp_path))
    assert len(calls) == 4, "nothing is prepared for answers that are known"

    def fails():
        raise ValueError("cannot be loaded")

    with pytest.raises(ValueError, match="cannot be loaded"):
        run([Job("x", "", {"x": 1}, lambda: calls.append("x"), 1.0, prepare=fails)], AnswerStore(tmp_path))
    assert "x" not in calls


def test_all_that_is_kept_can_be_cleared_and_nothing_else(tmp_path):
    folder = tmp_path / "store"
    run([job("x", lambda: [1]), job("y", lambda: [2])], AnswerStore(folder))
    (folder / f".{'a' * 40}.json.abc.tmp").write_text("{")
    assert AnswerStore(folder).clear() == 2 and not folder.exists()
    assert AnswerStore(folder).clear() == 0
    run([job("x", lambda: [1])], AnswerStore(folder))
    (folder / "notes.json").write_text("mine")
    assert AnswerStore(folder).clear() == 1 and [path.name for path in folder.iterdir()] == ["notes.json"]


def test_the_code_of_a_room_is_covered(tmp_path, monkeypatch):
    """A package of two rooms, one of which is only for models."""
    for room in ("measure", "hf", "cli"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "code.py").write_text("1")
    monkeypatch.setattr(store.unsoft, "__file__", str(tmp_path / "__init__.py"))

    def digests():
        code_digest.cache_clear()
        return code_digest(), code_digest("hf/")

    try:
        first = digests()
        (tmp_path / "cli" / "code.py").write_text("2")
        assert digests() == first
        (tmp_path / "hf" / "code.py").write_text("2")
        second = digests()
        assert second[0] == first[0] and second[1] != first[1]
        (tmp_path / "measure" / "code.py").write_text("2")
        assert digests()[0] != first[0]
    finally:
        monkeypatch.undo()
        code_digest.cache_clear()


def test_a_folder_is_known_by_its_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights").write_bytes(b"123")
    first = folder_digest(tmp_path)
    (tmp_path / "weights").write_bytes(b"124")
    second = folder_digest(tmp_path)
    (tmp_path / "weights").rename(tmp_path / "other")
    assert len({first, second, folder_digest(tmp_path)}) == 3


def test_a_script_that_others_could_have_planted_does_not_get_into_the_page(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: "ours")
    assert vega(AnswerStore(folder)) == "ours" and folder.stat().st_mode & 0o777 == 0o700
    (file,) = AnswerStore(folder).files()
    for path in (file, folder):
        file.write_text(file.read_text().replace("ours", "kept"))
        assert vega(AnswerStore(folder)) == "kept"
        before = path.stat().st_mode
        path.chmod(before | 0o022)
        assert vega(AnswerStore(folder)) == "ours"
        path.chmod(before)
