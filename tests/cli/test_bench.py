"""``unsoft bench`` as a user runs it: a small case, a missing compiler, an interruption."""

import json
import signal
import subprocess

from benchmarks.targets import bars
from tests.conftest import HANG
from unsoft.engines.native import availability
from unsoft.lab.bench import fresh_process, machine, plan
from unsoft.lab.bench.fresh_process import Startup
from unsoft.lab.bench.plan import BenchStep
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import Workload

SDPA = Timing(Workload("decode", 1, 8), "sdpa", "softmax", 1e-7, 5, 0.001, 1.0)


def test_a_small_run_prints_and_keeps_its_figures(run_here, tmp_path):
    out = tmp_path / "small.json"
    done = run_here("bench", "--quick", "--only", "short", "cog", "--to", str(out))
    assert done.returncode == 0, done.stderr
    assert "special shapes" in done.stdout and "cog" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr, "no colours and no progress bar off a terminal"
    kept = json.loads(out.read_text())
    assert kept["finished"] is True and kept["level"] == "quick"
    assert kept["machine"] and kept["threads"] >= 1 and kept["seed"]
    assert {"unsoft", "torch", "python", "compiler", "x-transformers"} <= set(kept["versions"])
    own = [row for row in kept["timings"] if row["engine"] == "native"]
    assert [(row["queries"], row["keys"]) for row in own] == [(1, 4096), (16, 4096), (64, 4096)]
    assert all(row["ratio"] > 0 and row["rounds"] >= 5 and row["error"] < 1e-5 for row in own)
    measured = {bar["what"]: bar["measured"] for bar in bars(kept) if bar["measured"] is not None}
    assert measured == {"native: short queries, slowest": max(row["ratio"] for row in own)}


def test_without_a_compiler_the_rest_is_measured(run_here, monkeypatch):
    monkeypatch.setattr(availability, "ready", lambda formula, double: False)
    monkeypatch.setattr(machine, "load", lambda: None)
    monkeypatch.setattr(fresh_process, "measure_import", lambda runs: [Startup("import unsoft", 0.5, runs)])
    done = run_here("bench", "--quick", "--only", "startup")
    assert done.returncode == 0
    assert done.stderr == "[1/1] import time\n"
    assert "import unsoft" in done.stdout and "cold compile" not in done.stdout


def test_a_wrong_result_is_an_error(run_here, monkeypatch):
    wrong = Timing(Workload("decode", 1, 8), "native", "cog", error=0.5)
    monkeypatch.setattr(
        plan, "steps", lambda level, mechanisms: [BenchStep("decode", "decode", lambda: [SDPA, wrong])]
    )
    monkeypatch.setattr(machine, "load", lambda: 99.0)
    done = run_here("bench")
    assert done.returncode == 1
    assert "busy (load 99.0" in done.stderr
    assert "wrong: cog" in done.stdout and "some results are wrong" in done.stderr


def test_an_interrupted_run_keeps_what_is_done(command, environment, tmp_path):
    out = tmp_path / "part.json"
    arguments = [
        "bench",
        "--quick",
        "--only",
        "short",
        "--only",
        "small",
        "cog",
        "--to",
        str(out),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *arguments],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        # The background jobs of a shell ignore this signal, and so would ours.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        for line in process.stderr:
            if "short, forward, 64" in line:
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr and "interrupted" in stderr
    kept = json.loads(out.read_text())
    assert kept["finished"] is False
    assert {1, 16} <= {row["queries"] for row in kept["timings"]}
    assert "1 x 4096" in stdout
    assert [file.name for file in tmp_path.glob(".part.json*")] == []
