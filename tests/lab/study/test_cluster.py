"""Ray, for real: a cluster of this machine, a worker or a node killed in mid-run, a driver killed and started
again."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unsoft
from tests.conftest import HANG
from unsoft.lab.study import read_records
from unsoft.lab.study.store import NAME

pytest.importorskip("ray", reason="ray is not installed (extra cluster)")

TOML = """
seeds = 1
[[group]]
controls = false
task = "copy"
knobs = {length = 3, vocabulary = 4}
settings = {steps = 200, batch = 4, width = 16, heads = 1, warmup = 5}
mechanisms = ["softmax"]
"""


def saved(out: Path) -> int:
    """How many steps all complete checkpoints are from their beginning."""
    found = out.glob("runs/*/checkpoints/checkpoint-*/complete.json")
    return sum(int(path.parent.name.split("-")[1]) for path in found)


def workers_of(parent: int) -> set[int]:
    """Processes below it that are training now: Ray gives them the name of what they do."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(words[1])
    family = {parent}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    found = set()
    for process in family:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::perform"):
                found.add(process)
    return found


@pytest.mark.slow
def test_a_cluster_survives_deaths(tmp_path):
    """A worker is killed, whose run is given again; then the driver, which is started again."""
    (tmp_path / "small.toml").write_text(TOML)
    out = tmp_path / "out"
    line = [sys.executable, "-m", "unsoft.cli", "study", str(tmp_path / "small.toml"), "--out", str(out)]
    line += ["--ray", "local"]
    here = str(Path(unsoft.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": here,
        "RAY_worker_niceness": "0",
    }  # else other tests starve them
    driver = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    while saved(out) == 0 and driver.poll() is None:
        time.sleep(0.05)
    killed = workers_of(driver.pid)
    for process in killed:
        os.kill(process, signal.SIGKILL)
    assert driver.poll() is None, driver.communicate()[1]
    assert killed
    while not any(record.status == "done" for record in there(out)) and driver.poll() is None:
        time.sleep(0.2)
    driver.kill()
    _, errors = driver.communicate(timeout=HANG)
    before = {record.key for record in there(out) if record.status == "done"}
    assert before and any(record.attempts > 1 for record in there(out)), errors
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    records = read_records(out / NAME)
    assert [record.status for record in records] == ["done"] * 3 and all(record.score for record in records)
    assert all(len(record.losses) == 100 for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("mine", [True, False], ids=["node of the command", "other node"])
def test_runs_of_a_lost_node_are_run_on_another(tmp_path, mine):
    """A raylet and its workers are killed at once, as a power cut does."""
    from ray.cluster_utils import Cluster

    (tmp_path / "small.toml").write_text(TOML)
    out = tmp_path / "out"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        node = (cluster.head_node if mine else other).all_processes["raylet"][0].process.pid
        line = [sys.executable, "-m", "unsoft.cli", "study", str(tmp_path / "small.toml"), "--out", str(out)]
        environment = os.environ | {
            "PYTHONPATH": str(Path(unsoft.__file__).parents[1]),
            "RAY_worker_niceness": "0",
        }
        driver = subprocess.Popen(
            [*line, "--ray", cluster.address], env=environment, stderr=subprocess.PIPE, text=True
        )
        while not (saved(out) and workers_of(node)) and driver.poll() is None:
            time.sleep(0.05)
        for process in (node, *workers_of(node)):
            os.kill(process, signal.SIGKILL)
        _, errors = driver.communicate(timeout=HANG)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0, errors
    records = read_records(out / NAME)
    assert [record.status for record in records] == ["done"] * 3, errors
    assert any(record.attempts > 1 for record in records)


def there(out: Path):
    return read_records(out / NAME) if (out / NAME).exists() else []


def test_no_cluster_is_one_line(monkeypatch):
    """Without one running; the address of this machine, on a port where nothing listens."""
    from unsoft.lab.study.cluster import RayWorkers

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        ValueError, match="there is no Ray cluster at 'auto' .*--ray local needs none"
    ) as found:
        RayWorkers("auto", 1, 0)
    assert "\n" not in str(found.value)


def test_without_ray_it_says_what_to_install(monkeypatch):
    from unsoft.lab.study.cluster import RayWorkers

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'unsoft\[cluster\]'"):
        RayWorkers("auto", 1, 0)
