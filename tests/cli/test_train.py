"""``unsoft train`` as a user runs it: killed, out of disk, wrongly called."""

import errno
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import unsoft
from unsoft.lab.training.trainer import Batches

pytestmark = pytest.mark.usefixtures("one_thread", "few_examples")
TINY = (
    "train",
    "copy",
    "--set",
    "length=3",
    "--set",
    "vocabulary=4",
    "--width",
    "16",
    "--heads",
    "1",
    "--batch",
    "4",
)


def weights(folder):
    return unsoft.hf.load(folder / "model").state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_run_goes_on_to_the_same_weights(run_here, command, environment, tmp_path, monkeypatch):
    """SIGKILL of a process in the middle, then SIGTERM, then to the end; in another folder never stopped."""
    steps = [*TINY, "--steps", "120", "--save-every", "20", "--eval-every", "120"]
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [*command, *steps, "--out", str(folder)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while newest(folder) == 0 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    assert 0 < newest(folder) < 120

    draw = Batches.__getitem__

    def draw_and_stop(self, index):
        if self.training and index == 110:
            signal.raise_signal(signal.SIGTERM)
        return draw(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "__getitem__", draw_and_stop)
        stopped = run_here(*steps, "--out", str(folder))
    assert stopped.returncode == 130 and newest(folder) == 110
    assert "rerun the same command to resume" in stopped.stderr.splitlines()[-1]
    assert "Traceback" not in stopped.stderr
    for name in ("run", "whole"):
        done = run_here(*steps, "--out", str(tmp_path / name), "--json")
        assert json.loads(done.stdout)["steps"] == 120
    assert_equal(weights(folder), weights(tmp_path / "whole"))


def newest(folder) -> int:
    """Return the step of the newest complete checkpoint, 0 if there is none."""
    complete = folder.glob("checkpoints/checkpoint-*/complete.json")
    return max((int(path.parent.name.split("-")[1]) for path in complete), default=0)


@pytest.fixture
def small_files():
    """No file may grow over 16 KiB meanwhile, which weights do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_line(run_here, tmp_path, small_files):
    done = run_here(*TINY, "--steps", "3", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("unsoft:")]
    assert "step 1 cannot be written" in last and "Traceback" not in done.stderr
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_disk_that_is_full_in_the_end_is_one_line_and_the_run_can_end_later(run_here, tmp_path):
    """The checkpoint is written, the model is not: that takes the same room again."""
    line = (*TINY, "--steps", "3", "--save-every", "3", "--out", str(tmp_path / "run"))
    save = PreTrainedModel.save_pretrained

    def save_checkpoints_only(model, folder, **options):
        if Path(folder).name.startswith(".model"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(model, folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", save_checkpoints_only)
        done = run_here(*line)
    assert done.returncode == 1
    (last,) = [one for one in done.stderr.splitlines() if one.startswith("unsoft:")]
    assert "No space left on device; its last checkpoint is kept" in last and "Traceback" not in done.stderr
    assert newest(tmp_path / "run") == 3 and not (tmp_path / "run/result.json").exists()
    assert run_here(*line).returncode == 0 and (tmp_path / "run/model").is_dir()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["cpoy"], "did you mean 'copy'"),
        (["copy", "cogg"], "cogg"),
        (["copy", "--set", "length"], "not NAME=VALUE"),
        (["copy", "--set", "length=0"], "'length' must be a whole number of at least 1, not 0"),
        (["recall", "--set", "length=14"], "length of at least 16, not 14"),
        (["text", "--text", "/no/such.txt"], "'/no/such.txt' cannot be read"),
        (["copy", "--text", "/no/such.txt"], "'--text': copy reads no file; the task text does"),
        (["copy", ""], "the text is empty"),
        (["copy", "--alpha", "0.3"], "'--alpha': it is the strength of --repulse, which is not given"),
        (["copy", "--option", "where=mass"], "'softmax' has no option 'where'"),
        (["copy", "--steps", "0"], "'steps' must be a whole number of at least 1"),
        (["copy", "--steps", "99999999999999999999"], "'steps' must be less than 2**32"),
        (["census", "--width", "16"], "census has 20 features, so 'width' must be at least that, not 16"),
        (["copy", "--init-from", "/no/such/model"], "model"),
        (["copy", "cog", "--option", "strength=2"], "strength"),
        (["copy", "--repulse", "svg"], "'svgd', 'spos' or 'repel'"),
    ],
)
def test_what_cannot_be_run_is_one_line(run_here, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    done = run_here("train", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and problem in done.stderr


def test_softmax_is_trained_beside_a_mechanism(run_here, tmp_path):
    done = run_here(*TINY, "cog", "--steps", "3", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout.splitlines()[-1] and (tmp_path / "run" / "baseline").is_dir()
    alone = run_here(*TINY, "--steps", "3", "--json", "--out", str(tmp_path / "softmax"))
    both = run_here(*TINY, "cog", "--steps", "3", "--json", "--out", str(tmp_path / "run"))
    assert json.loads(both.stdout)["baseline"]["score"] == json.loads(alone.stdout)["score"]
    assert "baseline" not in json.loads(alone.stdout)
    done = run_here(*TINY, "cog", "--steps", "3", "--no-baseline", "--out", str(tmp_path / "one"))
    assert "baseline" not in done.stdout and not (tmp_path / "one" / "baseline").exists()


def test_divergence_is_one_line(run_here, tmp_path):
    done = run_here(*TINY, "--steps", "9", "--warmup", "0", "--lr", "1e30", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("unsoft: train: the loss is") and "smaller learning rate" in last


def test_what_is_printed(run_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("magnitude+softmax", "--heads", "2", "--repulse", "repel", "--alpha", "0.2")
    done = run_here(*TINY, "--steps", "2", "--no-baseline", *more)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines[0].startswith("accuracy 0.")
        and "chance 0.250" in lines[0]
        and "known solution 1.000" in lines[0]
    )
    assert "  length 6: 0." in done.stdout and "learned" in done.stdout
    assert "  first token: 0." in done.stdout
    assert lines[-1].endswith("in runs/copy-magnitude+softmax-0")
    assert "step 2 of 2, loss" in done.stderr
