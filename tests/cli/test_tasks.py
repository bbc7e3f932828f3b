"""``unsoft tasks``."""

import json

from unsoft.lab.tasks import tasks

OWN = """
from dataclasses import dataclass
from typing import ClassVar

import unsoft
from unsoft.lab.tasks.sequences import Copy


@unsoft.lab.tasks.register
@dataclass(frozen=True, kw_only=True)
class Echo(Copy):
    name: ClassVar[str] = "echo-of-a-user"
    tells: ClassVar[str] = "nothing in particular"
"""


def test_every_task_is_listed(run_here):
    done = run_here("tasks")
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in tasks())


def test_json_has_everything(run_here):
    records = {record["name"]: record for record in json.loads(run_here("tasks", "--json").stdout)}
    assert set(records) == set(tasks())
    assert records["census"]["difficulty"] == "repeats"
    assert records["census"]["tested_at"] == [1, 2, 4, 8, 16, 64, 512]
    assert records["recall"]["knobs"]["pairs"] == 4 and records["recall"]["setup"]["layers"] == 2
    assert all(record["tells"] and record["metric"] for record in records.values())


def test_a_users_own_task_comes_from_a_file(run, run_here, tmp_path):
    file = tmp_path / "own_tasks.py"
    file.write_text(OWN)
    done = run("tasks", "--json", "--plugin", str(file))
    assert "echo-of-a-user" in [record["name"] for record in json.loads(done.stdout)]
    done = run_here("tasks", "--plugin", str(tmp_path / "none.py"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "none.py" in done.stderr
