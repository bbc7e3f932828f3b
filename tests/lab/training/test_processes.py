"""Several processes that train one model, as ``torchrun`` starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unsoft
from tests.conftest import HANG
from unsoft.lab.tasks import task
from unsoft.lab.training import Spec, train
from unsoft.lab.training.callbacks import (
    any_set,
    check_trackers,
    is_first_process,
    join_processes,
    process_count,
    tracked,
    wait_for_processes,
)
from unsoft.lab.training.trainer import Batches

# fuzzy-recall has another number of answers in every example, so pieces of a batch weigh differently
ARGUMENTS = (
    "train fuzzy-recall --width 16 --heads 1 --layers 1 --batch 5 --steps 8 --eval-every 8 --save-every 4"
)


def test_pieces_make_up_the_batch():
    made = task("copy", length=3, vocabulary=4)
    whole, pieces = (
        Batches(made, 16, count=3, size=5, seed=0, training=True, pieces=count) for count in (1, 2)
    )
    assert len(whole) == 3 and len(pieces) == 6
    for number in range(3):
        ids = [pieces[2 * number + rank]["input_ids"] for rank in (0, 1)]
        assert [len(one) for one in ids] == [3, 2]
        together = torch.empty_like(whole[number]["input_ids"])
        together[0::2], together[1::2] = ids
        assert torch.equal(together, whole[number]["input_ids"])


def test_alone_there_is_nothing_to_share(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert process_count() == 1 and is_first_process() and any_set(True)
    join_processes()
    wait_for_processes()
    with pytest.raises(ValueError, match="start them with torchrun"):
        train(Spec(task="copy"), fsdp=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without a GPU")
def test_fsdp_is_refused_where_it_would_be_ddp(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="accelerate silently falls back to DDP on CPUs"):
        train(Spec(task="copy"), fsdp=True)


def test_a_batch_that_is_too_small_to_share_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="a batch of 3 cannot be shared by 4 processes"):
        train(Spec(task="copy", batch=3))


def test_trackers_that_are_not_there_are_named():
    with pytest.raises(ValueError, match="knows no tracker 'tensorbord'; it knows .*tensorboard"):
        check_trackers(["tensorbord"])
    with pytest.raises(
        ValueError, match="the tracker 'comet_ml' needs a package that is not here; pip install"
    ):
        check_trackers(["comet_ml"])


def test_files_of_tensorboard_stay_when_checkpoints_go(tmp_path):
    pytest.importorskip("tensorboard")
    tiny = {"task": "copy", "knobs": {"length": 2}, "width": 16, "steps": 2, "batch": 2}
    train(Spec(**tiny), out=tmp_path / "run", report_to=["tensorboard"])
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_tensorboard_without_a_folder_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="TensorBoard's files need a folder; give argument 'out'"):
        tracked(["tensorboard"], None).__enter__()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    with tracked(["tensorboard"], None):
        assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path), "the user's own choice stands"


def run(count: int, out: Path) -> subprocess.CompletedProcess:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    command = [sys.executable, *start, "-m", "unsoft.cli", *ARGUMENTS.split(), "--out", str(out)]
    source = str(Path(unsoft.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    """At an equal batch, whose pieces have unequal numbers of answers: losses to 6 digits, weights within
    2e-5."""
    alone, together = run(1, tmp_path / "one"), run(2, tmp_path / "two")
    assert alone.returncode == 0 and together.returncode == 0, together.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    first, second = ([x["loss"] for x in result["history"] if "loss" in x] for result in results)
    assert second == pytest.approx(first, rel=1e-5) and len(first) == 8
    assert first[-1] != first[0]
    models = [unsoft.hf.load(tmp_path / name / "model").state_dict() for name in ("one", "two")]
    assert models[0].keys() == models[1].keys()
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=0, atol=2e-5)
    lines = [line for line in together.stdout.splitlines() if line.startswith("accuracy")]
    assert len(lines) == 1  # the first process prints, the other does not
    assert together.stderr.count("step 8 of 8") == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "two/log.jsonl").read_text().splitlines()]
    assert steps == [x["step"] for x in results[1]["history"]]
