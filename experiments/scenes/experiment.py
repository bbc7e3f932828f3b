"""Test whether vision-aware steering keeps the model of the scenes from naming missing objects.

Directions are fitted on some scenes, the strength is chosen on others, and everything is measured on a third
set. No picture of that set shows a habitual neighbour, so every mention of one is invented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.scenes.captions import NUMBER, PROMPT, harmless_scene, unbiased_scene
from experiments.scenes.drawing import Scene, Thing
from experiments.scenes.measures import Described, against_habit, caption_loss, describe, pictures
from unsoft.lab.evidence import MeanInterval, resampled_mean, resampled_ratio_change
from unsoft.lab.interpret.steering.controls import DRAWS, Bound, Judgement, judge
from unsoft.lab.interpret.steering.directions import MLP, Directions, blocks, fingerprint
from unsoft.lab.interpret.steering.fit import PairedStates, watching
from unsoft.lab.interpret.steering.vision import Captioned, vision_states

FIT, CHOICE, TEST = 48, 64, 160
"""Numbers of scenes to fit directions on, to choose the strength on, and to measure on; drawn separately."""
STRENGTHS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
INVENTED, MISSED, LOSS = -0.05, 0.05, 0.1
"""Margins: objects invented and missed per caption, and nats per token on captions without habit."""
METHOD = "pca"
ALPHA = 2.0
"""Nats above which a word counts as visual: the ratio of invented words is about 1, of true ones 5."""


@dataclass(frozen=True)
class SceneResults:
    """All measurements of the experiment."""

    directions: Directions
    judgement: Judgement
    measures: list[dict[str, Any]]
    before: Described
    after: Described
    scenes: list[Scene]


def draw(make: Callable[[torch.Generator], Scene], count: int, seed: int) -> list[Scene]:
    """Draw scenes from a separate seed."""
    generator = torch.Generator().manual_seed(1_000_000_007 + seed)
    return [make(generator) for _ in range(count)]


def run_experiment(
    model: PreTrainedModel,
    *,
    negative: str,
    sizes: tuple[int, int, int] = (FIT, CHOICE, TEST),
    draws: int = DRAWS,
    progress: Callable[[str], None] = lambda step: None,
) -> SceneResults:
    """Fit directions, choose the strength, measure controls, and compare before and after."""
    fit_scenes, choice, test = (draw(unbiased_scene, count, seed) for seed, count in enumerate(sizes))
    progress("directions")
    states = vision_states(model, captioned(model, fit_scenes), negative=negative, alpha=ALPHA)
    directions = states.directions(METHOD)
    progress("strength")
    strength = choose_strength(model, directions, choice)
    harmless = draw(harmless_scene, sizes[2], len(sizes))

    def described(ways: Directions | None, force: float) -> Described:
        return describe(model, test, ways, force)

    judgement = judge(
        lambda ways, force: against_habit(model, test, ways, force),
        directions,
        strength,
        shuffled=lambda seed: states.shuffled(seed, METHOD),
        other=colour_states(model, fit_scenes).directions(METHOD),
        bounds=[
            Bound(
                "invented things",
                lambda ways, force: described(ways, force).invented,
                INVENTED,
                "per caption",
                side_effect=False,
            ),
            Bound("missed things", lambda ways, force: described(ways, force).missed, MISSED, "per caption"),
            Bound(
                "unrelated loss",
                lambda ways, force: caption_loss(model, harmless, ways, force),
                LOSS,
                "nats per token",
            ),
        ],
        items="held-out scenes",
        draws=draws,
        progress=progress,
    )
    before, after = described(None, 0.0), described(directions, strength)
    chance = describe(model, test, directions.random(0), strength)
    return SceneResults(directions, judgement, before_and_after(before, after, chance), before, after, test)


def choose_strength(model: PreTrainedModel, directions: Directions, scenes: Sequence[Scene]) -> float:
    """Return the strength with the fewest invented objects among those within the margin of missed ones."""
    plain = describe(model, scenes)
    steered = {strength: describe(model, scenes, directions, strength) for strength in STRENGTHS}
    allowed = {
        strength: float(described.invented.mean())
        for strength, described in steered.items()
        if float(described.missed.mean() - plain.missed.mean()) <= MISSED
    }
    return min(allowed, key=lambda strength: (allowed[strength], strength)) if allowed else STRENGTHS[0]


def captioned(model: PreTrainedModel, scenes: Sequence[Scene]) -> list[Captioned]:
    """Return the scenes with the model's captions, one by one."""
    written = describe(model, scenes).captions
    return [
        Captioned(
            {"input_ids": torch.tensor([PROMPT]), "pixel_values": scene.picture()[None]},
            torch.tensor([NUMBER[word] for word in words]),
        )
        for scene, words in zip(scenes, written, strict=True)
    ]


@torch.no_grad()
def colour_states(model: PreTrainedModel, scenes: Sequence[Scene]) -> PairedStates:
    """Return the states of another task, as a control: the same scenes all in red, and all in blue."""
    layers = range(len(blocks(model)))
    sides: list[dict[int, Tensor]] = []
    for colour in ("red", "blue"):
        painted = [
            Scene(tuple(Thing(one.shape, colour, one.cell) for one in scene.things), scene.noise)
            for scene in scenes
        ]
        seen: dict[int, Tensor] = {}
        with watching(model, MLP, layers, seen.__setitem__):
            model(input_ids=torch.tensor([PROMPT] * len(scenes)), pixel_values=pictures(painted))
        sides.append({layer: _last(states, len(scenes)) for layer, states in seen.items()})
    return PairedStates(sides[0], sides[1], MLP, fingerprint(model), {"pairs": len(scenes)})


def _last(states: Tensor, count: int) -> Tensor:
    return states.view(count, -1, states.shape[-1])[:, -1].float()


def before_and_after(before: Described, after: Described, chance: Described) -> list[dict[str, Any]]:
    """Return CHAIR per object and per caption, and recall, each with the interval of its change."""
    objects = resampled_ratio_change(before.invented, before.named, after.invented, after.named)
    captions = resampled_mean((after.invented > 0).double() - (before.invented > 0).double())
    shown = before.named - before.invented + before.missed
    recall = resampled_ratio_change(shown - before.missed, shown, shown - after.missed, shown)

    def row(name: str, measure: Callable[[Described], float], change: MeanInterval) -> dict[str, Any]:
        values = {"before": measure(before), "after": measure(after), "random": measure(chance)}
        return {"name": name, **values, "change": change.mean, "low": change.low, "high": change.high}

    return [
        row("CHAIR per object", lambda one: one.chair_objects, objects),
        row("CHAIR per caption", lambda one: one.chair_captions, captions),
        row("recall", lambda one: float(1 - one.missed.sum() / shown.sum()), recall),
    ]
