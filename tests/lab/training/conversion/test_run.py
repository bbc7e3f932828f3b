"""Conversions: they bring a model closer to the original, can be stopped at any moment, and end with the same
weights."""

import json
import math
import signal

import pytest
import torch

import unsoft
from tests.lab.training.conversion.tiny import save_encoder
from unsoft.errors import DivergenceError, Interrupted
from unsoft.lab.training import Conversion, convert
from unsoft.lab.training.conversion import run as run
from unsoft.lab.training.conversion.text import TextBatches
from unsoft.lab.training.folder import sweep


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All models here are tiny."""


@pytest.fixture
def spec(source, text):
    def spec(**changes):
        settings = {
            "model": str(source),
            "mechanism": "relu2",
            "text": str(text),
            "match_steps": 12,
            "tune_steps": 6,
            "tokens": 24,
            "held_out": 96,
            "match_lr": 0.01,
            "tune_lr": 0.003,
        }
        return Conversion(**settings | changes)

    return spec


def weights(folder):
    return unsoft.hf.load(folder / "model").state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, source, text):
    """A conversion that is never stopped, and the model that it had in memory in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kept, finish = [], run.finish
    settings = {"model": str(source), "mechanism": "relu2", "text": str(text), "tokens": 24, "held_out": 96}
    spec = Conversion(**settings, match_steps=12, tune_steps=6, match_lr=0.01, tune_lr=0.003)
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run,
            "finish",
            lambda out, model, *more: (kept.append(model), finish(out, model, *more)),
        )
        result = convert(spec, folder)
    torch.set_num_threads(threads)
    return folder, result, kept[0]


