"""Base classes and registry of tasks: data with a known answer, and the score of a model on it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from unsoft.checks import did_you_mean, finite, one_of, whole_number
from unsoft.lab.tasks.draw import generator, integers

IGNORE = -100
"""The label of positions without a question, as in torch and transformers."""


class Batch(NamedTuple):
    """Examples of a task. A label at position i depends on inputs up to i only."""

    inputs: Tensor
    """Tokens (batch, length), features (batch, length, size) or images (batch, channels, height, width)."""
    labels: Tensor
    """The right answer at positions with a question, IGNORE elsewhere; (batch, length), or (batch,) for
    images.
    """


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
    """Use rotary positions; without them a model knows the order of the inputs only through causality."""
    weight_decay: float = 0.01
    mlp: int | None = None
    """Further fields of :class:`unsoft.lab.training.Spec`; None for its defaults."""
    beta2: float | None = None
    final_lr: float | None = None
    init_std: float | None = None
    evaluations: int | None = None
    eval_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The base of every task. A task is a frozen dataclass whose fields are the knobs of its difficulty.

    A custom task defines its name, what it tests, the sizes of inputs and outputs, how examples are
    drawn and how they are solved; :func:`unsoft.lab.tasks.register` adds it to ``unsoft tasks`` and ``unsoft
    train``.

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
    """Difference between mechanisms that the task shows, in one line."""
    source: ClassVar[str] = ""
    """Publication that introduced it."""
    kind: ClassVar[str] = "tokens"
    """Kind of the inputs: "tokens", "features" or "image"."""
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    difficulty: ClassVar[str] = ""
    """The knob that is small in training and large in some tests; "" if there is none."""

    @property
    def setup(self) -> Setup:
        """Small model and schedule that learn the task."""
        return Setup()

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of tokens or features, or the side of an image."""

    @property
    def outputs(self) -> int:
        """Number of outputs of a model at each position; one for each token by default."""
        return self.size

    @property
    def answers_in_tokens(self) -> bool:
        """True if labels are tokens of the inputs. Models then share the embedding, without which they learn
        to copy late.
        """
        return False

    @property
    def choices(self) -> range:
        """Labels among which a model without information would guess; all by default."""
        return range(self.outputs)

    @abstractmethod
    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        """Draw examples, for training or for the test of exactly this difficulty."""

    def draw_validation(self, count: int, random: torch.Generator) -> Batch:
        """Draw validation examples, by which settings are chosen; like those of the test by default. A task
        with a fixed dataset must reserve a part of it."""
        return self.draw(count, random, training=False)

    @abstractmethod
    def solve(self, inputs: Tensor) -> Tensor:
        """Return the outputs of a known solution, (batch, length, outputs)."""

    def shortcut(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs of a mechanism that lacks what the task tests; None if there is no such
        fallback.
        """
        return None

    def at_rest(self, labels: Tensor) -> Tensor | None:
        """Return the positions at which the right answer is to do nothing, (batch, length); None if there
        are none.
        """
        return None

    def difficulties(self) -> tuple[int, ...]:
        """Return the values of the knob :attr:`difficulty` at which models are tested, from easy to hard."""
        return ()

    def sweep(self) -> tuple[Task, ...]:
        """Return the task at each of these values.

        >>> import unsoft
        >>> [task.repeats for task in unsoft.lab.tasks.task("census").sweep()]
        [1, 2, 4, 8, 16, 64, 512]
        """
        return tuple(replace(self, **{self.difficulty: value}) for value in self.difficulties())

    def further(self) -> Mapping[str, Task]:
        """Return further tests by label; a rule can judge them like those of :meth:`sweep`."""
        return {}

    def positions(self, inputs: Tensor) -> Tensor | None:
        """Return the position of each token in its document, for tasks that pack several into a row."""
        return None

    def prepare(self) -> None:
        """Download or build what the task needs, once for many runs; ValueError if that cannot be used."""
        return None

    def files(self) -> Mapping[str, str]:
        """Return further files for the folder of a run: names and contents."""
        return {}

    @property
    def chance(self) -> float:
        """The score of one who does not look at the inputs, in expectation."""
        return 1 / len(self.choices)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Return the outputs of a guess without the inputs; ``labels`` only mark the questions."""
        return chosen(integers(len(self.choices), labels.shape, random) + self.choices.start, self.outputs)

    def sample(
        self, count: int, *, seed: int = 0, index: int = 0, training: bool = False, validation: bool = False
    ) -> Batch:
        """Return batch number ``index`` of a stream; seeds, training and test have independent streams."""
        if count < 1:
            raise ValueError(f"{self.name}: argument 'count' must be at least 1, not {count}")
        if training and validation:
            raise ValueError(f"{self.name}: give 'training' or 'validation', not both")
        random = generator(seed, "training" if training else "test", index)
        return self.draw_validation(count, random) if validation else self.draw(count, random, training)

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return one number for every answer; their mean is the score."""
        answers, targets = asked(outputs, labels)
        return (answers.argmax(-1) == targets).float()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss."""
        answers, targets = asked(outputs, labels)
        return torch.nn.functional.cross_entropy(answers.float(), targets)

    def score(self, outputs: Tensor, labels: Tensor) -> float:
        """Return the mean of :meth:`grade`."""
        return self.grade(outputs, labels).mean().item()

    def known(self, count: int = 256, seed: int = 0) -> float:
        """Return the score of the known solution on ``count`` test examples."""
        batch = self.sample(count, seed=seed)
        return self.score(self.solve(batch.inputs), batch.labels)

    def shortcut_score(self, count: int = 256, seed: int = 0) -> float | None:
        """Return the score of the shortcut on the same examples; None if there is none."""
        batch = self.sample(count, seed=seed)
        outputs = self.shortcut(batch.inputs)
        return None if outputs is None else self.score(outputs, batch.labels)

    def knobs(self) -> dict[str, Any]:
        """Return the difficulty as plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def require(self, condition: bool, problem: str) -> None:
        """Raise ValueError unless ``condition``."""
        if not condition:
            raise ValueError(f"{self.name}: {problem}")

    def at_least(self, minimum: int, *knobs: str) -> None:
        """Raise unless the knobs are whole numbers of at least ``minimum``."""
        for knob in knobs:
            whole_number(self.name, knob, getattr(self, knob), minimum)

    def between(self, low: float, high: float, *knobs: str) -> None:
        """Raise unless the knobs are numbers from ``low`` to ``high``."""
        for knob in knobs:
            value = finite(self.name, knob, getattr(self, knob))
            self.require(low <= value <= high, f"{knob!r} must be from {low:g} to {high:g}, not {value:g}")

    def one_of(self, knob: str, *values: str) -> None:
        """Raise ValueError unless the knob has one of these values."""
        one_of(self.name, knob, getattr(self, knob), values)


def asked(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs (answers, choices) and labels (answers,) of the positions with a question."""
    is_asked = labels != IGNORE
    return outputs.reshape(*labels.shape, -1)[is_asked], labels[is_asked]


def chosen(answers: Tensor, outputs: int) -> Tensor:
    """Return outputs that are 1 for the chosen label and 0 for all others.

    >>> chosen(torch.tensor([[0, 2]]), 3)
    tensor([[[1., 0., 0.], [0., 0., 1.]]])
    """
    return torch.nn.functional.one_hot(answers.clamp(min=0), outputs).float()


def labelled_last(inputs: Tensor, answers: Tensor) -> Batch:
    """Return a batch whose questions are the last positions: ``answers`` is (batch, questions)."""
    labels = torch.full(inputs.shape[:2], IGNORE)
    labels[:, inputs.shape[1] - answers.shape[1] :] = answers
    return Batch(inputs, labels)


@dataclass(frozen=True, kw_only=True)
class MarkedTokens(Task):
    """Base of tasks with ``length`` random tokens and a mark, the token with the largest number."""

    length: int = 16
    vocabulary: int = 16

    def __post_init__(self) -> None:
        self.at_least(1, "length")
        self.at_least(2, "vocabulary")

    @property
    def size(self) -> int:
        return self.vocabulary + 1


_registered: dict[str, type[Task]] = {}

Kind = TypeVar("Kind", bound=type[Task])


def register(kind: Kind) -> Kind:
    """Register a task class under its ``name``; a decorator.

    >>> @register
    ... class Again:
    ...     pass
    Traceback (most recent call last):
    TypeError: register: expected a class of unsoft.lab.tasks.Task, not Again
    """
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise TypeError(
            "register: expected a class of unsoft.lab.tasks.Task,"
            f" not {getattr(kind, '__name__', repr(kind))}"
        )
    for needed in ("name", "tells"):
        if not getattr(kind, needed, ""):
            raise ValueError(f"register: {kind.__name__} has no {needed!r}")
    if not dataclasses.is_dataclass(kind) or "__dataclass_params__" not in vars(kind):
        raise TypeError(f"register: {kind.__name__} must be a dataclass(frozen=True, kw_only=True)")
    for knob in dataclasses.fields(kind):
        if knob.default is dataclasses.MISSING and knob.default_factory is dataclasses.MISSING:
            raise TypeError(f"register: the knob {knob.name!r} of {kind.__name__} needs a default")
    if _registered.get(kind.name, kind) is not kind:
        raise ValueError(f"register: a task called {kind.name!r} exists already")
    _registered[kind.name] = kind
    return kind


def tasks() -> dict[str, type[Task]]:
    """Return every task class by name, sorted."""
    _import_all()
    return dict(sorted(_registered.items()))


@cache
def _import_all() -> None:
    """Import the file of every task. Threads that come here together import each file once."""
    package = importlib.import_module("unsoft.lab.tasks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"unsoft.lab.tasks.{module.name}")


def task(name: str, **knobs: Any) -> Task:
    """Return the task called ``name``, with the difficulty that the knobs set.

    >>> task("copy", length=8).length
    8
    >>> task("recal")
    Traceback (most recent call last):
    ValueError: task: no task is called 'recal'; did you mean 'recall'?
    >>> task("copy", lenght=8)
    Traceback (most recent call last):
    ValueError: copy: no knob is called 'lenght'; there are length, vocabulary
    """
    known = tasks()
    if name not in known:
        hint = did_you_mean(str(name), known) or f"; there are {', '.join(known)}"
        raise ValueError(f"task: no task is called {name!r}{hint}")
    kind = known[name]
    names = [field.name for field in dataclasses.fields(kind)]
    for knob in knobs:
        if knob not in names:
            raise ValueError(f"{name}: no knob is called {knob!r}; there are {', '.join(names)}")
    return kind(**knobs)
