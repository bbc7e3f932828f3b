"""What a name stands for, as data: a formula, a family of modules, modifiers around it;
modules are made from it later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from unsoft.formula import Formula
from unsoft.formula.analysis import Properties

if TYPE_CHECKING:
    from unsoft.mechanisms.core.module import Mechanism, Place

Factory = Callable[..., Formula]


@dataclass(frozen=True)
class Family:
    """A mechanism that is a module, and what the list of mechanisms says of it."""

    name: str
    build: Callable[..., Mechanism]
    """From a :class:`Place`, optionally a number or the formula it runs (``base=``), and keywords."""
    summary: str
    properties: Properties
    base: str | None = None
    """The formula it runs unless told otherwise; modifiers of formulas then rewrite that one."""
    paper: str | None = None
    argument: str | None = None
    """Name of the argument that a number in brackets sets."""


@dataclass(frozen=True)
class Modifier:
    """Something that stands before a name: rewrites its formula, or wraps its module."""

    name: str
    change: Callable[..., Any]
    of_formula: bool
    summary: str


@dataclass(frozen=True)
class Wrapper:
    """A module modifier with the number that stood in its brackets."""

    change: Callable[..., Mechanism]
    arguments: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        """Its keywords."""
        parameters = inspect.signature(self.change).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def take(self, options: dict[str, Any]) -> dict[str, Any]:
        """Removes from ``options`` the keywords that are this modifier's own, and returns them."""
        return {name: options.pop(name) for name in self.names if name in options}


@dataclass(frozen=True)
class Plan:
    """What a name stands for if it is not a formula: the modules to be made once their place is known."""

    name: str
    family: Family | None
    formula: Formula | None = None
    """The formula that an affine family runs, or, without a family, that the wrappers stand around."""
    number: float | None = None
    wrappers: tuple[Wrapper, ...] = ()

    @property
    def summary(self) -> str | None:
        """What the list says of the mechanism before it is wrapped."""
        return self._named.summary

    @property
    def properties(self) -> Properties:
        """Of the mechanism before it is wrapped."""
        return self._named.properties

    @property
    def _named(self) -> Formula | Family:
        """What the list of mechanisms speaks of; a plan has a formula wherever it has no family."""
        return cast("Formula", self.formula) if self.family is None else self.family

    @property
    def head_multiple(self) -> int:
        """Its heads come in groups of this many."""
        return getattr(self.family.build, "key_head_multiple", 1) if self.family is not None else 1

    def build(self, place: Place, **options: Any) -> Mechanism:
        """The module at its place; ``options`` are keywords of the modifiers (the outermost first) and of the
        family's class."""
        around = [(wrapper, wrapper.take(options)) for wrapper in reversed(self.wrappers)]
        if self.family is None:
            from unsoft.mechanisms.core.module import Pointwise

            if options:
                known = sorted({name for wrapper in self.wrappers for name in wrapper.names})
                raise TypeError(
                    f"mechanism: {self.name!r} has no option {', '.join(map(repr, options))}; it has"
                    f" {', '.join(known) or 'none'}"
                )
            module: Mechanism = Pointwise(cast("Formula", self.formula), place)
        else:
            if self.formula is not None:
                options = {"base": self.formula, **options}
            if self.number is not None:
                options = {cast(str, self.family.argument): self.number, **options}
            module = self.family.build(place, **options)
        for wrapper, own in reversed(around):
            module = wrapper.change(module, *wrapper.arguments, **own)
        return module