def test_what_a_conversion_leaves(whole, source, text):
    folder, result, model = whole
    assert sorted(path.name for path in folder.iterdir()) == [
        "match.jsonl",
        "model",
        "result.json",
        "spec.json",
        "tune.jsonl",
    ]
    assert list(result.perplexity) == ["original", "swapped", "fitted", "matched", "tuned"]
    assert result.tokens == {"fit": 4096 // 24 * 24, "match": 12 * 2 * 24, "tune": 6 * 2 * 24}
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert convert(Conversion(**result.spec), folder) == result  # nothing is done twice
    for stage, steps in (("match", 12), ("tune", 6)):
        lines = [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == steps and all(math.isfinite(line["loss"]) for line in lines)


def test_the_folder_gives_the_same_logits_bit_for_bit(whole):
    folder, _, model = whole
    loaded, tokenizer = unsoft.hf.load_model(folder / "model")
    ids = torch.arange(40, 70)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.model.layers[0].self_attn.unsoft.label == "relu2"
    assert tokenizer("fox")["input_ids"] and loaded.dtype == torch.float32


def own_perplexity(where, source, text):
    """On held-out text, by transformers' own loss."""
    tokenizer = unsoft.hf.load_model(source)[1]
    held_out = text.read_text()[-(len(text.read_text()) // 10) :]
    windows = unsoft.lab.training.conversion.text.Windows(held_out.encode(), tokenizer, 24, "").spaced(4)
    model = unsoft.hf.load_model(where)[0]
    with torch.no_grad():
        each = [model(row[None], labels=row[None]).loss.double() for row in windows]
    return torch.stack(each).mean().exp().item()


def test_figures_are_right(whole, source, text):
    """The reported perplexities are those of the original and of the saved model."""
    folder, result, _ = whole
    for name, where in (("original", source), (result.kept, folder / "model")):
        assert result.perplexity[name] == pytest.approx(own_perplexity(where, source, text), rel=1e-5)
    assert result.kept == "tuned"


@pytest.mark.parametrize(
    "best", ["matched", *(pytest.param(x, marks=pytest.mark.slow) for x in ("swapped", "fitted"))]
)
def test_the_best_stage_is_saved_if_later_ones_make_it_worse(spec, at_step, monkeypatch, tmp_path, best):
    """Also by a conversion that is stopped while it gets worse, and resumed."""
    order = ["original", "swapped", "fitted", "matched", "tuned"]
    made_up = {name: 3.0 + (name != best) for name in order}

    def conversion(folder, names, **changes):
        with monkeypatch.context() as patch:
            coming = iter(names)
            patch.setattr(run, "losses", lambda *args: [made_up[next(coming)]] * 4)
            return convert(spec(**changes), tmp_path / folder)

    result = conversion("run", order)
    assert result.kept == json.loads((tmp_path / "run" / "result.json").read_text())["kept"] == best
    less = {"swapped": {"fit_tokens": 0, "match_steps": 0}, "fitted": {"match_steps": 0}, "matched": {}}[best]
    conversion("shorter", order, tune_steps=0, **less)  # ends with this stage
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "shorter"))
    at_step("tune", 4, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        conversion("again", order)
    assert conversion("again", ["tuned"]).kept == best
    assert_equal(weights(tmp_path / "again"), weights(tmp_path / "run"))


def test_matching_brings_layers_closer_and_tuning_the_text(whole):
    _, result, _ = whole
    errors = [sum(result.layer_errors[name]) for name in ("swapped", "fitted", "matched")]
    assert len(result.layer_errors["matched"]) == 2
    assert errors[1] < 0.8 * errors[0] and errors[2] < 0.8 * errors[0], errors
    assert result.perplexity["tuned"] < 0.9 * result.perplexity["matched"]


def test_softmax_is_the_control(spec, tmp_path):
    """Nothing to match, and without tuning nothing changes."""
    result = convert(spec(mechanism="softmax", tune_steps=0), tmp_path / "run")
    assert result.perplexity["swapped"] == pytest.approx(result.perplexity["original"], rel=1e-5)
    assert list(result.perplexity) == ["original", "swapped"] and result.layer_errors["swapped"] == []


def test_what_starts_close_is_not_matched(spec, tmp_path):
    """Magnitude's gates start open: matching would only move layers apart."""
    result = convert(spec(mechanism="magnitude+softmax", tune_steps=0), tmp_path / "run")
    assert 0 < max(result.layer_errors["swapped"]) < 1e-3 and "matched" not in result.perplexity
    assert result.perplexity["swapped"] == pytest.approx(result.perplexity["original"], rel=1e-3)


@pytest.fixture
def at_step(monkeypatch):
    """Call a function once, when a batch of a stage is drawn."""

    def at_step(stage, step, action):
        pending, draw = [action], TextBatches.__getitem__

        def draw_and_act(self, index):
            if (self.stage, index) == (stage, step) and pending:
                pending.pop()()
            return draw(self, index)

        monkeypatch.setattr(TextBatches, "__getitem__", draw_and_act)

    return at_step


@pytest.mark.parametrize(
    ("stage", "step", "number"), [("match", 5, signal.SIGINT), ("tune", 4, signal.SIGTERM)]
)
def test_a_stopped_conversion_ends_with_the_same_weights(spec, whole, at_step, tmp_path, stage, step, number):
    at_step(stage, step, lambda: signal.raise_signal(number))
    with pytest.raises(Interrupted, match=rf"stopped at step {step} of \d+ of {stage}; saved in"):
        convert(spec(), tmp_path / "run")
    result = convert(spec(), tmp_path / "run")
    assert_equal(weights(tmp_path / "run"), weights(whole[0]))
    assert result.perplexity == whole[1].perplexity and result.layer_errors == whole[1].layer_errors


@pytest.mark.parametrize("stage", ["match", "tune"])
def test_a_killed_conversion_goes_on_from_its_last_checkpoint(spec, whole, at_step, tmp_path, stage):
    """Simulate SIGKILL: nothing is cleaned up, and a checkpoint is half written."""

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    at_step(stage, 5, die)
    with pytest.raises(Killed):
        convert(spec(), tmp_path / "run", save_every=2)
    (tmp_path / f"run/checkpoints/{stage}/checkpoint-4/complete.json").unlink()
    convert(spec(), tmp_path / "run", save_every=2)
    assert_equal(weights(tmp_path / "run"), weights(whole[0]))


def test_a_signal_while_measuring_stops_after_it(spec, tmp_path, monkeypatch):
    losses = run.losses
    monkeypatch.setattr(run, "losses", lambda *args: (signal.raise_signal(signal.SIGTERM), losses(*args))[1])
    with pytest.raises(Interrupted, match="stopped after measuring the original model"):
        convert(spec(), tmp_path / "run")
    assert json.loads((tmp_path / "run/checkpoints/measured.json").read_text())["losses"].keys() == {
        "original"
    }


def test_a_learning_rate_that_is_far_too_large_is_named(spec, tmp_path):
    with pytest.raises(DivergenceError, match="convert: the loss is .* a smaller learning rate than 1e"):
        convert(spec(match_steps=0, tune_lr=1e30, tune_steps=9), tmp_path / "run", save_every=1)
    assert sweep(tmp_path / "run/checkpoints/tune")[0] is not None


def test_tuning_may_leave_everything_but_attention_alone(spec, source, tmp_path):
    result = convert(spec(tune="attention", match_steps=1, tune_steps=20, layers=["1"]), tmp_path / "run")
    assert result.kept == "tuned"
    before, after = unsoft.hf.load_model(source)[0].state_dict(), weights(tmp_path / "run")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.startswith("model.layers.1.self_attn.") for name in moved)


def test_what_cannot_be_converted_is_said_before_anything_is_written(spec, source, tmp_path):
    encoder = str(save_encoder(tmp_path / "bert"))
    blind = tmp_path / "blind"
    unsoft.hf.load_model(source)[0].save_pretrained(blind)
    for changes, problem in (
        ({"model": encoder}, "predicts no next token"),
        ({"model": str(blind)}, "has no tokenizer"),
        ({"text": "/no/such/file"}, "'/no/such/file' cannot be read"),
        ({"tokens": 4000}, "too few for windows of 4000"),
        ({"layers": ["7"]}, "7 is not among the 2 layers"),
        ({"options": {"strength": 2}}, "strength"),
        ({"mechanism": "softmax", "options": {"where": "mass"}}, "'softmax' has no option 'where'"),
        ({"mechanism": "softmax", "tune": "attention"}, "every layer of .* has softmax already"),
    ):
        with pytest.raises((ValueError, TypeError), match=problem):
            convert(spec(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun"):
        convert(spec(), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mechanism": "relu22"}, "relu2"),
        ({"layers": {"0": "coog"}}, "coog"),
        ({"match_steps": -1}, "'match_steps' must be a whole number of at least 0, not -1"),
        ({"tune": "some"}, "'tune' must be 'all' or 'attention', not 'some'"),
        ({"start": "shut"}, "'start' must be 'open' or 'paper', not 'shut'"),
        ({"tune_lr": math.nan}, "'tune_lr' must be a finite number"),
        ({"tokens": 1}, "'tokens' must be a whole number of at least 2"),
        ({"text": 7}, "'text' must be text, not 7"),
    ],
)
def test_wrong_specs_are_named(spec, changes, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        spec(**changes)
