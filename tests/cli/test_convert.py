"""``unsoft convert`` as a user runs it."""

import json

import pytest

import unsoft
from tests.lab.training.conversion.tiny import TEXT, save_encoder, save_model


@pytest.fixture
def tiny(tmp_path, one_thread):
    """The arguments of a tiny conversion."""
    (tmp_path / "fox.txt").write_text(TEXT)
    settings = ["--text", str(tmp_path / "fox.txt"), "--length", "16", "--held-out", "32"]
    return ["convert", str(save_model(tmp_path / "small")), *settings]


def test_what_is_printed(run_here, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = [*tiny, "linear-relu", "--match-steps", "2", "--tune-steps", "1", "--only-layers", "1"]
    done = run_here(*short)
    assert done.returncode == 0, done.stderr
    for name in ("original", "swapped", "matched", "tuned"):
        assert name in done.stdout
        assert f"small to linear-relu: {name}: perplexity " in done.stderr
    assert "small to linear-relu, match: step 2 of 2, loss 0." in done.stderr
    assert "unsoft.hf.load('runs/small-to-linear-relu/model')" in done.stdout
    model = unsoft.hf.load("runs/small-to-linear-relu/model")
    assert [layer.self_attn.unsoft.label for layer in model.model.layers] == ["softmax", "linear-relu"]
    again = run_here(*short, "--json")
    assert json.loads(again.stdout)["tokens"] == {"fit": 4096, "match": 64, "tune": 32} and not again.stderr


def test_a_stage_that_is_worse_than_an_earlier_one_is_named(run_here, tiny, tmp_path):
    short = ("--match-steps", "0", "--tune-steps", "4", "--lr", "1")
    done = run_here(*tiny, "relu2", *short, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "the swapped model is saved: on held-out text the tuned one is worse" in done.stdout
    assert "the tuned model is worse than the swapped one" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["cogg"], "cogg"),
        (["cog", "--text", "/no/such.txt"], "'/no/such.txt' cannot be read"),
        (["cog", "--length", "9999"], "too few for windows of 9999"),
        (["cog", "--out", "/dev/null/x"], "--out"),
        (["cog", "--match-steps", "-1"], "'match_steps' must be a whole number of at least 0"),
        (["cog", "--only-layers", "5"], "5 is not among the 2 layers"),
    ],
)
def test_what_cannot_be_converted_is_one_line(run_here, tiny, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    done = run_here(*tiny, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and problem in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_encoder_is_one_line(run_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder = str(save_encoder(tmp_path / "bert"))
    for mechanism in ("retention", "cog"):  # the first looks back only
        done = run_here("convert", encoder, mechanism)
        assert done.returncode == 2
        assert "BertForMaskedLM, which predicts no next token" in done.stderr.splitlines()[-1]
