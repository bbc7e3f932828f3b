"""Models for every task: they take its inputs, and every parameter that should learn gets a gradient."""

import importlib.util

import pytest
import torch

import unsoft
from unsoft.lab.tasks import tasks
from unsoft.lab.training import Spec
from unsoft.lab.training.model import build, to_model
from unsoft.lab.training.trainer import Batches, evaluation_batches, measure

NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "digits" and importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"
        ),
    )
    for name in tasks()
    if name != "language"  # its corpus is large: tests/lab/tasks/test_language.py has a small one
]


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_a_model_that_can_learn_it(name, one_thread):
    spec = Spec(task=name, mechanism="gated+cog").filled()
    task = spec.make_task()
    model = build(spec, task)
    again = build(spec, task)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    batch = to_model(task.sample(4, training=True), task, spec.width)
    labels = batch.pop("labels")
    loss = task.loss(model(**batch).logits[..., : task.outputs], labels)
    loss.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without <= {"model.embed_tokens.weight"}, "features need no embedding, all else learns"
    assert bool(without) == (task.kind == "features")
    start = model.get_parameter(next(n for n, _ in model.named_parameters() if "q_proj.weight" in n))
    assert start.std().item() == pytest.approx(0.1, rel=0.1)


def test_positions_are_there_only_where_the_task_wants_them(one_thread):
    """Without positions one layer cannot see in which order things came."""
    for name, matters in (("deletion", False), ("copy", True)):
        spec = Spec(task=name, layers=1).filled()
        task = spec.make_task()
        inputs = task.sample(2).inputs
        other = torch.cat([inputs[:, :-1].flip(1), inputs[:, -1:]], 1)
        model = build(spec, task)
        with torch.no_grad():
            same = torch.allclose(model(inputs).logits[:, -1], model(other).logits[:, -1], atol=1e-5)
        assert same is not matters


def test_the_score_of_a_model_is_the_score_of_its_outputs(one_thread):
    """The known solution in a model's clothes gets the known score."""
    task = unsoft.lab.tasks.task("recall", pairs=4, length=32)

    class Solver(torch.nn.Module):
        def forward(self, input_ids):
            return {"logits": task.solve(input_ids) * 50}

    batches = evaluation_batches(task, 64)
    score, loss = measure(Solver(), batches, torch.device("cpu"))
    assert score == 1.0 and loss < 1e-6
    assert len(batches) * batches.size >= 1000


def test_batches_depend_on_seed_and_number_alone():
    task = unsoft.lab.tasks.task("copy", length=3)
    batches = Batches(task, 16, 5, 4, seed=2, training=True)
    assert len(batches) == 5
    for index in (3, 0, 3):
        batch = task.sample(4, seed=2, index=index, training=True)
        assert torch.equal(batches[index]["input_ids"], batch.inputs)


def test_models_are_watched_and_tested_on_different_texts(tmp_path):
    (tmp_path / "text").write_text("a" * 800 + "b" * 100 + "c" * 100)
    task = unsoft.lab.tasks.task("text", path=str(tmp_path / "text"), length=20)
    for validation, letter in ((True, "b"), (False, "c")):
        batches = evaluation_batches(task, 16, validation=validation)
        assert all((batches[index]["input_ids"] == ord(letter)).all() for index in range(len(batches)))


def test_features_fill_the_first_dimensions():
    task = unsoft.lab.tasks.task("census")
    batch = task.sample(2)
    given = to_model(batch, task, 64)["inputs_embeds"]
    assert torch.equal(given[..., :20], batch.inputs) and not given[..., 20:].any() and given.shape[-1] == 64


def test_a_model_to_start_from_must_fit(tmp_path):
    small = build(Spec(task="copy", width=16).filled(), unsoft.lab.tasks.task("copy"))
    small.save_pretrained(tmp_path)
    spec = Spec(task="copy", mechanism="cog", init_from=str(tmp_path)).filled()
    model = build(spec, spec.make_task())
    assert torch.equal(model.lm_head.weight, small.lm_head.weight)
    assert model.model.layers[0].self_attn.unsoft.label == "cog"
    problems = {
        "induction": "needs 32 outputs",
        "census": "20 features",
        "digits": "is a SmolLM3ForCausalLM, which takes input_ids",
    }
    for name, problem in problems.items():
        with pytest.raises(ValueError, match=problem):
            wrong = Spec(task=name, init_from=str(tmp_path)).filled()
            build(wrong, wrong.make_task())
