"""Specifications of mechanisms and layers, as data; modules are built from them later.

A name: a formula, or a family of modules, with modifiers around it. A layer: its heads and widths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from unsoft.formula import Formula, Properties

if TYPE_CHECKING:
    from unsoft.modules.module import Mechanism

Factory = Callable[..., Formula]


@dataclass(frozen=True)
class LayerSpec:
    """The layer that a mechanism is made for: its parameters are sized and started by these numbers."""

    heads: int
    """Heads of the output."""
    head_dim: int
    """Width D of queries and keys."""
    value_dim: int | None = None
    """Width Dv of values; D if not given."""
    hidden_dim: int | None = None
    """Width of the hidden state passed as ``hidden=``; without it the query is used."""
    layer: int = 0
    """Number of the layer, counted from 0."""
    layers: int | None = None
    """Number of layers of the network."""
    positions: int | None = None
    """Largest number of positions of the network, if it is limited."""

    @property
    def values(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Family:
    """A mechanism that is a module, and its entry in the list of mechanisms."""

    name: str
    build: Callable[..., Mechanism]
    """From a :class:`LayerSpec`, optionally a number or the formula it runs (``base=``), and keywords."""
    summary: str
    properties: Properties
    base: str | Formula | None = None
    """The formula it runs by default; modifiers of formulas then rewrite that one."""
    paper: str | None = None
    argument: str | None = None
    """Name of the argument that a number in brackets sets."""
    takes: Callable[..., Any] | None = None
    """The callable that gets the options, if ``build`` passes them on as ``**options``."""

    @property
    def options(self) -> list[str] | None:
        """Names of its keywords; None if it takes any. Its first argument is the layer, or what it wraps."""
        parameters = list(inspect.signature(self.takes or self.build).parameters.values())
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return [p.name for p in parameters[1:] if p.name != "base"]


@dataclass(frozen=True)
class Modifier:
    """A prefix of a name: it rewrites the formula, or wraps the module."""

    name: str
    change: Callable[..., Any]
    of_formula: bool
    summary: str


@dataclass(frozen=True)
class AppliedModifier:
    """A modifier of modules as it stood in a name: with the number in its brackets, if any."""

    change: Callable[..., Mechanism]
    arguments: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        """Names of its keywords."""
        parameters = inspect.signature(self.change).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def take(self, options: dict[str, Any]) -> dict[str, Any]:
        """Remove the keywords of this modifier from ``options`` and return them."""
        return {name: options.pop(name) for name in self.names if name in options}


@dataclass(frozen=True)
class MechanismSpec:
    """A mechanism that is not a formula: the modules to build once their layer is known."""

    name: str
    family: Family | None
    formula: Formula | None = None
    """The formula that an affine family runs, or, without a family, that the modifiers wrap."""
    number: float | None = None
    modifiers: tuple[AppliedModifier, ...] = ()

    @property
    def summary(self) -> str | None:
        """Summary of the mechanism without its wrappers."""
        return self._named.summary

    @property
    def properties(self) -> Properties:
        """Properties of the mechanism without its wrappers."""
        if self.family is not None and isinstance(self.family.base, Formula) and self.formula is not None:
            return self.formula.properties  # as modifiers have rewritten it
        return self._named.properties

    @property
    def _named(self) -> Formula | Family:
        """The family, or the formula where there is no family."""
        return cast("Formula", self.formula) if self.family is None else self.family

    @property
    def head_multiple(self) -> int:
        """The number of heads must be a multiple of this."""
        return getattr(self.family.build, "key_head_multiple", 1) if self.family is not None else 1

    def build(self, layer_spec: LayerSpec, **options: Any) -> Mechanism:
        """Return the module for a layer; ``options`` are keywords of the modifiers (the outermost first) and
        of the family's class."""
        around = [(modifier, modifier.take(options)) for modifier in reversed(self.modifiers)]
        if self.family is None:
            from unsoft.modules.pointwise import Pointwise

            fields_from = options.pop("fields_from", None)
            if fields_from is None:
                self._check(options, [])
            source = None if fields_from is None else fields_from(layer_spec, **options)
            module: Mechanism = Pointwise(cast("Formula", self.formula), layer_spec, source)
        else:
            if self.family.options is not None:
                self._check(options, self.family.options)
            if self.formula is not None:
                options = {"base": self.formula, **options}
            if self.number is not None:
                options = {cast(str, self.family.argument): self.number, **options}
            module = self.family.build(layer_spec, **options)
        for modifier, own in reversed(around):
            module = modifier.change(module, *modifier.arguments, **own)
        return module

    def _check(self, options: dict[str, Any], own: list[str]) -> None:
        """Raise TypeError for options that neither it nor a modifier takes."""
        unknown = [name for name in options if name not in own]
        if unknown:
            known = sorted({*own, *(name for modifier in self.modifiers for name in modifier.names)})
            raise TypeError(
                f"mechanism: {self.name!r} has no option {', '.join(map(repr, unknown))}; it has"
                f" {', '.join(known) or 'none'}"
            )
