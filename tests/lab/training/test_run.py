"""Runs: they learn, they can be stopped at any moment, and they end with the same weights."""

import json
import math
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

import unsoft
from unsoft.errors import DivergenceError, Interrupted
from unsoft.lab.training import Spec, train
from unsoft.lab.training.folder import claimed, is_complete, seal, sweep
from unsoft.lab.training.model import build
from unsoft.lab.training.run import robustness
from unsoft.lab.training.trainer import Batches, TaskTrainer, evaluation_batches, measure

TINY = {
    "task": "copy",
    "knobs": {"length": 3, "vocabulary": 4},
    "width": 16,
    "heads": 1,
    "steps": 20,
    "batch": 4,
}


pytestmark = pytest.mark.usefixtures("one_thread", "few_examples")  # all runs here are tiny


def run(spec, out=None, *, eval_every=10, **intervals):
    """Train, and score seldom: a score takes as long as several steps."""
    return train(spec, out, eval_every=eval_every, **intervals)


def weights(folder):
    return unsoft.hf.load(folder / "model").state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, few_examples):
    """The folder and the result of the run that most tests here interrupt."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = run(Spec(**TINY), folder, save_every=5)
    torch.set_num_threads(threads)
    return folder, result


@pytest.fixture
def signal_at(monkeypatch):
    """Sends signals to this process during a step: its loader draws the next batch before it."""

    def signal_at(step, *signals):
        pending, draw = list(signals), Batches.__getitem__

        def draw_and_signal(self, index):
            if self.training and index == step:
                while pending:
                    signal.raise_signal(pending.pop(0))
            return draw(self, index)

        monkeypatch.setattr(Batches, "__getitem__", draw_and_signal)

    return signal_at


def test_a_run_learns_and_says_what_it_found(tmp_path):
    spec = Spec(
        task="memorisation",
        knobs={"keys": 4, "values": 4, "length": 4},
        mechanism="magnitude+softmax",
        width=16,
        heads=1,
        layers=1,
        steps=60,
        batch=16,
        lr=0.02,
        warmup=5,
    )
    result = run(spec, tmp_path / "run", eval_every=6)
    assert result.score > 0.9 > 0.5 > result.chance == 0.25 and result.known == 1.0
    assert result.validation == result.history[-1]["eval_score"]
    assert result.score_by == []
    assert list(result.attention) == ["first_token"] and 0 < result.attention["first_token"][0] < 1
    assert result.steps == 60 and len([r for r in result.history if "eval_score" in r]) == 10
    losses = [record["loss"] for record in result.history if "loss" in record]
    assert losses[-1] < 0.5 * losses[0]
    assert {name.rpartition(".")[2] for name in result.learned} == {"t", "beta", "gamma"}
    assert result.learned.keys() == result.started.keys()
    started = {name.rpartition(".")[2]: values for name, values in result.started.items()}
    fresh = build(spec.filled(), spec.make_task()).model.layers[0].self_attn.unsoft.mechanism
    assert started["t"] == pytest.approx([math.exp(fresh.log_t.item())])
    assert started["beta"] == [fresh.beta.item()]
    moved = [abs(result.learned[name][0] - values[0]) for name, values in result.started.items()]
    assert max(moved) > 0.05  # with the learning rate of their own
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert lines == result.history
    again = json.loads((tmp_path / "run/result.json").read_text())
    assert again == json.loads(json.dumps(result.to_dict()))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "log.jsonl",
        "model",
        "result.json",
        "spec.json",
    ]
    model = unsoft.hf.load(tmp_path / "run/model")
    assert sum(parameter.numel() for parameter in model.parameters()) == result.parameters


def test_scores_over_difficulties_are_beside_what_they_are_compared_with():
    """Known solution and shortcut are graded here on the examples of the test, drawn again."""
    spec = Spec(task="census", knobs={"repeats": 3, "dim": 8}, width=16, steps=2, batch=4)
    result, made = run(spec), spec.make_task()
    tests = [(test["value"], test["harder"]) for test in result.score_by]
    assert tests == [(1, False), (3, False), (6, True), (24, True), (192, True)]
    assert result.difficulty == "repeats"
    own = result.score_by[1]
    assert (
        own["score"] == result.score and own["shortcut"] == result.shortcut and own["known"] == result.known
    )
    for test, other in zip(result.score_by, made.sweep(), strict=True):
        batches = evaluation_batches(other, 16)
        right = []
        for index in range(len(batches)):
            inputs, labels = other.sample(batches.size, seed=0, index=index)
            votes = inputs[:, 1:-1, made.dim : made.dim + 2].sum(1)
            right.append((votes[:, 1] > votes[:, 0]).long() == labels[:, -1])
        assert test["shortcut"] == pytest.approx(torch.cat(right).double().mean().item())
        assert test["known"] == pytest.approx(1, abs=0.01) and 0.3 < test["score"] < 0.9
        assert 0.3 < test["validation"] < 0.9
    assert result.score_by[0]["shortcut"] == 1  # nothing is repeated
    assert own["validation"] == result.validation, (
        "the examples by which rates are chosen, not those of the test"
    )
    assert [test["validation"] for test in result.score_by] != [test["score"] for test in result.score_by]
    assert unsoft.lab.training.Result(**json.loads(json.dumps(result.to_dict()))) == result


def test_the_same_spec_gives_the_same_weights_and_another_seed_others(tmp_path, uninterrupted):
    for name, seed in (("same", 0), ("other", 1)):
        run(Spec(**TINY, seed=seed), tmp_path / name)
    expected = weights(uninterrupted[0])
    assert_equal(weights(tmp_path / "same"), expected)
    assert not torch.equal(weights(tmp_path / "other")["lm_head.weight"], expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 7), (signal.SIGINT, 10), (signal.SIGTERM, 19)],
)
def test_a_stopped_run_ends_with_the_same_weights(tmp_path, uninterrupted, signal_at, number, step):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    signal_at(step, number)
    with pytest.raises(Interrupted, match=f"stopped at step {step} of 20; saved in"):
        run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert is_complete(tmp_path / f"run/checkpoints/checkpoint-{step}")
    result = run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert result.steps == 20
    assert_equal(weights(uninterrupted[0]), weights(tmp_path / "run"))
    for name in ("score", "score_by", "loss", "validation"):
        assert getattr(result, name) == getattr(uninterrupted[1], name)
    assert [entry["step"] for entry in result.history] == [
        entry["step"] for entry in uninterrupted[1].history
    ]


def test_a_run_with_noise_of_its_own_resumes_too(tmp_path, signal_at):
    """SPOS draws from torch's generator, whose state is in the checkpoint;
    the gate of the mechanism is learned."""
    spec = Spec(**TINY | {"heads": 4}, mechanism="gated+cog", repulse="spos")
    run(spec, tmp_path / "whole")
    signal_at(9, signal.SIGINT)
    with pytest.raises(Interrupted):
        run(spec, tmp_path / "stopped")
    run(spec, tmp_path / "stopped")
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_second_signal_stops_at_once_and_loses_little(tmp_path, uninterrupted, signal_at):
    signal_at(13, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert sweep(tmp_path / "run/checkpoints")[0].name == "checkpoint-10"
    run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert_equal(weights(uninterrupted[0]), weights(tmp_path / "run"))


def damage(folder, how):
    """Spoils a checkpoint as a crash or a bad disk may."""
    file = folder / "optimizer.pt"
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "missing":
        file.unlink()
    elif how == "unsealed":
        (folder / "complete.json").unlink()
    else:
        (folder / "complete.json").write_text("[1, 2")


def test_a_damaged_checkpoint_is_never_loaded(tmp_path, uninterrupted, signal_at):
    signal_at(13, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(Spec(**TINY), tmp_path / "run", save_every=5)
    for how in ("truncated", "flipped", "missing", "unsealed", "nonsense"):
        copy = tmp_path / how
        shutil.copytree(tmp_path / "run/checkpoints", copy)
        assert sweep(copy)[0].name == "checkpoint-13"
        damage(copy / "checkpoint-13", how)
        kept, removed = sweep(copy)
        assert kept.name == "checkpoint-10" and removed == ["checkpoint-13"]
        assert not (copy / "checkpoint-13").exists()
    damage(tmp_path / "run/checkpoints/checkpoint-13", "truncated")
    run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert_equal(weights(uninterrupted[0]), weights(tmp_path / "run"))


def test_killed_between_the_last_checkpoint_and_the_result(tmp_path, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "unsoft.lab.training.run.finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            run(Spec(**TINY), tmp_path / "run")
    result = run(Spec(**TINY), tmp_path / "run")
    assert result.score == uninterrupted[1].score and result.steps == 20
    assert_equal(weights(uninterrupted[0]), weights(tmp_path / "run"))


def test_a_finished_run_is_not_run_again(tmp_path, uninterrupted, monkeypatch):
    folder, result = uninterrupted
    monkeypatch.setattr(TaskTrainer, "train", None)
    assert run(Spec(**TINY), folder).to_dict() == json.loads(json.dumps(result.to_dict()))
    with pytest.raises(ValueError, match=r"holds another run \(seed 0\); give another folder \(--out\)"):
        run(Spec(**TINY, seed=1), folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        run(Spec(**TINY), tmp_path / "full")
    with pytest.raises(ValueError, match="cannot be (read|written)"):
        run(Spec(**TINY), tmp_path / "full/thesis.tex")


def test_what_cannot_be_built_leaves_no_folder_behind(tmp_path):
    with pytest.raises(TypeError, match="strength"):
        run(Spec(**TINY, mechanism="gated+cog", options={"strength": 2}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": 99}, "copy: the label 99 is none of the 4 of its 'outputs'"),
        ({"labels": -100}, "copy: an example asks nothing"),
        ({"inputs": -1}, "copy: the token -1 is none of the 5 of its 'size'"),
    ],
)
def test_a_task_that_no_model_could_learn_is_told_before_it_runs(tmp_path, monkeypatch, wrong, said):
    kind = type(unsoft.lab.tasks.task("copy"))
    draw = kind.draw

    def draw_wrongly(self, count, random, training):
        batch = draw(self, count, random, training)
        return batch._replace(**{name: getattr(batch, name).clone().fill_(x) for name, x in wrong.items()})

    monkeypatch.setattr(kind, "draw", draw_wrongly)
    with pytest.raises(ValueError, match=said):
        run(Spec(**TINY), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_killed_before_the_spec_was_written(tmp_path):
    """A process that is killed while it writes leaves a lock and an unfinished file."""
    for name in (".lock", ".spec.json.abc.tmp"):
        (tmp_path / name).touch()
    assert run(Spec(**TINY), tmp_path).steps == 20
    assert not (tmp_path / ".spec.json.abc.tmp").exists()
    (tmp_path / "spec.json").unlink()
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        run(Spec(**TINY), tmp_path)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    with (
        claimed(tmp_path / "run", Spec(**TINY).filled().to_dict(), "train"),
        pytest.raises(ValueError, match="another process works in"),
    ):
        run(Spec(**TINY), tmp_path / "run")
    assert run(Spec(**TINY), tmp_path / "run").steps == 20


def test_divergence_is_said_at_once_and_the_checkpoint_before_is_kept(tmp_path, monkeypatch):
    kind, loss = type(unsoft.lab.tasks.task("copy")), type(unsoft.lab.tasks.task("copy")).loss
    calls = []

    def loss_that_breaks(self, outputs, labels):
        calls.append(outputs.requires_grad)
        return loss(self, outputs, labels) * (math.nan if sum(calls) == 13 and calls[-1] else 1)

    monkeypatch.setattr(kind, "loss", loss_that_breaks)
    with pytest.raises(
        DivergenceError, match="the loss is nan at step 13; a smaller learning rate than 0.003 may help"
    ):
        run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert sweep(tmp_path / "run/checkpoints")[0].name == "checkpoint-10"


def test_a_learning_rate_that_is_far_too_large_ends_in_one_line(tmp_path):
    with pytest.raises(DivergenceError, match="smaller learning rate"):
        run(Spec(**TINY | {"lr": 1e30, "warmup": 0}))


@pytest.mark.parametrize(
    ("problem", "free"),
    [(OSError(28, "No space left on device"), 1 << 30), (RuntimeError("unexpected pos 64 vs 0"), 100)],
)
def test_a_full_disk_loses_nothing(tmp_path, uninterrupted, monkeypatch, problem, free):
    """The disk is full while the second checkpoint is written, which torch may say in its own way."""
    save = torch.save

    def full(content, path, *args, **kwargs):
        if "checkpoint-10" in str(path) and "optimizer" in str(path):
            raise problem
        return save(content, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        patch.setattr("unsoft.lab.training.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        with pytest.raises(
            OSError, match="checkpoint of step 10 cannot be written .* No space left on device"
        ):
            run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["checkpoint-5"]
    run(Spec(**TINY), tmp_path / "run", save_every=5)
    assert_equal(weights(uninterrupted[0]), weights(tmp_path / "run"))


def test_a_disk_that_is_full_from_the_start_promises_no_checkpoint_before(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unsoft.lab.training.trainer.seal", full)
    with pytest.raises(OSError, match="of step 5 .*; it was the first, so the same command starts over"):
        run(Spec(**TINY), tmp_path / "run", save_every=5)


def test_a_seal_knows_its_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a").write_text("a")
    assert not is_complete(tmp_path)
    seal(tmp_path)
    assert is_complete(tmp_path)
    (tmp_path / "inner/a").write_text("b")
    assert not is_complete(tmp_path)


def test_own_parameters_have_their_own_rate_and_no_decay(tmp_path):
    spec = Spec(**TINY, mechanism="magnitude+softmax", mechanism_lr=0.04, lr=0.001).filled()
    task = spec.make_task()
    trainer = TaskTrainer(
        build(spec, task),
        spec,
        task,
        folder=tmp_path,
        save_every=None,
        eval_every=5,
        report_to=[],
        fsdp=False,
        callbacks=[],
    )
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            own = ".unsoft." in names[id(parameter)]
            assert group["lr"] == (0.04 if own else 0.001)
            assert group["weight_decay"] == (0.01 if parameter.dim() > 1 and not own else 0)
    assert trainer.args.adam_beta2 == 0.98 and trainer.args.max_grad_norm == 1


def test_bfloat16_is_mixed_precision(tmp_path):
    result = run(Spec(**TINY, bf16=True), tmp_path / "run")
    assert math.isfinite(result.loss)
    assert {tensor.dtype for name, tensor in weights(tmp_path / "run").items() if "swapped" not in name} == {
        torch.float32
    }


def test_training_works_beside_the_main_thread(tmp_path, uninterrupted):
    """Where signals cannot be handled, nothing else changes."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run(Spec(**TINY), tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0].steps == 20
    assert_equal(weights(tmp_path / "run"), weights(uninterrupted[0]))


