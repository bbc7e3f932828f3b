"""``unsoft study`` as a user runs it: with real workers, killed and started again, and wrongly called."""

import json
import signal
import subprocess
import time
from pathlib import Path
from statistics import fmean

import pytest

from tests.lab.study.made_up import MadeUpWorkers, result
from unsoft.cli.study_output import study_record
from unsoft.lab.study import read_records, read_study, run_study
from unsoft.lab.study.store import NAME

TOML = """
seeds = 2
[[group]]
controls = false
task = "TASK"
knobs = {KNOBS}
settings = {steps = STEPS, batch = 4, width = 16, heads = 1, warmup = 5}
mechanisms = ["softmax"]
"""
RULE = """
[[rule]]
mechanism = "cog"
over = "softmax"
margin = 0.1
"""


@pytest.fixture
def spec(tmp_path):
    def spec(steps, task="copy", knobs="length = 3, vocabulary = 4"):
        text = TOML.replace("STEPS", str(steps)).replace("TASK", task).replace("KNOBS", knobs)
        (tmp_path / "small.toml").write_text(text)
        return str(tmp_path / "small.toml")

    return spec


def test_study_alone_is_help(run_here):
    done = run_here("study")
    assert done.returncode == 0 and done.stderr == "" and "  status  Show how far" in done.stdout


