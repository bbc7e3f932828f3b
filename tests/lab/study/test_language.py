"""The language study on a small text: run, killed, resumed, exported, and reported on its page."""

import re
from dataclasses import replace

import pytest

from docs.generate import language as generator
from tests.lab.study.made_up import MadeUpWorkers
from unsoft.lab.records import write_packaged
from unsoft.lab.study import default_study, make_study, read_records, run_study
from unsoft.lab.study.store import NAME
from unsoft.lab.study.worker import perform
from unsoft.lab.tasks import language as language_module
from unsoft.lab.training import Spec, spec, train
from unsoft.lab.training.callbacks import StepClock

MECHANISMS = ["softmax", "cog", "softpick"]


class Killed(BaseException):
    """The process ends here."""


class InThisProcess(MadeUpWorkers):
    """One worker, which trains in this process."""

    slots = 1

    def __init__(self):
        super().__init__(lambda job: perform({**job, "threads": 1}))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number} has lines\n" * 60)
    return folder


def study_of(texts, **changes):
    group = {
        "name": "1M",
        "task": "language",
        "knobs": {"path": str(texts), "vocabulary": 270, "length": 64},
        "settings": {"layers": 2, "width": 32, "heads": 2, "mlp": 32, "batch": 2, "steps": 10}
        | {"evaluations": 2, "eval_tokens": 128},
        "mechanisms": MECHANISMS,
    }
    rules = [rule.to_dict() for rule in default_study("language").rules if rule.mechanism in MECHANISMS]
    content = {
        "name": "language",
        "seeds": 3,
        "sweep": "short",
        "tuning_steps": 2,
        "lrs": [0.001, 0.003, 0.01],
    }
    rules = [{k: v for k, v in rule.items() if k != "margin" or "at_most" not in rule} for rule in rules]
    return make_study(content | {"group": [group], "rule": rules} | changes)


def test_a_killed_study_resumes_and_becomes_a_page(tmp_path, texts, monkeypatch, one_thread):
    monkeypatch.setattr(language_module, "cache_directory", lambda: tmp_path / "cache")
    study, steps = study_of(texts), []
    end = StepClock.on_step_end

    def killed_in_the_fourth_run(self, args, state, control, **more):
        end(self, args, state, control, **more)
        steps.append(state.global_step)
        if len(steps) == 3 * 2 + 7:
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(StepClock, "on_step_end", killed_in_the_fourth_run)
        run_study(study, tmp_path, workers=InThisProcess())
    assert [run.status for run in read_records(tmp_path / NAME)].count("done") == 3
    with pytest.raises(ValueError, match="the rule of 'language' was another one"):
        run_study(replace(study, rules=study.rules[:1]), tmp_path, workers=InThisProcess())
    workers = InThisProcess()
    state = run_study(study, tmp_path, workers=workers)
    assert (state.done, state.waiting, len(workers.jobs)) == (state.total, 0, state.total - 3)
    records = read_records(tmp_path / NAME)
    (resumed,) = [run for run in records if run.attempts == 2]
    assert resumed.score == train(Spec.from_dict(resumed.spec)).score
    write_packaged(tmp_path / NAME, tmp_path / "records.csv")
    generator.write(read_records(tmp_path / "language.csv"), tmp_path / "language.md")
    text = (tmp_path / "language.md").read_text()
    answer = text.split("\n\n")[1]
    assert re.search(r"softmax: cog \d\.\d{3} (better|worse) \(difference [+-]", answer), answer
    assert "; softpick " in answer and "Not measured yet: softmax1 at 1M" in answer
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (tmp_path / picture).read_text().startswith("<svg")
    for name in MECHANISMS:
        (row,) = re.findall(rf"^\| {name} \|.*$", text, re.MULTILINE)
        mine = [run.score for run in records if run.mechanism == name and not run.swept]
        assert f"| {sum(mine) / len(mine):.3f} |" in row and "| 2 |" in row
    assert text.index(answer) < text.index(picture) < text.index("| cog |") < text.index("## Methods")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a.txt": b""}, "is empty"),
        ({"a.txt": b"text", "b.bin": b"\0\1\2"}, "'b.bin' of the corpus is binary"),
        (
            {f"{n}.txt": b"a document has few lines of text\n" * 2 for n in range(30)},
            "the longest test needs",
        ),
    ],
)
def test_a_corpus_that_cannot_be_used_ends_the_study_before_its_runs(tmp_path, monkeypatch, files, problem):
    monkeypatch.setattr(language_module, "cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    workers = InThisProcess()
    with pytest.raises(ValueError, match=problem):
        run_study(study_of(tmp_path / "texts"), tmp_path, workers=workers)
    assert not workers.jobs and {run.status for run in read_records(tmp_path / NAME)} == {"waiting"}


def test_models_that_do_not_fit_in_memory_end_the_study_before_its_runs(tmp_path, texts, monkeypatch):
    study = study_of(texts)
    needed = spec.memory_of(next(study.runs()).spec)
    monkeypatch.setattr(spec, "_free", lambda: needed + needed // 2)
    with pytest.raises(ValueError, match="2 runs at a time need about .* fewer workers"):
        run_study(study, tmp_path, workers=2)
    assert {run.status for run in read_records(tmp_path / NAME)} == {"waiting"}
    monkeypatch.setattr(spec, "_free", lambda: needed - 1)
    with pytest.raises(ValueError, match="this run needs about 0.0 GiB, and 0.0 GiB are free; make 'batch'"):
        train(next(study.runs()).spec)


def test_a_page_without_records_has_the_rules_only():
    text = generator.page([])
    assert "No run is on record" in text and "![" not in text and "first_token" in text
