"""Progress of a run: a bar in a terminal, lines elsewhere."""

import io
import json

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from unsoft.lab.training.callbacks import ShowProgress, WriteLog, records


@pytest.fixture
def state():
    history = [
        {"loss": 2.5, "epoch": 0.1, "step": 3},
        {"eval_score": 0.75, "step": 3},
        {"total_flos": 1.0, "step": 9},
    ]
    return TrainerState(max_steps=9, global_step=3, log_history=history)


@pytest.mark.parametrize("terminal", [True, False])
def test_loss_and_score_are_shown(state, terminal, monkeypatch):
    """A bar only where both outputs are a terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    shown = ShowProgress("copy [cog]", "accuracy")
    written = io.StringIO()
    shown.console = Console(file=written, force_terminal=terminal, width=120, markup=False, highlight=False)
    shown.on_train_begin(None, state, TrainerControl())
    for logs in ({"loss": 2.5}, {"eval_score": 0.75}):
        shown.on_log(None, state, TrainerControl(), logs)
    state.global_step = 4
    shown.on_step_end(None, state, TrainerControl())
    shown.print("checkpoint-2 is not complete and was removed")
    shown.close()
    text = written.getvalue()
    assert "copy [cog]" in text and "loss 2.5000" in text and "accuracy 0.7500" in text
    assert ("4/9" in text) is terminal
    assert "step 3 of 9" in text or terminal
    assert "checkpoint-2 is not complete" in text


def test_a_narrow_window_cuts_no_number(state, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = ShowProgress("noisy-recall magnitude+softmax", "accuracy")
    written = io.StringIO()
    shown.console = Console(file=written, force_terminal=True, width=40, markup=False, highlight=False)
    shown.on_train_begin(None, state, TrainerControl())
    shown.on_log(None, state, TrainerControl(), {"loss": 2.5, "eval_score": 0.75})
    shown.close()
    last = written.getvalue().rpartition("\x1b[2K")[2]
    assert "3/9" in last and "0.7500" in written.getvalue() and "…" not in last


def test_the_log_has_what_matters(state, tmp_path):
    expected = [{"step": 3, "loss": 2.5}, {"step": 3, "eval_score": 0.75}]
    assert records(state) == expected
    for _ in range(2):
        WriteLog(tmp_path / "log.jsonl").on_log(None, state, TrainerControl())
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == expected
