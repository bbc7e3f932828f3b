"""A training run as data: the task, the mechanism, the model and the schedule; and its tokens, FLOPs and
memory, before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from unsoft.checks import finite, one_of, whole_number
from unsoft.lab.tasks import Setup, Task, task
from unsoft.modules.build import mechanism as build_mechanism
from unsoft.modules.build import names_in
from unsoft.modules.registry import resolve

_LATER = ("rotary", "init_std", "beta2", "final_lr", "evaluations", "eval_tokens")
"""Fields that are stored only if they are set: runs that were stored before these existed keep their keys."""
REPULSIONS = ("svgd", "spos", "repel")
"""Kinds of repulsion between heads; see :mod:`unsoft.lab.training.repulsion`."""
_STATE = 16
"""Bytes of a parameter: the weight, its gradient and two moments of AdamW."""
_FEATURES, _INSIDE, _LOGITS = 16, 4, 3
"""Numbers of 4 bytes that a token keeps for the backward pass: for each layer, times the width and the width
of the MLP; and times the outputs."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that decides the outcome of a run. The task's small setup replaces values that are None.

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
    """Initial values of learnable mechanisms: "paper", or "open" (close to doing nothing)."""
    init_from: str = ""
    """A model to start from instead of a new one: a folder or a name of :func:`unsoft.hf.load_model`."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    mlp: int | None = None
    """Width inside the MLP of each layer; twice the model's by default."""
    init_std: float | None = None
    """Standard deviation of initial weights; 0.8 over the root of the width by default."""
    attention_bias: bool = False
    """Biases in the projections of attention: Su 2023 expects those of keys to help relu2."""
    rotary: bool | None = None
    """Use rotary positions; the task decides if None."""
    steps: int | None = None
    batch: int | None = None
    lr: float | None = None
    mechanism_lr: float = 0.03
    """Learning rate of the mechanism's own parameters, without weight decay: with the model's rate they
    hardly change.
    """
    weight_decay: float | None = None
    beta2: float | None = None
    """Second decay rate of AdamW; 0.98 by default."""
    final_lr: float | None = None
    """Share of the learning rate at which the cosine schedule ends; 0 by default."""
    warmup: int = 50
    seed: int = 0
    bf16: bool = False
    evaluations: int | None = None
    """Validations during the run; 10 by default."""
    eval_tokens: int | None = None
    """Tokens of a validation and of every test but the main one, which has four times as many; by default
    all have about 65,536, at least 256 answers and at most 4,096 examples."""
    repulse: str = ""
    """Repulsion between heads: "svgd", "spos" or "repel"; see :mod:`unsoft.lab.training.repulsion`."""
    alpha: float = 0.1
    """Strength of the repulsion."""

    def __post_init__(self) -> None:
        made = self.make_task()
        if not isinstance(self.mechanism, str):
            raise TypeError(f"train: 'mechanism' must be a name, not {self.mechanism!r}")
        for name in names_in(self.mechanism):
            resolve(name)
        for name in ("layers", "width", "heads", "mlp", "steps", "batch", "evaluations", "eval_tokens"):
            check_whole("train", name, getattr(self, name))
        for name in ("warmup", "seed"):
            check_whole("train", name, getattr(self, name), 0)
        for name in ("lr", "mechanism_lr", "weight_decay", "alpha", "init_std"):
            check_not_negative("train", name, getattr(self, name))
        for name in ("beta2", "final_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= finite("train", name, value) <= 1:
                raise ValueError(f"train: argument {name!r} must be from 0 to 1, not {value}")
        one_of("train", "start", self.start, ("paper", "open"))
        if self.repulse:
            one_of("train", "repulse", self.repulse, REPULSIONS)
        try:
            json.dumps(self.to_dict())
        except TypeError as error:
            raise TypeError(f"train: knobs and options must be plain data: {error}") from None
        if not self.init_from:
            self._check_sizes(made)
        elif given := [
            name for name in ("layers", "width", "heads", "mlp") if getattr(self, name) is not None
        ]:
            raise ValueError(f"train: {given[0]!r} is decided by the model that 'init_from' names")

    def _check_sizes(self, made: Task) -> None:
        sizes = {name: getattr(self, name) for name in ("layers", "width", "heads")} | self._defaults(made)
        width, heads = sizes["width"], sizes["heads"]
        if width % (2 * heads):
            raise ValueError(f"train: a width of {width} does not give {heads} heads an even width each")
        if made.kind == "features" and width < made.size:
            raise ValueError(
                f"train: {self.task} has {made.size} features, so 'width' must be at least that, not {width}"
            )
        if self.repulse and heads == 1:
            raise ValueError("train: 'repulse' pushes heads apart, so it needs at least 2 'heads', not 1")
        if self.options:
            sizes = {"heads": heads, "head_dim": width // heads, "layers": sizes["layers"]}
            with torch.random.fork_rng(devices=[]):  # some mechanisms have random initial values
                build_mechanism(self.mechanism, **sizes, **self.options)

    def make_task(self) -> Task:
        """Return the task at its difficulty."""
        return task(self.task, **self.knobs)

    def filled(self) -> Spec:
        """Return the run with every None replaced by the task's default."""
        return replace(self, **self._defaults(self.make_task()))

    def _defaults(self, made: Task) -> dict[str, Any]:
        """Return the values of the task's setup for what is None."""
        sizes = ("layers", "width", "heads", "mlp", "init_std")
        names = [one.name for one in fields(Setup) if not (self.init_from and one.name in sizes)]
        known = {one.name for one in fields(Spec)}
        defaults = {
            name: getattr(made.setup, name) for name in names if name in known and getattr(self, name) is None
        }
        width = defaults.get("width", self.width)
        if defaults.get("mlp", self.mlp) is None and width is not None:
            defaults["mlp"] = 2 * width
        return defaults

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` turns back into an equal spec."""
        content = asdict(self) | {"knobs": dict(self.knobs), "options": dict(self.options)}
        for name in _LATER:
            if content[name] is None:
                del content[name]
        return content

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Spec:
        """Return the spec of :meth:`to_dict`."""
        known = {one.name for one in fields(Spec)}
        for name in content:
            if name not in known:
                raise ValueError(f"train: a spec has no {name!r}; it has {', '.join(sorted(known))}")
        return Spec(**content)


def check_whole(who: str, name: str, value: object, low: int = 1) -> None:
    """Raise unless ``value`` is None or a whole number of at least ``low`` and below 2**32.

    Larger numbers overflow a random seed or the length of a range.
    """
    if value is not None and whole_number(who, name, value, low) >= 1 << 32:
        raise ValueError(f"{who}: argument {name!r} must be less than 2**32, not {value}")


def check_not_negative(who: str, name: str, value: object) -> None:
    """Raise unless ``value`` is None or a finite number of at least 0."""
    if value is not None and finite(who, name, value) < 0:
        raise ValueError(f"{who}: argument {name!r} must be a number of at least 0, not {value}")


def tokens_per_step(spec: Spec) -> int:
    """Return the tokens of a batch at the task's own difficulty; an image counts as one.

    >>> from unsoft.lab.training import Spec
    >>> tokens_per_step(Spec(task="copy", knobs={"length": 8}, batch=4).filled())
    64
    """
    task = spec.make_task()
    assert spec.batch is not None
    if task.name == "language":  # without its corpus
        return spec.batch * int(spec.knobs.get("length", task.knobs()["length"]))
    return spec.batch * (1 if task.kind == "image" else task.sample(1).inputs.shape[1])


def flops_per_step(spec: Spec) -> float:
    """Return the FLOPs of a training step: 6 for each token and parameter, and 12 for each token, layer,
    feature and key (Chowdhery 2022, PaLM). Mechanisms count alike.
    """
    assert spec.width and spec.layers and spec.batch
    tokens = tokens_per_step(spec)
    return tokens * (6.0 * _weights(spec) + 12 * spec.layers * spec.width * (tokens // spec.batch))


def memory_of(spec: Spec) -> int:
    """Return about how many bytes a run of tokens needs at its peak.

    >>> memory_of(Spec(task="copy", width=64).filled()) < memory_of(Spec(task="copy", width=128).filled())
    True
    """
    assert spec.width and spec.layers and spec.mlp
    layer = _FEATURES * spec.width + _INSIDE * spec.mlp
    kept = 4 * tokens_per_step(spec) * (spec.layers * layer + _LOGITS * spec.make_task().outputs)
    return _STATE * _weights(spec) + kept


def _weights(spec: Spec) -> int:
    assert spec.width and spec.layers and spec.mlp
    layer = 4 * spec.width**2 + 3 * spec.width * spec.mlp
    return spec.layers * layer + spec.width * spec.make_task().outputs


def check_memory(spec: Spec, runs: int = 1) -> None:
    """Raise ValueError if so many runs at a time need more memory than this machine, or its GPU, has free."""
    if spec.init_from or spec.make_task().kind != "tokens":
        return
    needed, free = runs * memory_of(spec), _free()
    if needed > free:
        many = "this run needs" if runs == 1 else f"{runs} runs at a time need"
        remedy = "" if runs == 1 else ", or use fewer workers"
        raise ValueError(
            f"train: {many} about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free;"
            f" make 'batch', 'width' or 'layers' smaller{remedy}"
        )


def _free() -> int:
    """Return the free bytes of the device that trains."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil  # type: ignore[import-untyped]  # accelerate needs it, too

    return int(psutil.virtual_memory().available)
