"""Scenes, their pictures and captions, the training run, and the experiment on an untrained model."""

import json
import math
import os
import signal

import pytest
import torch

from experiments.scenes import audit, experiment, training
from experiments.scenes.captions import (
    HABIT,
    HABIT_RATE,
    IMAGE,
    NUMBER,
    PROMPT,
    WORDS,
    harmless_scene,
    mentioned,
    training_caption,
    training_scene,
    true_caption,
    unbiased_scene,
)
from experiments.scenes.drawing import CELL, CELLS, COLOURS, SHAPES, Scene, Thing
from experiments.scenes.experiment import SceneResults, draw, run_experiment
from experiments.scenes.measures import against_habit, caption_loss, counted, describe
from experiments.scenes.model import build_model
from experiments.scenes.report import write_report
from experiments.scenes.training import Settings, train_scenes
from unsoft.errors import Interrupted
from unsoft.lab.interpret.steering import Directions, steering
from unsoft.lab.interpret.steering.directions import fingerprint


@pytest.fixture(scope="module")
def model():
    return build_model(0).eval()


def test_shapes_are_where_they_are_said_to_be_and_can_be_told_apart():
    empty = Scene((), noise=3).picture()
    seen = set()
    for shape in SHAPES:
        picture = Scene((Thing(shape, "blue", 6),), noise=3).picture()
        changed = (picture != empty).any(0)
        row, column = divmod(6, CELLS)
        inside = changed[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        assert changed.sum() == inside.sum() > 8
        seen.add(tuple(inside.flatten().tolist()))
    assert len(seen) == len(SHAPES)
    colours = {tuple(Scene((Thing("bar", name, 0),), 0).picture()[:, 4, 4].tolist()) for name in COLOURS}
    assert len(colours) == len(COLOURS)


def test_training_captions_have_the_habit_at_its_rate_and_test_scenes_never_the_neighbour():
    generator = torch.Generator().manual_seed(0)
    followed = []
    for _ in range(2000):
        scene = training_scene(generator)
        said = mentioned(training_caption(scene, generator))
        assert scene.shapes <= set(said)
        for shape, neighbour in HABIT.items():
            if shape in scene.shapes and neighbour not in scene.shapes:
                followed.append(neighbour in said)
        assert set(said) - scene.shapes <= {HABIT[shape] for shape in scene.shapes if shape in HABIT}
    rate, error = sum(followed) / len(followed), (HABIT_RATE * (1 - HABIT_RATE) / len(followed)) ** 0.5
    assert abs(rate - HABIT_RATE) < 5 * error
    for scene in draw(unbiased_scene, 300, 0):
        leads = scene.shapes & set(HABIT)
        assert len(leads) == 1 and not {HABIT[lead] for lead in leads} & scene.shapes
    assert not any(scene.shapes & set(HABIT) for scene in draw(harmless_scene, 300, 0))


def test_counts_are_those_of_chair():
    scenes = [
        Scene((Thing("circle", "red", 0), Thing("bar", "red", 1)), 0),
        Scene((Thing("arch", "red", 0),), 0),
    ]
    captions = [
        [
            "a",
            "circle",
            "in",
            "red",
            ",",
            "a",
            "square",
            "in",
            "red",
            ",",
            "a",
            "square",
            "in",
            "blue",
            "<end>",
        ],
        ["a", "arch", "in", "red", "<end>", "a", "bar"],
    ]
    result = counted(captions, scenes)
    assert (
        result.named.tolist() == [2, 1]
        and result.invented.tolist() == [1, 0]
        and result.missed.tolist() == [1, 0]
    )
    assert result.chair_objects == pytest.approx(1 / 3) and result.chair_captions == 0.5


def test_caption_loss_against_one_scene_at_a_time(model):
    scenes = draw(harmless_scene, 3, 0)
    result = caption_loss(model, scenes)
    for scene, value in zip(scenes, result, strict=True):
        text = [NUMBER[word] for word in true_caption(scene)]
        ids = torch.tensor([PROMPT + text])
        labels = torch.where(torch.arange(ids.shape[1]) < len(PROMPT), -100, ids)
        with torch.no_grad():
            loss = model(input_ids=ids, pixel_values=scene.picture()[None], labels=labels).loss
        assert value.item() == pytest.approx(loss.item(), rel=1e-4)


def test_odds_against_the_habit_against_one_scene_at_a_time(model):
    scenes = draw(unbiased_scene, 4, 3)
    result = against_habit(model, scenes)
    for scene, value in zip(scenes, result, strict=True):
        (lead,) = scene.shapes & set(HABIT)
        words = true_caption(scene)
        said = [*words[: words.index(lead) + 3], ",", "a", HABIT[lead]]
        ids = torch.tensor([PROMPT + [NUMBER[word] for word in said]])
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=scene.picture()[None]).logits[0].double()
        chance = 1.0
        for place in (-3, -2, -1):
            chance *= logits[place - 1].softmax(-1)[ids[0, place]].item()
        assert value.item() == pytest.approx(math.log((1 - chance) / chance), rel=1e-3)


def test_captions_are_steered_and_come_back(model):
    scenes = draw(unbiased_scene, 4, 0)
    before = describe(model, scenes)
    ahead = Directions({1: 20 * torch.ones(80)}, "mlp", "mean", fingerprint(model))
    assert describe(model, scenes, ahead, 1.0).captions != before.captions
    with steering(model, ahead, 1.0):
        assert describe(model, scenes).captions != before.captions
    assert describe(model, scenes).captions == before.captions


