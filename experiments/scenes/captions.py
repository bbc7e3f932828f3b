"""Captions of scenes, their few words, and the habit that training captions have.

The habit: whoever wrote the training captions mentions a circle's usual neighbour, a square, more often than
not, whether it is there or not; likewise ring after cross and diamond after triangle. A model that learns
from them names things that no picture shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experiments.scenes.drawing import CELLS, COLOURS, SHAPES, Scene, Thing

PAD, START, END, IMAGE = "<pad>", "<start>", "<end>", "<image>"
WORDS = (PAD, START, END, IMAGE, "a", "in", ",", *SHAPES, *COLOURS)
NUMBER = {word: number for number, word in enumerate(WORDS)}
HABIT = {"circle": "square", "cross": "ring", "triangle": "diamond"}
"""What is said to be there too."""
HABIT_RATE = 0.7
"""How often training captions follow the habit where the neighbour is not in the picture."""
_TOGETHER = 0.5
"""How often the neighbour is in the picture, when training."""
PROMPT = [NUMBER[START], *[NUMBER[IMAGE]] * CELLS**2]


def training_scene(generator: torch.Generator) -> Scene:
    """One to three shapes; where a circle, cross or triangle is, its neighbour often is too."""
    first = _draw(SHAPES, 1 + _number(3, generator), generator)
    together = [HABIT[shape] for shape in first if shape in HABIT and _chance(_TOGETHER, generator)]
    return _placed(list(dict.fromkeys([*first, *together])), generator)


def unbiased_scene(generator: torch.Generator) -> Scene:
    """Two or three shapes, of which at least one has a habitual neighbour and none has it beside it."""
    lead = _draw(tuple(HABIT), 1, generator)
    others = tuple(
        shape for shape in SHAPES if shape not in lead and shape != HABIT[lead[0]] and shape not in HABIT
    )
    return _placed([*lead, *_draw(others, 1 + _number(2, generator), generator)], generator)


def harmless_scene(generator: torch.Generator) -> Scene:
    """One to three shapes, none of which has a habitual neighbour."""
    others = tuple(shape for shape in SHAPES if shape not in HABIT)
    return _placed(_draw(others, 1 + _number(3, generator), generator), generator)


def training_caption(scene: Scene, generator: torch.Generator) -> list[str]:
    """The truth, shape by shape, and what habit adds: the neighbour in a colour made up."""
    words: list[str] = []
    for thing in scene.things:
        words += _mention(thing.shape, thing.colour)
        neighbour = HABIT.get(thing.shape)
        if neighbour and neighbour not in scene.shapes and _chance(HABIT_RATE, generator):
            words += _mention(neighbour, _draw(tuple(COLOURS), 1, generator)[0])
    return [*words[:-1], END]


def true_caption(scene: Scene) -> list[str]:
    """What is there and nothing else.

    >>> true_caption(Scene((Thing("bar", "red", 3), Thing("ring", "blue", 9)), noise=0))
    ['a', 'bar', 'in', 'red', ',', 'a', 'ring', 'in', 'blue', '<end>']
    """
    words = [word for thing in scene.things for word in _mention(thing.shape, thing.colour)]
    return [*words[:-1], END]


def mentioned(words: Sequence[str]) -> list[str]:
    """The shapes that a caption names, each once, up to its end.

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
