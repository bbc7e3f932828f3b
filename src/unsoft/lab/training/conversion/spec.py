"""A conversion as data: the model, the mechanism, the text and the schedule; and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unsoft.checks import one_of
from unsoft.hf.recipe import STARTS, Recipe
from unsoft.lab.training.spec import check_not_negative, check_whole
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
    """A folder or a name of :func:`unsoft.hf.load_model`."""
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the mechanism, such as ``where="mass"`` for magnitude."""
    layers: list[str] | Mapping[str, str] | None = None
    """Layers to change, as in :func:`unsoft.hf.swap`."""
    keep_first_last: bool = False
    start: str = "open"
    """Initial values of learnable mechanisms: "open" (close to doing nothing), or "paper"."""
    text: str = ""
    """A file, or a folder of files; "" for the text that comes with Python."""
    fit_tokens: int = 4096
    """About how many tokens fit the output projections before the layers are matched; 0: no fit."""
    shift: float = 12.0
    """How far the fit shifts rows of logits if the formula then becomes softmax (cog, sinh, softpick): the
    strongest negative weight starts at exp(-shift) of the largest one; 0: no shift."""
    match_steps: int = 40
    tune_steps: int = 20
    batch: int = 2
    """Texts per step."""
    tokens: int = 128
    """Tokens per text."""
    match_lr: float = 1e-3
    tune_lr: float = 2e-4
    mechanism_lr: float = 0.01
    """Learning rate of the mechanism's own parameters, in both stages."""
    tune: str = "all"
    """Parameters that fine-tuning changes: "all", or "attention" only."""
    held_out: int = 2048
    """About how many tokens, never trained on, measure perplexity."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "mechanism", "text", "start", "tune"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"convert: {name!r} must be text, not {getattr(self, name)!r}")
        one_of("convert", "start", self.start, STARTS)
        one_of("convert", "tune", self.tune, TUNED)
        named = self.layers.values() if isinstance(self.layers, Mapping) else ()
        for mechanism in (self.mechanism, *named):
            resolve(mechanism)
        self.recipe()
        for low, names in enumerate(
            (("fit_tokens", "match_steps", "tune_steps", "seed"), ("batch", "held_out"), ("tokens",))
        ):
            for name in names:
                check_whole("convert", name, getattr(self, name), low)
        for name in ("shift", "match_lr", "tune_lr", "mechanism_lr"):
            check_not_negative("convert", name, getattr(self, name))

    def recipe(self) -> Recipe:
        """Return the swap."""
        return Recipe(self.mechanism, self.layers, self.keep_first_last, self.start, self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``Conversion(**data)`` turns back into an equal one."""
        layers = self.recipe().to_dict()["layers"]
        return asdict(replace(self, layers=layers)) | {"options": dict(self.options)}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Perplexities and layer errors of a finished conversion."""

    spec: Mapping[str, Any]
    perplexity: Mapping[str, float]
    """On held-out text: of the original, and after the swap and each stage that ran."""
    margin: Mapping[str, float]
    """Half the width of the 95 % confidence interval of the difference to the original's loss, paired by
    text; 0 for the original."""
    layer_errors: Mapping[str, list[float]]
    """|ours - original|^2 / |original|^2 of the attention output of each changed layer, given the original's
    input, on the same text."""
    tokens: Mapping[str, int]
    """Tokens seen in each stage."""
    seconds: Mapping[str, float]
    """Time of each stage, without measurements and without steps that an interruption lost."""
    cpu_seconds: Mapping[str, float]
    """Processor time of each stage, summed over cores; other programs do not affect it."""
    kept: str = ""
    """The stage whose weights were saved: the one with the lowest loss on held-out text. "" in results of
    older versions, which saved the last stage."""
    parameters: int
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``Converted(**data)`` turns back into an equal one."""
        return asdict(self)
