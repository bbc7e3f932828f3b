"""What was swapped, as data: the arguments of ``swap``, as they stand in a model's config.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unsoft.formula import Formula
from unsoft.hf.layers import select, select_all
from unsoft.mechanisms.core.build import mechanism as build_mechanism
from unsoft.mechanisms.core.module import Mechanism, Place
from unsoft.mechanisms.core.registry import foreign_homes, names

STARTS = ("open", "paper")
KEPT = "softmax"
"""What layers run that are not named, or kept."""


@dataclass(frozen=True)
class Recipe:
    """See :func:`unsoft.hf.swap` for the arguments.

    >>> recipe = Recipe("cog", layers={0: "softmax", "2-": "relu2"})
    >>> [recipe.mechanism_of(layer, 4) for layer in range(4)]
    ['softmax', 'cog', 'relu2', 'relu2']
    >>> Recipe.from_dict(recipe.to_dict()).to_dict() == recipe.to_dict()
    True
    """

    mechanism: str | Formula
    layers: int | str | Collection[int | str] | Mapping[int | str, str | Formula] | None = None
    keep_first_last: bool = False
    init: str = "open"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = list(self.layers.values()) if isinstance(self.layers, Mapping) else []
        for mechanism in (self.mechanism, *named):
            if not isinstance(mechanism, (str, Formula)):
                raise TypeError(
                    f"swap: a mechanism is a name or a Formula, not {type(mechanism).__name__} ({mechanism!r})"
                )
        if isinstance(self.layers, (str, int)):
            object.__setattr__(self, "layers", [self.layers])
        if self.layers is not None and not isinstance(self.layers, Collection):
            raise TypeError(
                f"swap: argument 'layers' must be numbers and ranges, or a mapping from them to mechanisms, not"
                f" {type(self.layers).__name__}"
            )
        if self.init not in STARTS:
            raise ValueError(f"swap: argument 'init' must be one of {', '.join(STARTS)}, not {self.init!r}")
        try:
            json.dumps(dict(self.options))
        except TypeError as error:
            raise TypeError(
                f"swap: options are kept in config.json, so they must be plain data: {error}"
            ) from None

    def mechanism_of(self, layer: int, layers: int) -> str | Formula:
        """What layer number ``layer`` of ``layers`` runs; the last entry that names it counts."""
        if self.keep_first_last and layer in (0, layers - 1):
            return KEPT
        if isinstance(self.layers, Mapping):
            found = [what for which, what in self.layers.items() if layer in select(which, layers)]
            return found[-1] if found else self.mechanism
        if isinstance(self.layers, Collection) and layer not in select_all(self.layers, layers):
            return KEPT
        return self.mechanism

    def build(self, place: Place) -> Mechanism:
        """The mechanism at its place. Options are for what was named; kept layers have none."""
        what = self.mechanism_of(place.layer, place.layers or 1)
        return build_mechanism(
            what, heads=place.heads, head_dim=place.head_dim, value_dim=place.value_dim, layer=place.layer,
            layers=place.layers, **({} if what == KEPT else self.options),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` turns back into an equal recipe."""
        layers: Any = self.layers
        if isinstance(layers, Mapping):
            layers = {str(which): _plain(what) for which, what in layers.items()}
        elif layers is not None:
            layers = [str(which) for which in layers]
        found = {
            "mechanism": _plain(self.mechanism), "layers": layers, "keep_first_last": self.keep_first_last,
            "init": self.init, "options": dict(self.options),
        }  # fmt: skip
        named = [self.mechanism, *(self.layers.values() if isinstance(self.layers, Mapping) else ())]
        homes = [foreign_homes(name) for name in named if isinstance(name, str)]
        modules = {name: module for home in homes for name, module in home.items()}
        return found | ({"modules": modules} if modules else {})

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Recipe:
        """The inverse of :meth:`to_dict`; ValueError if a mechanism that others registered is not there."""
        known = names()
        for name, module in content.get("modules", {}).items():
            if name not in known:
                raise ValueError(
                    f"load: the mechanism {name!r} is not registered; the module {module!r} did that (unsoft.register) when this"
                    " model was saved: import it first"
                )
        layers = content["layers"]
        if isinstance(layers, Mapping):
            layers = {which: _read(what) for which, what in layers.items()}
        return Recipe(
            _read(content["mechanism"]),
            layers,
            content["keep_first_last"],
            content["init"],
            content["options"],
        )


def _plain(mechanism: str | Formula) -> str | dict[str, Any]:
    return mechanism.to_dict() if isinstance(mechanism, Formula) else mechanism


def _read(content: str | Mapping[str, Any]) -> str | Formula:
    return content if isinstance(content, str) else Formula.from_dict(content)
