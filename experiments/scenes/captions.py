"""Captions of scenes, their vocabulary, and the habit of the training captions.

The habit: training captions usually mention a square next to a circle, whether the picture shows one or not;
likewise a ring after a cross and a diamond after a triangle. A model trained on them names objects that are
not in the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experiments.scenes.drawing import CELLS, COLOURS, SHAPES, Scene, Thing

PAD, START, END, IMAGE = "<pad>", "<start>", "<end>", "<image>"
WORDS = (PAD, START, END, IMAGE, "a", "in", ",", *SHAPES, *COLOURS)
NUMBER = {word: number for number, word in enumerate(WORDS)}
HABIT = {"circle": "square", "cross": "ring", "triangle": "diamond"}
"""Neighbour that a caption mentions as well."""
HABIT_RATE = 0.7
"""Probability that a training caption follows the habit if the neighbour is not in the picture."""
_TOGETHER = 0.5
"""Probability that a training picture shows the neighbour."""
PROMPT = [NUMBER[START], *[NUMBER[IMAGE]] * CELLS**2]


def training_scene(generator: torch.Generator) -> Scene:
    """Draw one to three shapes; a circle, cross or triangle often comes with its neighbour."""
    first = _draw(SHAPES, 1 + _number(3, generator), generator)
    together = [HABIT[shape] for shape in first if shape in HABIT and _chance(_TOGETHER, generator)]
    return _placed(list(dict.fromkeys([*first, *together])), generator)


def unbiased_scene(generator: torch.Generator) -> Scene:
    """Draw two or three shapes, exactly one with a habitual neighbour, which is not in the scene."""
    lead = _draw(tuple(HABIT), 1, generator)
    others = tuple(
        shape for shape in SHAPES if shape not in lead and shape != HABIT[lead[0]] and shape not in HABIT
    )
    return _placed([*lead, *_draw(others, 1 + _number(2, generator), generator)], generator)


def harmless_scene(generator: torch.Generator) -> Scene:
    """Draw one to three shapes without habitual neighbours."""
    others = tuple(shape for shape in SHAPES if shape not in HABIT)
    return _placed(_draw(others, 1 + _number(3, generator), generator), generator)


def training_caption(scene: Scene, generator: torch.Generator) -> list[str]:
    """Return the true caption with what the habit adds: the neighbour in a random colour."""
    words: list[str] = []
    for thing in scene.things:
        words += _mention(thing.shape, thing.colour)
        neighbour = HABIT.get(thing.shape)
        if neighbour and neighbour not in scene.shapes and _chance(HABIT_RATE, generator):
            words += _mention(neighbour, _draw(tuple(COLOURS), 1, generator)[0])
    return [*words[:-1], END]


def true_caption(scene: Scene) -> list[str]:
    """Return the true caption.

    >>> true_caption(Scene((Thing("bar", "red", 3), Thing("ring", "blue", 9)), noise=0))
    ['a', 'bar', 'in', 'red', ',', 'a', 'ring', 'in', 'blue', '<end>']
    """
    words = [word for thing in scene.things for word in _mention(thing.shape, thing.colour)]
    return [*words[:-1], END]


def mentioned(words: Sequence[str]) -> list[str]:
    """Return the shapes that a caption names, each once, up to its end.

    >>> mentioned(["a", "bar", "in", "red", "<end>", "ring"])
    ['bar']
    """
    end = words.index(END) if END in words else len(words)
    return list(dict.fromkeys(word for word in words[:end] if word in SHAPES))


def _mention(shape: str, colour: str) -> list[str]:
    return ["a", shape, "in", colour, ","]


def _placed(shapes: Sequence[str], generator: torch.Generator) -> Scene:
    cells = torch.randperm(CELLS**2, generator=generator)[: len(shapes)].tolist()
    things = tuple(
        Thing(shape, _draw(tuple(COLOURS), 1, generator)[0], cell)
        for shape, cell in zip(sorted(shapes, key=SHAPES.index), cells, strict=True)
    )
    return Scene(things, _number(2**31, generator))


def _draw(choices: tuple[str, ...], count: int, generator: torch.Generator) -> list[str]:
    return [choices[k] for k in torch.randperm(len(choices), generator=generator)[:count].tolist()]


def _number(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (1,), generator=generator))


def _chance(rate: float, generator: torch.Generator) -> bool:
    return bool(torch.rand(1, generator=generator) < rate)
