"""lm-evaluation-harness on swapped folders: its log-likelihoods are the model's, or its error names why."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import unsoft
from tests.conftest import HANG

ROOT = Path(__file__).parents[2]
pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[eval]'")

WORDS = ["[pad]", "[bos]", "[eos]", *(f"w{number}" for number in range(47))]
QUESTIONS = [
    {"text": "w1 w2 w3 w4", "choices": ["w5", "w6 w7"], "gold": 0},
    {"text": "w9 w8 w7 w6 w5 w4 w3", "choices": ["w2 w1", "w40"], "gold": 1},
    {"text": "w20 w20 w20", "choices": ["w20", "w21 w22 w23"], "gold": 0},
]
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""


@pytest.fixture
def tokenizer():
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[pad]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[pad]", bos_token="[bos]", eos_token="[eos]"
    )


@pytest.fixture
def evaluate(tmp_path):
    """Runs a command of the harness over a folder with the task above."""
    data = tmp_path / "questions.json"
    data.write_text(json.dumps(QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "mine.yaml").write_text(TASK.replace("DATA", str(data)))
    environment = os.environ | {
        "PYTHONPATH": str(Path(unsoft.__file__).parents[1]),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }

    def evaluate(module: str, model: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, "--model", model, "--model_args", f"pretrained={folder}"]
        command += ["--tasks", "mine", "--include_path", str(tasks), "--device", "cpu", *more]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG)

    return evaluate


@torch.no_grad()
def directly(model, tokenizer, text: str, choice: str) -> float:
    """The log-probability of the choice after the text, token by token in double precision."""
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    after = tokenizer(choice, add_special_tokens=False)["input_ids"]
    total = 0.0
    for number, token in enumerate(after):
        logits = model(torch.tensor([before + after[:number]]), use_cache=False).logits[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
    return total


def test_log_likelihoods_are_those_of_the_swapped_model(tiny, tokenizer, evaluate, tmp_path):
    model = unsoft.hf.swap(tiny("llama"), "cog")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--batch_size", "2", "--log_samples", "--output_path", str(out)]
    done = evaluate("unsoft.hf.lm_eval", "unsoft", tmp_path / "model", *options)
    assert done.returncode == 0, done.stderr
    (written,) = out.rglob("samples_mine_*.jsonl")
    softmax = tiny("llama")
    for line in written.read_text().splitlines():
        sample = json.loads(line)
        pairs = zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True)
        for choice, (actual, _greedy) in pairs:
            assert float(actual) == pytest.approx(
                directly(model, tokenizer, sample["doc"]["text"], choice), abs=1e-4
            )
            assert abs(float(actual) - directly(softmax, tokenizer, sample["doc"]["text"], choice)) > 1e-2
    assert len(written.read_text().splitlines()) == len(QUESTIONS)


def test_the_harness_alone_refuses_a_swapped_folder(tiny, tokenizer, evaluate, tmp_path):
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = evaluate("lm_eval", "hf", tmp_path / "model")
    assert done.returncode != 0
    assert "unsoft_llama" in done.stderr


def test_a_model_that_was_not_swapped_is_refused(tiny, tokenizer):
    from unsoft.hf.lm_eval import UnsoftLM

    with pytest.raises(ValueError, match="is not a swapped model.*--model hf"):
        UnsoftLM(tiny("llama"), tokenizer=tokenizer)


def test_the_entry_point_names_the_model():
    """What releases with plugins read; they keep it as it is until the model is asked for."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    registry = importlib.import_module("lm_eval.api.registry").Registry("model")
    registry.register("unsoft", target=EntryPoint("unsoft", named["unsoft"], "lm_eval.models"))
    from unsoft.hf.lm_eval import UnsoftLM

    assert registry.get("unsoft") is UnsoftLM
