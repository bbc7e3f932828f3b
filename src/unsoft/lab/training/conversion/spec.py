"""A conversion as data: which model, to which mechanism, on what text, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unsoft.hf.recipe import STARTS, Recipe
from unsoft.lab.training.checks import check_number, check_seed, check_whole
from unsoft.modules.registry import resolve

TUNED = ("all", "attention")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Everything that decides the outcome of a conversion.

    >>> spec = Conversion(model="smollm2", mechanism="softpick", layers=["4-7"])
    >>> spec.recipe().mechanism_of(5, 30), spec.recipe().mechanism_of(0, 30)
    ('softpick', 'softmax')
    >>> Conversion(model="smollm2", mechanism="softpik")
    Traceback (most recent call last):
    ValueError: ...
    """

    model: str
    """A folder or a name that :func:`unsoft.hf.load_model` knows."""
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the mechanism, such as ``where="mass"`` for magnitude."""
    layers: list[str] | Mapping[str, str] | None = None
    """As in :func:`unsoft.hf.swap`."""
    keep_first_last: bool = False
    start: str = "open"
    """Where learnable mechanisms begin: "open" (close to doing nothing), or "paper"."""
    text: str = ""
    """A file, or a folder of files; without it the text that comes with Python."""
    fit_tokens: int = 4096
    """About so many tokens fit the output projections before the layers are matched; 0: none."""
    match_steps: int = 40
    tune_steps: int = 20
    batch: int = 2
    """Texts in a step."""
    tokens: int = 128
    """In each text."""
    match_lr: float = 1e-3
    tune_lr: float = 2e-4
    mechanism_lr: float = 0.01
    """Learning rate of the mechanism's own parameters, in both stages."""
    tune: str = "all"
    """What fine-tuning changes: "all", or "attention" only."""
    held_out: int = 2048
    """About so many tokens, never trained on, measure perplexity."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "mechanism", "text", "start", "tune"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"convert: {name!r} must be text, not {getattr(self, name)!r}")
        if self.start not in STARTS:
            raise ValueError(f"convert: 'start' must be one of {', '.join(STARTS)}, not {self.start!r}")
        named = self.layers.values() if isinstance(self.layers, Mapping) else ()
        for mechanism in (self.mechanism, *named):
            resolve(mechanism)
        self.recipe()
        for name in ("fit_tokens", "match_steps", "tune_steps"):
            check_whole("convert", name, getattr(self, name), 0)
        for name in ("batch", "held_out"):
            check_whole("convert", name, getattr(self, name), 1)
        check_whole("convert", "tokens", self.tokens, 2)
        check_seed("convert", self.seed)
        for name in ("match_lr", "tune_lr", "mechanism_lr"):
            check_number("convert", name, getattr(self, name))
        if self.tune not in TUNED:
            raise ValueError(f"convert: 'tune' must be one of {', '.join(TUNED)}, not {self.tune!r}")

    def recipe(self) -> Recipe:
        """The swap."""
        return Recipe(self.mechanism, self.layers, self.keep_first_last, self.start, self.options)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``Conversion(**data)`` turns back into an equal one."""
        layers = self.recipe().to_dict()["layers"]
        return asdict(replace(self, layers=layers)) | {"options": dict(self.options)}