SMALL = Settings(steps=5, batch=2)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_an_interrupted_run_ends_in_the_same_weights(tmp_path, monkeypatch):
    whole = weights(train_scenes(tmp_path / "whole", SMALL))
    made = training._Batches.__getitem__

    def interrupt(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return made(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(training._Batches, "__getitem__", interrupt)
        with pytest.raises(Interrupted, match="stopped at step [1-4] of 5; checkpoint saved in .* to resume"):
            train_scenes(tmp_path / "parts", SMALL)
    again = weights(train_scenes(tmp_path / "parts", SMALL))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    kept = weights(train_scenes(tmp_path / "parts", SMALL))  # from its folder
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.items())
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="is not empty and holds no scenes"):
        train_scenes(tmp_path / "mine", SMALL)
    training._claim(tmp_path / "run", SMALL)
    with pytest.raises(ValueError, match="holds another run .steps 5."):
        train_scenes(tmp_path / "run", Settings(steps=7, batch=2))
    with pytest.raises(ValueError, match="'steps' must be at least 1, not 0"):
        Settings(steps=0)


def test_the_whole_experiment_on_a_model_that_knows_nothing(model, tmp_path, monkeypatch):
    """Its numbers mean nothing; the path from scenes to files is what is looked at."""
    monkeypatch.setattr(experiment, "ALPHA", -1e9)
    monkeypatch.setattr(experiment, "STRENGTHS", (1.0,))
    monkeypatch.setattr("experiments.scenes.report._AUDITED", 2)
    steps = []
    result = run_experiment(model, negative="without", sizes=(3, 2, 4), draws=1, progress=steps.append)
    assert isinstance(result, SceneResults)
    assert steps[:2] == ["directions", "strength"] and len(steps) == 2 + 5 + 2 + 1 + 3
    names = [one.name for one in result.judgement.controls]
    assert names[0] == "held-out scenes" and names[-3:] == [
        "invented things",
        "missed things",
        "unrelated loss",
    ]
    assert result.judgement.before == pytest.approx(against_habit(model, result.scenes).mean().item())
    files = write_report(tmp_path, model, result, "python -m experiments.scenes")
    record = json.loads((tmp_path / "steering.json").read_text())
    assert (
        record["verdicts"][0]["claim"] == "steering"
        and [one["name"] for one in record["measures"]][2] == "recall"
    )
    assert record["measures"][0]["before"] == pytest.approx(result.before.chair_objects)
    assert all(path.is_file() for path in files)
    page = (tmp_path / "steering.html").read_text()
    assert page.count("data:image/png") >= 4 and "<script>alert" not in page
    assert len((tmp_path / "controls.csv").read_text().splitlines()) == 1 + 8


def test_the_audit_tells_true_maps_from_false_ones(model, monkeypatch):
    """A made-up model that sees a word if and only if its own cell is not masked."""
    scenes = draw(unbiased_scene, 12, 5)
    examples = experiment.captioned(model, scenes)
    examples = [
        type(one)(one.inputs, torch.tensor([NUMBER[word] for word in true_caption(scene)]))
        for one, scene in zip(examples, scenes, strict=True)
    ]
    places = {id(one): scene for one, scene in zip(examples, scenes, strict=True)}
    by_picture = {scene.picture().sum().item(): scene for scene in scenes}

    def likelihoods(network, inputs, caption):
        original = inputs.get("original", inputs["pixel_values"])
        scene = by_picture[original.sum().item()]
        cells = {thing.shape: thing.cell for thing in scene.things}
        hidden = inputs.get("hidden")
        return torch.tensor(
            [-5.0 if hidden is not None and cells.get(WORDS[t]) == hidden else 0.0 for t in caption.tolist()]
        )

    def mask(network, inputs, hidden):
        return {**inputs, "original": inputs["pixel_values"], "hidden": int(hidden.nonzero())}

    def maps(shift):
        def relevance(network, inputs, caption, **options):
            scene = by_picture[inputs["pixel_values"].sum().item()]
            cells = {thing.shape: thing.cell for thing in scene.things}
            result = torch.zeros(len(caption), CELLS, CELLS)
            for row, token in enumerate(caption.tolist()):
                if WORDS[token] in cells:
                    result[row].view(-1)[(cells[WORDS[token]] + shift) % CELLS**2] = 1
            from unsoft.lab.interpret.steering.vision import Relevance

            return Relevance(torch.ones(len(caption)), torch.ones(len(caption), dtype=torch.bool), result)

        return relevance

    assert places
    monkeypatch.setattr(audit, "log_likelihoods", likelihoods)
    monkeypatch.setattr(audit, "masked", mask)
    monkeypatch.setattr(audit, "relevance", maps(0))
    hit, lost = audit.audit_maps(model, scenes, examples)
    assert hit["mean"] == 1 and lost["mean"] == 5 and lost["control"] < 2
    monkeypatch.setattr(audit, "relevance", maps(1))
    hit, lost = audit.audit_maps(model, scenes, examples)
    assert hit["mean"] == 0 and lost["mean"] < 2


def test_prompts_hold_a_picture():
    assert PROMPT.count(NUMBER[IMAGE]) == CELLS**2
