"""Does vision-aware steering keep the model of the scenes from naming what is not there?

Directions are found on some scenes, the strength is chosen on others, and everything is measured on a third
kind, in which no habitual neighbour is in the picture: every mention of one is invented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.scenes.captions import NUMBER, PROMPT, harmless_scene, unbiased_scene
from experiments.scenes.drawing import Scene, Thing
from experiments.scenes.measures import Described, against_habit, caption_loss, describe, pictures
from unsoft.lab.evidence import Interval, resampled_mean, resampled_ratio_change
from unsoft.lab.interpret.steering import Directions
from unsoft.lab.interpret.steering.controls import DRAWS, Bound, Judgement, judge
from unsoft.lab.interpret.steering.fingerprint import fingerprint
from unsoft.lab.interpret.steering.fit import PairedStates
from unsoft.lab.interpret.steering.places import MLP, blocks
from unsoft.lab.interpret.steering.states import watching
from unsoft.lab.interpret.steering.vision import Captioned, vision_states

FIT, CHOICE, TEST = 48, 64, 160
"""Scenes to find directions from, to choose the strength on, and to measure on; drawn apart."""
STRENGTHS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
INVENTED, MISSED, LOSS = -0.05, 0.05, 0.1
"""Margins: things invented and missed in each caption, and nats per token on captions without habit."""
METHOD = "pca"
ALPHA = 2.0
"""Nats above which a word counts as visual: the ratio of invented words is about 1, of true ones 5."""


@dataclass(frozen=True)
class Found:
    """Everything that was measured."""

    directions: Directions
    judgement: Judgement
    measures: list[dict[str, Any]]
    before: Described
    after: Described
    scenes: list[Scene]


def draw(make: Callable[[torch.Generator], Scene], count: int, seed: int) -> list[Scene]:
    """Scenes from a seed of their own."""
    generator = torch.Generator().manual_seed(1_000_000_007 + seed)
    return [make(generator) for _ in range(count)]


def run_experiment(
    model: PreTrainedModel,
    *,
    negative: str,
    sizes: tuple[int, int, int] = (FIT, CHOICE, TEST),
    draws: int = DRAWS,
    said: Callable[[str], None] = lambda words: None,
) -> Found:
    """Directions, strength, controls, before and after."""
    fit_scenes, choice, test = (draw(unbiased_scene, count, seed) for seed, count in enumerate(sizes))
    said("directions")
    states = vision_states(model, captioned(model, fit_scenes), negative=negative, alpha=ALPHA)
    directions = states.directions(METHOD)
    said("strength")
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
        said=said,
    )
    before, after = described(None, 0.0), described(directions, strength)
    chance = describe(model, test, directions.random(0), strength)
    return Found(directions, judgement, before_and_after(before, after, chance), before, after, test)


def choose_strength(model: PreTrainedModel, directions: Directions, scenes: Sequence[Scene]) -> float:
    """The strength with the fewest inventions among those within the margin of what may be missed."""
    plain = describe(model, scenes)
    found = {strength: describe(model, scenes, directions, strength) for strength in STRENGTHS}
    allowed = {
        strength: float(one.invented.mean())
        for strength, one in found.items()
        if float(one.missed.mean() - plain.missed.mean()) <= MISSED
    }
    return min(allowed, key=lambda strength: (allowed[strength], strength)) if allowed else STRENGTHS[0]


def captioned(model: PreTrainedModel, scenes: Sequence[Scene]) -> list[Captioned]:
    """Scenes with what the model says of them, one by one."""
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
    """Another task, as a control: the same scenes all in red, and all in blue."""
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
    """CHAIR per object and per caption, and recall, each with the interval of its change."""
    objects = resampled_ratio_change(before.invented, before.named, after.invented, after.named)
    captions = resampled_mean((after.invented > 0).double() - (before.invented > 0).double())
    there = before.named - before.invented + before.missed
    recall = resampled_ratio_change(there - before.missed, there, there - after.missed, there)

    def row(name: str, measure: Callable[[Described], float], change: Interval) -> dict[str, Any]:
        told = {"name": name, "before": measure(before), "after": measure(after), "random": measure(chance)}
        return told | {"change": change.mean} | {key: asdict(change)[key] for key in ("low", "high")}

    return [
        row("CHAIR per object", lambda one: one.chair_objects, objects),
        row("CHAIR per caption", lambda one: one.chair_captions, captions),
        row("recall", lambda one: float(1 - one.missed.sum() / there.sum()), recall),
    ]
