"""A training run as data: what is trained, on what, and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from unsoft.lab.tasks import Task, task
from unsoft.lab.training.checks import check_number, check_seed, check_whole
from unsoft.lab.training.particles import KINDS
from unsoft.modules.build import mechanism as build_mechanism
from unsoft.modules.registry import resolve


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that decides the outcome of a run. What is None is taken from the task's own small setup.

    >>> spec = Spec(task="census", mechanism="magnitude+cog", knobs={"repeats": 4})
    >>> spec.filled().steps, Spec.from_dict(spec.to_dict()) == spec
    (600, True)
    >>> Spec(task="census", mechanism="softmaxx")
    Traceback (most recent call last):
    ValueError: ...
    """

    task: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Difficulty of the task; see ``unsoft tasks --json``."""
    mechanism: str = "softmax"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the mechanism, such as ``where="mass"`` for magnitude."""
    start: str = "paper"
    """Where learnable mechanisms begin: "paper", or "open" (close to doing nothing)."""
    init_from: str = ""
    """A model to start from, instead of a new one: a folder or a name that :func:`unsoft.hf.load_model`
    knows."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    mlp: int | None = None
    """Width inside the perceptron of each layer; twice the model's unless told otherwise."""
    attention_bias: bool = False
    """Biases in the projections of attention: Su 2023 expects those of keys to help relu2."""
    steps: int | None = None
    batch: int | None = None
    lr: float | None = None
    mechanism_lr: float = 0.03
    """Learning rate of the mechanism's own parameters: with the model's they hardly move.

    They have no weight decay.
    """
    weight_decay: float = 0.01
    warmup: int = 50
    seed: int = 0
    bf16: bool = False
    repulse: str = ""
    """Heads that repel each other: "svgd", "spos" or "repel"; see :mod:`unsoft.lab.training.repulsion`."""
    alpha: float = 0.1
    """Strength of the repulsion."""

    def __post_init__(self) -> None:
        made = self.make_task()
        if not isinstance(self.mechanism, str):
            raise TypeError(f"train: 'mechanism' must be a name, not {self.mechanism!r}")
        resolve(self.mechanism)
        for name in ("layers", "width", "heads", "mlp", "steps", "batch"):
            check_whole("train", name, getattr(self, name), 1)
        check_whole("train", "warmup", self.warmup, 0)
        check_seed("train", self.seed)
        for name in ("lr", "mechanism_lr", "weight_decay", "alpha"):
            check_number("train", name, getattr(self, name))
        if self.start not in ("paper", "open"):
            raise ValueError(f"train: 'start' must be paper or open, not {self.start!r}")
        if self.repulse not in ("", *KINDS):
            raise ValueError(f"train: 'repulse' must be one of {', '.join(KINDS)}, not {self.repulse!r}")
        if self.init_from:
            given = [name for name in ("layers", "width", "heads", "mlp") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"train: {given[0]!r} is decided by the model that 'init_from' names")
        try:
            json.dumps(self.to_dict())
        except TypeError as error:
            raise TypeError(f"train: knobs and options must be plain data: {error}") from None
        if not self.init_from:
            self._check_sizes(made)

    def _check_sizes(self, made: Task) -> None:
        full = self._filled(made)
        assert full.width is not None and full.heads is not None
        if full.width % (2 * full.heads):
            raise ValueError(
                f"train: a width of {full.width} does not give {full.heads} heads an even width each"
            )
        if made.kind == "features" and full.width < made.size:
            raise ValueError(
                f"train: {self.task} has {made.size} features, so 'width' must be at least that, not"
                f" {full.width}"
            )
        if self.repulse and full.heads == 1:
            raise ValueError("train: 'repulse' pushes heads apart, so it needs at least 2 'heads', not 1")
        if self.options:
            width = full.width // full.heads
            with torch.random.fork_rng(devices=[]):  # some mechanisms start at random
                build_mechanism(
                    self.mechanism, heads=full.heads, head_dim=width, layers=full.layers, **self.options
                )

    def make_task(self) -> Task:
        """The task at its difficulty."""
        return task(self.task, **self.knobs)

    def filled(self) -> Spec:
        """The same run with nothing left open."""
        return self._filled(self.make_task())

    def _filled(self, made: Task) -> Spec:
        setup = made.setup
        names = (
            ("steps", "batch", "lr")
            if self.init_from
            else ("layers", "width", "heads", "steps", "batch", "lr")
        )
        missing = {name: getattr(setup, name) for name in names if getattr(self, name) is None}
        full = _changed(self, **missing)
        if full.mlp is None and full.width is not None:
            full = _changed(full, mlp=2 * full.width)
        return full

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` turns back into an equal spec."""
        return asdict(self) | {"knobs": dict(self.knobs), "options": dict(self.options)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Spec:
        """The inverse of :meth:`to_dict`."""
        known = {one.name for one in fields(Spec)}
        for name in content:
            if name not in known:
                raise ValueError(f"train: a spec has no {name!r}; it has {', '.join(sorted(known))}")
        return Spec(**content)


def _changed(spec: Spec, **changes: Any) -> Spec:
    """A changed copy without another check, which would make the task again."""
    made = object.__new__(Spec)
    for one in fields(Spec):
        object.__setattr__(made, one.name, changes.get(one.name, getattr(spec, one.name)))
    return made
