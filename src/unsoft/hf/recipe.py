"""The arguments of ``swap`` as data, as stored in a model's config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import unsoft
from unsoft.formula import Formula
from unsoft.modules.build import mechanism as build_mechanism
from unsoft.modules.module import Mechanism
from unsoft.modules.plugins import foreign_homes, self_contained
from unsoft.modules.registry import names
from unsoft.modules.spec import LayerSpec

FORMAT = 1
"""Number of the format of :meth:`Recipe.to_dict`; a version that older ones cannot read raises it."""
STARTS = ("open", "paper")
KEPT = "softmax"
"""Mechanism of the layers that are not swapped."""
_ONE, _RANGE = re.compile(r"-?\d+"), re.compile(r"(\d+)-(\d*)")


@dataclass(frozen=True)
class Recipe:
    """Arguments of :func:`unsoft.hf.swap`, which documents them.

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
                    f"swap: a mechanism is a name or a Formula, not {type(mechanism).__name__}"
                    f" ({mechanism!r})"
                )
        if self.options and all(mechanism == KEPT for mechanism in (self.mechanism, *named)):
            raise TypeError(f"swap: {KEPT!r} has no option {', '.join(map(repr, self.options))}; it has none")
        if isinstance(self.layers, (str, int)):
            object.__setattr__(self, "layers", [self.layers])
        if self.layers is not None and not isinstance(self.layers, Collection):
            raise TypeError(
                "swap: argument 'layers' must be numbers and ranges, or a mapping from them to mechanisms,"
                f" not {type(self.layers).__name__}"
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
        """Return the mechanism of layer ``layer`` of ``layers``; the last entry that names it counts."""
        if self.keep_first_last and layer in (0, layers - 1):
            return KEPT
        if isinstance(self.layers, Mapping):
            named = [what for which, what in self.layers.items() if layer in select(which, layers)]
            return named[-1] if named else self.mechanism
        if isinstance(self.layers, Collection) and layer not in select_all(self.layers, layers):
            return KEPT
        return self.mechanism

    def build(self, layer_spec: LayerSpec) -> Mechanism:
        """Build the mechanism of a layer. Options apply to swapped layers only."""
        what = self.mechanism_of(layer_spec.layer, layer_spec.layers or 1)
        return build_mechanism(what, **asdict(layer_spec), **({} if what == KEPT else self.options))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the inverse of :meth:`from_dict`.

        Formulas that were registered under a name are written out, so that loading needs no registration.
        """
        layers: Any = self.layers
        if isinstance(layers, Mapping):
            layers = {str(which): _plain(what) for which, what in layers.items()}
        elif layers is not None:
            layers = [str(which) for which in layers]
        content = {
            "format": FORMAT,
            "version": unsoft.__version__,
            "mechanism": _plain(self.mechanism),
            "layers": layers,
            "keep_first_last": self.keep_first_last,
            "init": self.init,
            "options": dict(self.options),
        }
        named = [self.mechanism, *(self.layers.values() if isinstance(self.layers, Mapping) else ())]
        homes = [foreign_homes(self_contained(name)) for name in named if isinstance(name, str)]
        modules = {name: module for home in homes for name, module in home.items()}
        return content | ({"modules": modules} if modules else {})

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Recipe:
        """Read :meth:`to_dict` data.

        Raise ValueError if a newer version wrote it, if it is damaged, or if a class that a plug-in
        registered is missing.
        """
        needed = {"mechanism", "layers", "keep_first_last", "init", "options"}
        if not isinstance(content, Mapping) or needed - content.keys():
            raise ValueError(
                "load: the section 'unsoft' of config.json is damaged: it must have the entries"
                f" {', '.join(sorted(needed))}"
            )
        if content.get("format", FORMAT) > FORMAT:
            raise ValueError(
                f"load: this model was saved by unsoft {content.get('version', '')} in a format that this"
                f" version ({unsoft.__version__}) cannot read; pip install -U unsoft"
            )
        known = names()
        for name, module in content.get("modules", {}).items():
            if name not in known:
                raise ValueError(
                    f"load: the mechanism {name!r} is not registered; the module {module!r} did that"
                    " (unsoft.register) when this model was saved: import it first"
                )
        layers = content["layers"]
        if isinstance(layers, Mapping):
            layers = {which: _read(what) for which, what in layers.items()}
        rest = {name: content[name] for name in ("keep_first_last", "init", "options")}
        return Recipe(_read(content["mechanism"]), layers, **rest)


def _plain(mechanism: str | Formula) -> str | dict[str, Any]:
    return mechanism.to_dict() if isinstance(mechanism, Formula) else self_contained(mechanism)


def _read(content: str | Mapping[str, Any]) -> str | Formula:
    return content if isinstance(content, str) else Formula.from_dict(content)


def select(which: int | str, count: int) -> list[int]:
    """Return layer numbers for 3, -1 (the last), "4-7" or "8-" (to the end) in a stack of ``count`` layers.

    >>> select("1-", 4), select(-1, 4), select("0-1", 4)
    ([1, 2, 3], [3], [0, 1])
    >>> select(7, 4)
    Traceback (most recent call last):
    ValueError: layers: 7 is not among the 4 layers 0-3
    """
    text = str(which).strip()
    if isinstance(which, bool) or not isinstance(which, (int, str)):
        raise TypeError(
            f"layers: expected a number or text such as '4-7', not {which!r} ({type(which).__name__})"
        )
    if _ONE.fullmatch(text):
        number = int(text)
        first = last = number + count if number < 0 else number
    elif match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2]) if match[2] else count - 1
    else:
        raise ValueError(f"layers: expected a number, '4-7' or '8-', not {which!r}")
    if not 0 <= first <= last < count:
        raise ValueError(f"layers: {text} is not among the {count} layers 0-{count - 1}")
    return list(range(first, last + 1))


def select_all(which: Iterable[int | str], count: int) -> set[int]:
    """Return the union of several selections.

    >>> sorted(select_all([0, "2-"], 5))
    [0, 2, 3, 4]
    """
    return {layer for one in which for layer in select(one, count)}
