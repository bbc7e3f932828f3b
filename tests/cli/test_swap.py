"""``unsoft swap``."""

import json

import pytest
import torch
import transformers

import unsoft
from unsoft.hf.quiet import quiet


@pytest.fixture
def folder(tmp_path):
    """A tiny model, saved."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        pad_token_id=0,
    )
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def labels(path) -> list[str]:
    return [layer.self_attn.unsoft.label for layer in unsoft.hf.load(path).model.layers]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["cog", "cog", "cog"]),
        (["--keep-first-last"], ["softmax", "cog", "softmax"]),
        (["--only-layers", "0,2-"], ["cog", "softmax", "cog"]),
        (["--only-layers", "0=relu2"], ["relu2", "cog", "cog"]),
    ],
)
def test_swap_writes_a_model(run_here, folder, tmp_path, arguments, expected):
    out = tmp_path / "out"
    done = run_here("swap", str(folder), "cog", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    assert f"LlamaForCausalLM with cog written to {out}" in done.stdout
    assert labels(out) == expected


def test_init_is_kept(run_here, folder, tmp_path):
    run_here("swap", str(folder), "gpam", "--out", str(tmp_path / "out"), "--start", "paper")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["unsoft"]["init"] == "paper"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "kog", "--out", "{new}"], "unknown name 'kog'; did you mean 'cog'?"),
        (["{model}", "cog", "--out", "{model}"], "exists and is not an empty folder"),
        (["{model}", "cog", "--out", "{model}/config.json"], "config.json is a file"),
        (["{model}", "cog", "--out", "{model}/config.json/x"], "config.json is a file"),
        (["{model}", "cog", "--out", "/proc/out"], "/proc/out cannot be written"),
        (["{model}", "cog", "--out", "{new}", "--only-layers", "9"], "9 is not among the 3 layers 0-2"),
        (
            ["{model}", "cog", "--out", "{new}", "--only-layers", "0=cog,1"],
            "mixes layers with and without a mechanism",
        ),
        (["{model}", "cog", "--out", "{new}", "--start", "shut"], "'init' must be one of open, paper"),
        (["no/such/model", "cog", "--out", "{new}"], "is neither a folder here nor the id of a model"),
        (["{model}", "cog"], "Missing option '--out'"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(run_here, folder, tmp_path, arguments, message):
    new = tmp_path / "out"
    done = run_here("swap", *(x.format(model=folder, new=new) for x in arguments))
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not new.exists()


def test_what_cannot_be_written_is_told_before_a_model_is_loaded(run_here, monkeypatch):
    monkeypatch.setattr("unsoft.hf.load_model", lambda name: pytest.fail("loaded"))
    done = run_here("swap", "smollm2", "cog", "--out", "/proc/out")
    assert done.returncode == 2 and "/proc/out cannot be written" in done.stderr


def test_a_disk_that_is_too_small(run_here, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    done = run_here("swap", str(folder), "cog", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "MB, and the disk has 0 MB left" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_leaves_nothing(run_here, folder, tmp_path, monkeypatch):
    def full(self, place, **options):
        (place / "half").write_text("of a model")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    done = run_here("swap", str(folder), "cog", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 1 and "out cannot be written: No space left on device" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list((tmp_path / "new").iterdir()) == []


def test_mechanisms_that_look_back_only_do_not_go_into_encoders(run_here, tmp_path):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    with quiet():
        transformers.BertModel(config).save_pretrained(tmp_path / "model")
    done = run_here("swap", str(tmp_path / "model"), "retention", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "'retention' looks back only, and BertSelfAttention looks both ways" in done.stderr