def test_a_study_with_real_workers(run_here, spec, tmp_path):
    """It runs through, is shown, exported, and not run again."""
    out = str(tmp_path / "out")
    # Unlike copying, this task is scored at one length only, which is faster.
    path = spec(5, task="memorisation", knobs="length = 4, keys = 4, values = 4")
    done = run_here("study", path, "--out", out, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "small: 4 of 4, memorisation softmax seed 1 lr=" in done.stderr and "\x1b" not in done.stderr
    assert [line.endswith(" left") for line in done.stderr.splitlines()] == [True, True, True, False]
    assert "memorisation: accuracy, higher is better; chance 0.250" in done.stdout
    assert "swept on the first seeds" in done.stdout and "verdict" not in done.stdout
    records = read_records(tmp_path / "out" / NAME)
    assert [record.status for record in records] == ["done"] * 4
    assert all(
        record.steps == 5 and record.parameters and record.machine and record.versions for record in records
    )
    assert all(len(record.curve) == 5 and record.curve[-1][1] == record.validation for record in records)
    assert list((tmp_path / "out" / "runs").iterdir()) == []
    again = run_here("study", "run", path, "--out", out, "--workers", "1")
    assert again.returncode == 0 and again.stderr == "" and again.stdout == done.stdout
    shown = run_here("study", "status", out)
    assert done.stdout in shown.stdout and "small" in shown.stdout
    written = run_here("study", "export", out, "--to", str(tmp_path / "runs.csv"))
    assert written.stdout == f"{tmp_path / 'runs.csv'}: 4 runs\n"
    assert [record.score for record in read_records(tmp_path / "runs.csv")] == [r.score for r in records]
    (told,) = json.loads(run_here("study", path, "--out", out, "--workers", "1", "--json").stdout)
    assert told["study"] == "small" and "verdict" not in told
    (row,) = told["results"]
    assert (row["mechanism"], row["seeds"]) == ("softmax", 2) and row["difference"] is None
    assert row["mean"] == pytest.approx(fmean(r.score for r in records if r.point == row["point"]))


def test_status_says_by_what_rates_were_chosen_and_that_the_best_lies_at_the_edge(run_here, spec, tmp_path):
    """The largest rate is the best on longer examples, by which this study chooses; without a rule, too."""
    path = Path(spec(5))
    path.write_text(path.read_text() + 'choose_on = "length=6"\n')

    def answer(job):
        longer = {"value": 6, "score": 0.5, "validation": job["spec"]["lr"]}
        return result(job, score=0.5, score_by=[longer])

    run_study(read_study(path), tmp_path / "out", workers=MadeUpWorkers(answer))
    shown = run_here("study", "status", str(tmp_path / "out")).stdout
    assert "0.01 (largest tried)" in shown and "the largest rate tried was the best for softmax" in shown
    assert "the best by validation with length=6 run on all" in " ".join(shown.split())


@pytest.mark.parametrize(
    "softmax, cog, wanted",
    [
        (0.5, 0.8, "supported"),
        (0.5, 0.4, "not supported"),
        (0.95, 1.0, "at ceiling"),
    ],
)
def test_a_verdict_is_the_last_line_and_in_the_json(run_here, spec, tmp_path, softmax, cog, wanted):
    path = Path(spec(5))
    text = path.read_text().replace('["softmax"]', '["softmax", "cog"]').replace("seeds = 2", "seeds = 3")
    path.write_text(text + RULE)

    def answer(job):
        return result(job, score=cog if job["spec"]["mechanism"] == "cog" else softmax)

    out = tmp_path / "out"
    run_study(read_study(path), out, workers=MadeUpWorkers(answer))
    lines = run_here("study", "status", str(out)).stdout.splitlines()
    assert lines[-1].startswith(f"verdict: {wanted}: cog ")
    assert "rule: copy: cog must beat softmax by 0.1 on the test" in lines
    told = study_record(out, "small")
    assert told["verdict"] == wanted and f"found: {told['why']}" in lines


def test_a_rule_that_cannot_pass_ends_before_anything_is_written(run_here, spec, tmp_path):
    path = Path(spec(5))
    text = path.read_text().replace('["softmax"]', '["softmax", "cog"]')
    path.write_text(text + RULE.replace("0.1", "2"))
    done = run_here("study", str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and not (tmp_path / "out" / NAME).exists()
    assert "a rule with margin 2 cannot pass: accuracy goes from 0 to 1" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_and_kill_lose_nothing(command, environment, run_here, spec, tmp_path):
    """Ctrl-C cuts a run, which saves itself; SIGKILL of the driver takes its workers along."""
    out = tmp_path / "out"
    line = [*command, "study", spec(100), "--out", str(out), "--workers", "1"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            line, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        before = saved(out)
        while saved(out) <= before and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        if number == signal.SIGINT:
            assert "of 4 runs of small are done; rerun the same command to resume" in errors.splitlines()[-1]
            assert "Traceback" not in errors
            assert "cut" in {record.status for record in read_records(out / NAME)}
    done = run_here("study", spec(100), "--out", str(out), "--workers", "1")
    assert done.returncode == 0, done.stderr
    records = read_records(out / NAME)
    assert [record.status for record in records] == ["done"] * 4
    resumed = [record for record in records if record.attempts > 1]
    assert resumed and all(record.seconds_per_step is None for record in resumed)
    assert all(len(record.losses) == 100 for record in records)


def saved(out) -> int:
    """How many steps all complete checkpoints are from their beginning."""
    seals = out.glob("runs/*/checkpoints/checkpoint-*/complete.json")
    return sum(int(path.parent.name.split("-")[1]) for path in seals)


@pytest.mark.parametrize(
    "line, problem",
    [
        (["nothing.toml"], "'nothing.toml' cannot be read: No such file or directory"),
        (["nonsense"], "there is no default study 'nonsense'"),
        (["sensus", "cog"], "sensus"),
        (["census", "kog"], "kog"),
        (["census", "--seeds", "3"], "a written study is run as it is"),
        (["census", "cog", "--seeds", "0"], "'seeds' must be at least 1, not 0"),
        (
            ["census", "cog", "--seeds", "99999999999999999999"],
            "'seeds' must be at most 10000, not 99999999999999999999",
        ),
        (
            ["census", "cog", "--lrs", "0.1"],
            "at least 3 learning rates, and 1 is given",
        ),
        (["census", "cog", "--lrs", "a"], "'a' is not a list of numbers"),
        (["census", "cog", "--set", "stepz=3"], "stepz"),
        (["--out", "o"], "give a TOML file, a built-in study (--list), or tasks and mechanisms"),
        (["status", "nowhere"], "there is no store 'nowhere/study.db'"),
        (["export", "nowhere", "--to", "runs.csv"], "there is no store 'nowhere/study.db'"),
        (["report", "nowhere"], "there is no store 'nowhere/study.db'"),
    ],
)
def test_what_is_wrong_is_one_line(run_here, tmp_path, monkeypatch, line, problem):
    monkeypatch.chdir(tmp_path)
    done = run_here("study", *line)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert problem in done.stderr and done.stderr.startswith("unsoft: ")
    assert list(tmp_path.iterdir()) == []


def test_the_studies_that_come_with_it(run_here):
    done = run_here("study", "--list")
    assert done.returncode == 0 and "Rosić 2026" in done.stdout
    told = json.loads(run_here("study", "--list", "--json").stdout)
    assert "census" in {one["name"] for one in told} and all(one["runs"] > 0 for one in told)


def test_files_that_were_written_as_json(run_here, made_up, spec, tmp_path):
    made_up(lambda job: result(job, score=0.5))
    out = tmp_path / "out"
    run_here("study", spec(5), "--out", str(out))
    line = ("study", "export", str(out), "--to", str(tmp_path / "runs.csv"), "--json")
    assert json.loads(run_here(*line).stdout) == {"file": str(tmp_path / "runs.csv"), "runs": 4}
    told = json.loads(run_here("study", "report", str(out), "--json").stdout)
    assert Path(told["page"]).is_file() and Path(told["data"]).is_dir()
    assert told["charts"] == len(list(Path(told["figures"]).glob("*.png")))


@pytest.fixture
def made_up(monkeypatch):
    """Workers that answer at once instead of training."""

    def made_up(answer):
        workers = MadeUpWorkers(answer)
        monkeypatch.setattr("unsoft.cli.commands.study._workers_of", lambda *options: workers)
        return workers

    return made_up


def test_a_study_from_options(run_here, made_up, tmp_path):
    workers = made_up(lambda job: result(job, score=0.5))
    line = ["copy", "cog", "sinh", "--seeds", "2", "--lrs", "0.1,0.2,0.3"]
    line += ["--set", "steps=7", "--set", "length=5", "--out", str(tmp_path / "out")]
    done = run_here("study", *line)
    assert done.returncode == 0, done.stderr
    specs = [job["spec"] for job in workers.jobs]
    assert {(spec["steps"], spec["knobs"]["length"]) for spec in specs} == {(7, 5)}
    assert {spec["lr"] for spec in specs} == {0.1, 0.2, 0.3} and {spec["seed"] for spec in specs} == {0, 1}
    shown = ["cog", "sinh", "softmax", "softmax1", "gated+softmax", "softmax ×2 heads", "softmax ×2 layers"]
    assert all(label in done.stdout for label in shown) and len(specs) == 7 * 4
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("verdict: cog is not clearly different from softmax") and "; sinh is" in verdict
    bare = run_here("study", *line[:-1], str(tmp_path / "bare"), "--no-controls")
    assert "softmax1" not in bare.stdout and bare.returncode == 0


def test_an_interrupted_study_says_how_to_go_on(run_here, made_up, spec, tmp_path):
    def answer(job):
        signal.raise_signal(signal.SIGINT)
        return result(job, score=0.5)

    made_up(answer)
    done = run_here("study", spec(5), "--out", str(tmp_path / "out"))
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == (
        "unsoft: interrupted; 1 of 4 runs of small are done. Rerun the same command to resume"
    )


def test_a_study_whose_runs_fail_exits_with_1_also_when_it_is_run_again(run_here, made_up, spec, tmp_path):
    """The last line says how many failed, why and what to do; --retry runs them again."""
    line = ("study", spec(5), "--out", str(tmp_path / "out"))
    answers = iter([result({}, score=0.5)])
    failed = {"status": "failed", "error": "ValueError: no", "wall": 0.0}
    workers = made_up(lambda job: next(answers, failed))
    for _ in range(2):
        done = run_here(*line)
        assert done.returncode == 1 and len(workers.jobs) == 4
        assert done.stderr.splitlines()[-1] == (
            f"unsoft: 3 of 4 runs of small failed (ValueError: no); unsoft study status"
            f" {tmp_path / 'out'} lists them. Fix the cause, then run the same command with --retry"
        )
    told = run_here(*line, "--json")
    assert told.returncode == 1 and json.loads(told.stdout)[0]["study"] == "small"
    shown = run_here("study", "status", str(tmp_path / "out"))
    assert shown.returncode == 0 and "small: copy softmax seed 0 lr=0.003: ValueError: no" in shown.stderr
    made_up(lambda job: result(job, score=0.5))
    assert run_here(*line, "--retry").returncode == 0


def test_a_file_is_run_as_it_is_written(run_here, spec):
    done = run_here("study", spec(5), "--seeds", "3")
    assert done.returncode == 2 and "a written study is run as it is" in done.stderr