def test_a_run_can_start_from_the_model_of_another(tmp_path, uninterrupted):
    folder, _ = uninterrupted
    spec = Spec(
        task="copy",
        knobs=TINY["knobs"],
        init_from=str(folder / "model"),
        mechanism="sink+softmax",
        steps=1,
        batch=4,
        lr=0.0,
    )
    run(spec, tmp_path / "run")
    before, after = weights(folder), weights(tmp_path / "run")
    assert all(
        torch.equal(before[name], after[name]) for name in before
    )  # nothing moved, at a learning rate of 0
    assert {name for name in after if name not in before} and unsoft.hf.load(
        tmp_path / "run/model"
    ).config.unsoft["mechanism"] == "sink+softmax"


def test_wrong_intervals_are_named():
    for name in ("save_every", "eval_every"):
        with pytest.raises(ValueError, match=f"'{name}' must be a whole number of at least 1, not 0"):
            run(Spec(**TINY), **{name: 0})


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch, signal_at):
    monkeypatch.chdir(tmp_path)
    assert run(Spec(**TINY)).steps == 20
    assert not list(tmp_path.iterdir())
    signal_at(3, signal.SIGINT)
    with pytest.raises(Interrupted, match="nothing was kept"):
        run(Spec(**TINY))


def test_robustness_is_the_score_with_damaged_heads():
    """Removing every head by hand gives the same mean; a model that ignores its heads loses nothing."""
    spec = Spec(task="opposition", width=32, heads=2, steps=1, batch=4).filled()
    made = spec.make_task()
    model = build(spec, made).eval()
    batches = evaluation_batches(made, 32)
    projection = model.model.layers[0].self_attn.o_proj
    whole, weight = measure(model, batches, torch.device("cpu"))[0], projection.weight.detach().clone()
    scores = []
    for head in range(2):
        projection.weight.data[:, 16 * head : 16 * (head + 1)] = 0
        scores.append(measure(model, batches, torch.device("cpu"))[0])
        projection.weight.data.copy_(weight)
    values = robustness(model, batches, torch.device("cpu"))
    assert values["pruned_score"] == [pytest.approx(sum(scores) / 2, abs=1e-9)]
    assert values["perturbed_score"][0] != whole
    projection.weight.data.zero_()
    blind = measure(model, batches, torch.device("cpu"))[0]
    values = robustness(model, batches, torch.device("cpu"))
    assert values == {"pruned_score": [blind], "perturbed_score": [blind]}
    alone = Spec(task="opposition", width=32, heads=1, steps=1, batch=4).filled()
    assert robustness(build(alone, made), batches, torch.device("cpu")) == {}
