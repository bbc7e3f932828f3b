"""What a task is: data with a known answer, and everything needed to judge a model on it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import generator, integers

IGNORE = -100
"""The label of a position at which nothing is asked, as in torch and transformers."""


class Batch(NamedTuple):
    """Examples of a task. What the model sees at position i may only be asked for at i or later."""

    inputs: Tensor
    """Tokens (batch, length), features (batch, length, size) or images (batch, channels, height, width)."""
    labels: Tensor
    """The right answer at every position that is asked, IGNORE elsewhere; (batch, length),
    or (batch,) for images."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A small model and schedule that learn a task in minutes on two cores."""

    layers: int = 1
    width: int = 64
    heads: int = 1
    steps: int = 1500
    lr: float = 0.003
    batch: int = 64
    positions: bool = False
    """Rotary positions; without them the order of the inputs can only be seen through causality."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The base of every task. A task is a frozen dataclass whose fields are the knobs of its difficulty.

    A task of your own says its name, what it tells apart, what goes in and out, how examples are drawn and
    how they are solved; :func:`unsoft.lab.tasks.register` makes it known to ``unsoft tasks`` and
    ``unsoft train``.

    >>> import unsoft
    >>> task = unsoft.lab.tasks.task("recall", pairs=4, length=32, values=64)
    >>> inputs, labels = task.sample(2, seed=0)
    >>> inputs.shape, int((labels != -100).sum())
    (torch.Size([2, 32]), 8)
    >>> task.score(task.solve(inputs), labels), round(task.chance, 4)
    (1.0, 0.0156)
    """

    name: ClassVar[str]
    tells: ClassVar[str]
    """What the task tells apart, in one line."""
    source: ClassVar[str] = ""
    """Where it comes from."""
    kind: ClassVar[str] = "tokens"
    """What the inputs are: "tokens", "features" or "image"."""
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    difficulty: ClassVar[str] = ""
    """The knob that is small in training and large in some tests; "" if there is none."""

    @property
    def setup(self) -> Setup:
        """The small model and schedule that learn it."""
        return Setup()

    @property
    @abstractmethod
    def size(self) -> int:
        """Of the inputs: how many tokens or features there are, or the side of an image."""

    @property
    def outputs(self) -> int:
        """How many numbers a model gives at each position: one for each token, unless said otherwise."""
        return self.size

    @property
    def answers_in_tokens(self) -> bool:
        """Are labels tokens of the inputs?

        Models then have one embedding for both, without which copying starts late.
        """
        return False

    @property
    def choices(self) -> range:
        """The labels among which one who knows nothing would guess: all, unless said otherwise."""
        return range(self.outputs)

    @abstractmethod
    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        """Examples, for training or for the test of exactly this difficulty."""

    def draw_validation(self, count: int, random: torch.Generator) -> Batch:
        """Examples by which settings are chosen: as those of the test, unless said otherwise. A task with a
        fixed stock of data must keep some of it for validation alone."""
        return self.draw(count, random, training=False)

    @abstractmethod
    def solve(self, inputs: Tensor) -> Tensor:
        """A known solution: from inputs what a model would give, (batch, length, outputs)."""

    def shortcut(self, inputs: Tensor) -> Tensor | None:
        """What a mechanism falls back on that lacks what the task asks for; None if nothing particular."""
        return None

    def at_rest(self, labels: Tensor) -> Tensor | None:
        """Positions at which the right thing is to do nothing, (batch, length); None if there are none."""
        return None

    def difficulties(self) -> tuple[int, ...]:
        """Values of the knob :attr:`difficulty` at which models are tested, from easy to hard."""
        return ()

    def sweep(self) -> tuple[Task, ...]:
        """The same task at each of these values.

        >>> import unsoft
        >>> [task.repeats for task in unsoft.lab.tasks.task("census").sweep()]
        [1, 2, 4, 8, 16, 64]
        """
        return tuple(replace(self, **{self.difficulty: value}) for value in self.difficulties())

    def files(self) -> Mapping[str, str]:
        """What else belongs in the folder of a run on this task: names and contents."""
        return {}

    @property
    def chance(self) -> float:
        """The score of one who does not look at the inputs, in expectation."""
        return 1 / len(self.choices)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """What one who does not look at the inputs would give; ``labels`` only says what is asked."""
        return chosen(integers(len(self.choices), labels.shape, random) + self.choices.start, self.outputs)

    def sample(
        self,
        count: int,
        *,
        seed: int = 0,
        index: int = 0,
        training: bool = False,
        validation: bool = False,
    ) -> Batch:
        """Batch number ``index`` of a stream; the streams of different seeds, and of training and test,
        have nothing in common."""
        if count < 1:
            raise ValueError(f"{self.name}: argument 'count' must be at least 1, not {count}")
        if training and validation:
            raise ValueError(f"{self.name}: give 'training' or 'validation', not both")
        random = generator(seed, "training" if training else "test", index)
        return self.draw_validation(count, random) if validation else self.draw(count, random, training)

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """One number for every answer; their mean is the score."""
        found, wanted = asked(outputs, labels)
        return (found.argmax(-1) == wanted).float()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What training lowers."""
        found, wanted = asked(outputs, labels)
        return torch.nn.functional.cross_entropy(found.float(), wanted)

    def score(self, outputs: Tensor, labels: Tensor) -> float:
        """The mean of :meth:`grade`."""
        return self.grade(outputs, labels).mean().item()

    def known(self, count: int = 256, seed: int = 0) -> float:
        """The score of the known solution, computed on ``count`` test examples."""
        batch = self.sample(count, seed=seed)
        return self.score(self.solve(batch.inputs), batch.labels)

    def shortcut_score(self, count: int = 256, seed: int = 0) -> float | None:
        """The score of the shortcut on the same examples."""
        batch = self.sample(count, seed=seed)
        found = self.shortcut(batch.inputs)
        return None if found is None else self.score(found, batch.labels)

    def knobs(self) -> dict[str, Any]:
        """The difficulty as plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def require(self, holds: bool, problem: str) -> None:
        """ValueError unless it holds."""
        if not holds:
            raise ValueError(f"{self.name}: {problem}")

    def at_least(self, minimum: int, *knobs: str) -> None:
        """ValueError unless the knobs are whole numbers that large."""
        for knob in knobs:
            value = getattr(self, knob)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{self.name}: {knob!r} must be a whole number, not {value!r}")
            self.require(value >= minimum, f"{knob!r} must be at least {minimum}, not {value}")

    def between(self, low: float, high: float, *knobs: str) -> None:
        """ValueError unless the knobs are numbers in that range."""
        for knob in knobs:
            value = getattr(self, knob)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{self.name}: {knob!r} must be a number, not {value!r}")
            self.require(
                low <= value <= high and math.isfinite(value),
                f"{knob!r} must be from {low:g} to {high:g}, not {value:g}",
            )

    def one_of(self, knob: str, *values: str) -> None:
        """ValueError unless the knob has one of these values."""
        value = getattr(self, knob)
        self.require(value in values, f"{knob!r} must be one of {', '.join(values)}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Retelling(Task):
    """The base of tasks whose answers are tokens of the inputs."""

    @property
    def answers_in_tokens(self) -> bool:
        return True


def asked(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs at the positions that are asked, (answers, choices), and their labels, (answers,)."""
    there = labels != IGNORE
    return outputs.reshape(*labels.shape, -1)[there], labels[there]


def chosen(answers: Tensor, outputs: int) -> Tensor:
    """Answers as a sure model gives them: 1 for the label that is chosen, 0 for all others.

    >>> chosen(torch.tensor([[0, 2]]), 3)
    tensor([[[1., 0., 0.], [0., 0., 1.]]])
    """
    return torch.nn.functional.one_hot(answers.clamp(min=0), outputs).float()


def labelled_last(inputs: Tensor, answers: Tensor) -> Batch:
    """A batch in which the last positions are asked: ``answers`` is (batch, how many)."""
    labels = torch.full(inputs.shape[:2], IGNORE)
    labels[:, inputs.shape[1] - answers.shape[1] :] = answers
    return Batch(inputs, labels)
