"""``unsoft steer``: the files, the table, and wrong arguments, which write nothing."""

import json
import shutil

import pytest
import torch
import transformers

from tests.lab.interpret.steering.conftest import word_tokenizer
from unsoft.lab.interpret.steering import Directions

POSITIVE, NEGATIVE = "w1 w2\nw3 w4\n\nw5 w6 w7\n", "w1 w8\nw3 w9\nw5 w6 w10\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of its own, as a user would have it on disk, and texts beside it."""
    path = tmp_path_factory.mktemp("steer")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=50,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path / "model")
    word_tokenizer().save_pretrained(path / "model")
    texts = {
        "positive": POSITIVE,
        "negative": NEGATIVE,
        "other_positive": NEGATIVE,
        "other_negative": POSITIVE,
        "short": "w1\nw2\n",
        "prompts": "w20 w21\nw22 w23 w24\nw25\n",
        "toward": "w30\nw31\n",
        "away": "w40\n",
        "unrelated": "w11 w12 w13 w14 " * 40,
    }
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text)
    return path


def pairs(folder, positive="positive", negative="negative"):
    return ["--positive", str(folder / f"{positive}.txt"), "--negative", str(folder / f"{negative}.txt")]


def test_fit_and_generate(run_here, folder, tmp_path):
    file = tmp_path / "way.safetensors"
    model = str(folder / "model")
    options = ["--method", "pca", "--only-layers", "0,2-", "--site", "mlp", "--out", str(file)]
    done = run_here("steer", "fit", model, *pairs(folder), *options)
    assert done.returncode == 0, done.stderr
    result = Directions.load(file)
    assert list(result.vectors) == [0, 2] and result.site == "mlp" and result.about["pairs"] == 3
    record = json.loads(run_here("steer", "fit", model, *pairs(folder), *options, "--json").stdout)
    assert record.pop("norms") == {str(layer): norm for layer, norm in result.norms().items()}
    assert record == {"file": str(file), "method": "pca", "site": "mlp"}
    options = ["--prompt", "w1 w2", "--tokens", "6", "--strength", "30", "--positions", "generated"]
    done = run_here("steer", "generate", model, str(file), *options)
    assert done.returncode == 0, done.stderr
    _, plain, steered = done.stdout.splitlines()
    assert plain.startswith("unsteered w") and steered.startswith("steered   ")
    assert plain.removeprefix("unsteered ") != steered.removeprefix("steered   ")
    (record,) = json.loads(run_here("steer", "generate", model, str(file), *options, "--json").stdout)
    assert record["prompt"] == "w1 w2"
    assert plain == f"unsteered {record['unsteered']}" and steered == f"steered   {record['steered']}"


def test_check_writes_verdict_tables_and_page(run_here, folder, tmp_path):
    out = tmp_path / "new" / "folder"
    given = ["--examples", str(folder), "--strength", "2", "--out", str(out)]
    done = run_here("steer", "check", str(folder / "model"), *given)
    assert done.returncode == 0, done.stderr
    assert "random direction" in done.stdout and "dose-response" in done.stdout
    names = ["controls.csv", "directions.safetensors", "doses.csv", "steering.html", "steering.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    record = json.loads((out / "steering.json").read_text())
    (judged,) = record["verdicts"]
    assert judged["verdict"] in ("supported", "partly supported", "not supported")
    assert judged["claim"] == "steering-text" and record["schema"] == 1
    assert record["command"].startswith("unsoft steer check") and str(folder) in record["command"]
    assert f"{judged['verdict']}: {judged['found']}" in done.stdout
    assert judged["verdict"].capitalize() in (out / "steering.html").read_text()
    assert len(record["controls"]) == 6 and all(one["low"] <= one["high"] for one in record["controls"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only-layers", "9"], "9 is not among the 3 layers"),
        (["--method", "magic"], "'method' must be 'mean', 'pca' or 'probe'"),
        (["--site", "heads"], "'site' must be 'block' or 'mlp'"),
    ],
)
def test_bad_options_of_fit(run_here, folder, tmp_path, arguments, message):
    done = run_here(
        "steer", "fit", str(folder / "model"), *pairs(folder), "--out", str(tmp_path / "way"), *arguments
    )
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_pairs_write_nothing(run_here, folder, tmp_path):
    model, out = str(folder / "model"), ["--out", str(tmp_path / "way")]
    done = run_here("steer", "fit", model, *pairs(folder, negative="short"), *out)
    assert done.returncode == 2 and "as many positive examples as negative ones, not 3 and 2" in done.stderr
    done = run_here("steer", "fit", model, "--positive", str(folder / "positive.txt"), *out)
    assert done.returncode == 2 and "--positive and --negative belong together" in done.stderr
    done = run_here("steer", "fit", model, *pairs(folder, positive="missing"), *out)
    assert done.returncode == 2 and "missing.txt cannot be read" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_questions_write_nothing(run_here, folder, tmp_path):
    model, out = str(folder / "model"), tmp_path / "out"
    options = {
        "'strength' must be a finite number, not nan": ["--strength", "nan"],
        "'positions' must be one of all": ["--positions", "last"],
    }
    files = {
        "begin with the same token": ("away", "toward"),
        "at least 128 are needed": ("unrelated", "short"),
        "held-out prompts must not be among the pairs": ("prompts", "positive"),
        "toward.txt cannot be read": ("toward", None),
    }
    for number, (message, (name, source)) in enumerate(files.items()):
        examples = tmp_path / str(number)
        shutil.copytree(folder, examples, ignore=shutil.ignore_patterns("model"))
        if source is None:
            (examples / f"{name}.txt").unlink()
        else:
            shutil.copy(folder / f"{source}.txt", examples / f"{name}.txt")
        options[message] = ["--examples", str(examples)]
    for message, change in options.items():
        done = run_here("steer", "check", model, "--examples", str(folder), *change, "--out", str(out))
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert not out.exists() or not list(out.iterdir())


def test_directions_of_another_model_are_refused(run_here, folder, tmp_path):
    other = Directions({1: torch.ones(32)}, site="block", method="mean", model="f" * 40)
    other.save(tmp_path / "way")
    done = run_here("steer", "generate", str(folder / "model"), str(tmp_path / "way"), "--prompt", "w1")
    assert done.returncode == 2 and "found in another model" in done.stderr
