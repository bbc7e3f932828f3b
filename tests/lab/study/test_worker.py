"""Workers: what they say of a run that cannot be made, of code that is not theirs, and tasks of users."""

import importlib

from unsoft.lab.study.driver import key_of
from unsoft.lab.study.worker import code_digest, perform, plugin_digest
from unsoft.lab.training import Spec

TINY = {
    "task": "copy",
    "knobs": {"length": 3, "vocabulary": 4},
    "width": 16,
    "heads": 1,
    "steps": 4,
    "batch": 4,
}
PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

import unsoft
from unsoft.lab.tasks.sequences import Copy


@unsoft.lab.tasks.register
@dataclass(frozen=True, kw_only=True)
class Mine(Copy):
    name: ClassVar[str] = "copy-of-a-user"
"""


def job(folder, **changes):
    spec = Spec(**TINY).filled().to_dict()
    known = {"spec": spec, "folder": str(folder), "threads": 1, "code": code_digest(), "plugin": ""}
    return known | changes


def test_a_run_is_trained_and_told(tmp_path, one_thread):
    found = perform(job(tmp_path / "run"))
    assert (
        found["status"] == "done" and found["result"]["steps"] == 4 and found["wall"] > 0 and found["machine"]
    )
    again = perform(job(tmp_path / "run"))  # a driver that died before it wrote the result asks again
    assert again["result"] == found["result"]


def test_what_cannot_be_made_is_told(tmp_path):
    found = perform(job(tmp_path / "run", spec={**job("")["spec"], "task": "kopy"}))
    assert (
        found["status"] == "failed" and found["error"].startswith("ValueError: ") and "kopy" in found["error"]
    )
    found = perform(job(tmp_path / "run", code="of another machine"))
    assert "another version of unsoft" in found["error"] and not (tmp_path / "run").exists()


def test_tasks_of_users(tmp_path, monkeypatch, one_thread):
    registry = importlib.import_module("unsoft.lab.tasks.task")
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    spec = {**job("")["spec"], "task": "copy-of-a-user"}
    found = perform(job(tmp_path / "run", spec=spec, plugin=str(path), code=code_digest(str(path))))
    assert found["status"] == "done", found
    before = key_of(spec, str(path))
    plugin_digest.cache_clear()
    path.write_text(PLUGIN + "# changed")
    assert key_of(spec, str(path)) != before != key_of(spec)
