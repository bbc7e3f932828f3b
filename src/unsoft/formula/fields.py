"""Fields: numbers that a formula is told about each query and each key, beside the logit.

``fields={"c": "query+key"}`` declares c; the text then writes ``c_i`` for its value at the query and ``c_j``
for its value at the key. Two fields are always there: ``q2`` and ``k2``, the squared lengths of the query and
the key times the scale of the logits, so that ``q2 + k2 - 2*s`` is the scaled squared distance of the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr

SIDES = {"query": "i", "key": "j", "query+key": "ij"}
"""Whom a field may belong to, and the letters that then stand after its name."""
BUILT_IN = {"query": "q2", "key": "k2"}
"""Squared lengths, which nobody has to declare."""


class Symbols(NamedTuple):
    """The symbols of fields that a formula uses, each sorted by name."""

    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.query + self.key


NO_SYMBOLS = Symbols()


def read_fields(given: Mapping[str, str] | None, params: Iterable[str]) -> dict[str, str]:
    """Names and sides of the fields, sorted by name.

    >>> read_fields({"gate": "key", "c": "query+key"}, [])
    {'c': 'query+key', 'gate': 'key'}
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"fields: expected a mapping from name to side, not {type(given).__name__}")
    for name, side in (given or {}).items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, re.ASCII):
            raise FormulaError(
                f"fields: {name!r} cannot be the name of a field; use letters, digits and _, starting with a"
                " letter"
            )
        if side not in SIDES:
            allowed = ", ".join(map(repr, SIDES))
            raise FormulaError(f"fields: {name!r} must belong to one of {allowed}, not {side!r}")
        if taken := [f"{name}_{letter}" for letter in SIDES[side] if f"{name}_{letter}" in params]:
            raise FormulaError(f"fields: {taken[0]} is a parameter already; give the field another name")
    return dict(sorted((given or {}).items()))


def declared(fields: Mapping[str, str]) -> Symbols:
    """All symbols that the text may use, the squared lengths among them.

    >>> declared({"c": "query+key"})
    Symbols(query=('c_i', 'q2'), key=('c_j', 'k2'))
    """
    query = [f"{name}_i" for name, side in fields.items() if "i" in SIDES[side]]
    key = [f"{name}_j" for name, side in fields.items() if "j" in SIDES[side]]
    return Symbols((*query, BUILT_IN["query"]), (*key, BUILT_IN["key"]))


def used(fields: Mapping[str, str], parts: Iterable[Expr]) -> Symbols:
    """The symbols that occur; FormulaError if a field was declared for nothing."""
    occurring = frozenset().union(*(part.symbols for part in parts))
    for name, side in fields.items():
        for letter in SIDES[side]:
            if f"{name}_{letter}" not in occurring:
                raise FormulaError(
                    f"fields: {name!r} belongs to {side!r}, but {name}_{letter} occurs nowhere in the"
                    " formula; use it, or leave that side out"
                )
    query, key = declared(fields)
    return Symbols(tuple(x for x in query if x in occurring), tuple(x for x in key if x in occurring))


def hints(fields: Mapping[str, str]) -> dict[str, str]:
    """What to say of names that someone might expect: the bare name, and the letter of the other side."""
    found: dict[str, str] = {}
    for name, side in fields.items():
        written = " and ".join(f"{name}_{letter}" for letter in SIDES[side])
        found |= dict.fromkeys((name, f"{name}_i"), f"the field {name} of {side} is written {written}")
        found[f"{name}_j"] = found[name]
        if "j" in SIDES[side]:
            found[f"{name}_j"] += (
                "; norm and offset_mass belong to a whole row, so they have no field of keys"
            )
    return found | {"k2": "norm and offset_mass belong to a whole row, so they have no key"}
