"""Checks and converts the arguments of a formula: parts, parameters, fields and bias.

Fields are numbers that a formula gets for each query and each key, besides the logit. ``fields={"c":
"query+key"}`` declares c; the text then writes ``c_i`` for its value at the query and ``c_j`` for its value
at the key. Two fields are always available: ``q2`` and ``k2``, the squared lengths of the query and the key
times the scale of the logits, so that ``q2 + k2 - 2*s`` is the scaled squared distance of the two.
"""

import keyword
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr, make, number, postorder, substitute, symbol
from unsoft.formula.operation import COMPARISONS, FUNCTIONS
from unsoft.formula.parser import parse

SIDES = {"query": "i", "key": "j", "query+key": "ij"}
"""Owners of a field, and the letters that then follow its name."""
BUILT_IN = {"query": "q2", "key": "k2"}
"""Squared lengths, which need no declaration."""
_SYMBOLS = {"weight": "smnij", "mass": "smnij", "peak": "snij", "norm": "zmni", "offset_mass": "mni"}
"""Symbols that each part may use."""
_CPP_AND_JAVASCRIPT = frozenset(
    """
    abstract alignas alignof asm auto bool boolean byte case catch char concept const constexpr constinit
    default delete debugger do double dynamic_cast enum eval explicit export extends extern final finally
    float friend function goto implements inline instanceof int interface let long mutable namespace
    native new noexcept null nullptr operator package private protected public register reinterpret_cast
    requires short signed sizeof static static_assert static_cast struct super switch synchronized
    template this thread_local throw throws transient true false typedef typeid typename typeof union
    unsigned using var virtual void volatile wchar_t
    """.split()
)
# Names that a parameter cannot have, because the formula or the code printed from it uses them.
_RESERVED = {*"smnijz", *BUILT_IN.values(), *_SYMBOLS, *_CPP_AND_JAVASCRIPT, *keyword.kwlist}
_RESERVED |= {"logits", "total", "torch", "real", "Math", "NaN", "Infinity", "undefined", "arguments"}
_NOT_HERE = {
    "s": "norm and offset_mass belong to a whole row, so they have no logit s",
    "j": "norm and offset_mass belong to a whole row, so they have no key position j",
    "m": "m, the row peak, exists only if peak= is given, and not in the peak itself",
    "z": "z, the summed mass, exists only in norm",
}


class Symbols(NamedTuple):
    """Symbols of the fields that a formula uses, each sorted by name."""

    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.query + self.key


NO_SYMBOLS = Symbols()


def read_part(
    part: str, value: Any, params: Iterable[str], has_peak: bool, fields: Mapping[str, str]
) -> Expr:
    """Return the expression of one part, checked to use no more than its symbols.

    >>> read_part("norm", "sqrt", [], has_peak=False, fields={})
    Expr('sqrt(z)')
    """
    symbols = {*_SYMBOLS[part], *params} - (set() if has_peak else {"m"})
    named = declared(fields)
    symbols |= {*named.query} if "s" not in symbols else {*named.all}
    if part == "norm" and isinstance(value, str) and FUNCTIONS.get(value.strip()) == 1:
        value = make(value.strip(), symbol("z"))
    return parse(_as_text(part, value), symbols, argument=part, hints=_NOT_HERE | hints(fields))


def read_params(params: Mapping[str, float] | None) -> dict[str, float]:
    """Return names and default values of the parameters, sorted by name.

    >>> read_params({"tau": 1, "beta": 0.5})
    {'beta': 0.5, 'tau': 1.0}
    """
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping from name to default value, not {type(params).__name__}")
    for name, default in (params or {}).items():
        if not _is_identifier(name) or name in _RESERVED or name in FUNCTIONS:
            raise FormulaError(
                f"params: {name!r} cannot be the name of a parameter; use letters, digits and _, starting"
                " with a letter, and no symbol, function or keyword"
            )
        if isinstance(default, bool) or not isinstance(default, (int, float)) or not math.isfinite(default):
            raise FormulaError(f"params: the default of {name!r} must be a finite number, not {default!r}")
    return {name: float(default) for name, default in sorted((params or {}).items())}


def _is_identifier(name: Any) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, re.ASCII))


def read_fields(fields: Mapping[str, str] | None, params: Iterable[str]) -> dict[str, str]:
    """Return names and sides of the fields, sorted by name.

    >>> read_fields({"gate": "key", "c": "query+key"}, [])
    {'c': 'query+key', 'gate': 'key'}
    """
    if fields is not None and not isinstance(fields, Mapping):
        raise TypeError(f"fields: expected a mapping from name to side, not {type(fields).__name__}")
    for name, side in (fields or {}).items():
        if not _is_identifier(name):
            raise FormulaError(
                f"fields: {name!r} cannot be the name of a field; use letters, digits and _, starting with a"
                " letter"
            )
        if side not in SIDES:
            allowed = ", ".join(map(repr, SIDES))
            raise FormulaError(f"fields: {name!r} must belong to one of {allowed}, not {side!r}")
        if taken := [f"{name}_{letter}" for letter in SIDES[side] if f"{name}_{letter}" in params]:
            raise FormulaError(f"fields: {taken[0]} is a parameter already; give the field another name")
    return dict(sorted((fields or {}).items()))


def declared(fields: Mapping[str, str]) -> Symbols:
    """Return all symbols that the text may use, including the squared lengths.

    >>> declared({"c": "query+key"})
    Symbols(query=('c_i', 'q2'), key=('c_j', 'k2'))
    """
    query = [f"{name}_i" for name, side in fields.items() if "i" in SIDES[side]]
    key = [f"{name}_j" for name, side in fields.items() if "j" in SIDES[side]]
    return Symbols((*query, BUILT_IN["query"]), (*key, BUILT_IN["key"]))


def used(fields: Mapping[str, str], parts: Iterable[Expr]) -> Symbols:
    """Return the symbols that occur. Raise FormulaError if a declared field is not used."""
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
    """Return explanations for names that a user might expect: the bare name, the letter of the other side."""
    of_row = "norm and offset_mass belong to a whole row, so they have no"
    explained: dict[str, str] = {}
    for name, side in fields.items():
        written = " and ".join(f"{name}_{letter}" for letter in SIDES[side])
        hint = f"the field {name} of {side} is written {written}"
        explained |= {name: hint, f"{name}_i": hint}
        explained[f"{name}_j"] = f"{hint}; {of_row} field of keys" if "j" in SIDES[side] else hint
    return explained | {"k2": f"{of_row} key"}


def read_bias(
    bias: str | Expr, parts: Iterable[Expr], params: Iterable[str], fields: Mapping[str, str]
) -> Expr | None:
    """Return what a float mask is added to in the parts of a formula; None if it changes their strength.

    >>> read_bias("logit", [], [], {})
    Expr('s')
    """
    if bias == "strength":
        return None
    if bias == "logit":
        return symbol("s")
    if not isinstance(bias, (str, Expr)):
        raise TypeError(f"bias: expected 'logit', 'strength' or an expression, not {type(bias).__name__}")
    try:
        symbols = {*"snij", *params, *declared(fields).all}
        target = parse(_as_text("bias", bias), symbols, argument="bias", hints=_NOT_HERE | hints(fields))
    except FormulaError as problem:
        raise FormulaError(
            f"bias: expected 'logit', 'strength' or None, not {bias!r}, which is no expression of s"
            f" either\n{problem}"
        ) from None
    if "s" not in target.symbols:
        raise FormulaError(f"bias: a mask is added to an expression of the logit s, but {target} has no s")
    for part in parts:
        if "s" in substitute(part, target, number(0)).symbols:
            raise FormulaError(
                f"bias: masks are added to {target}, so every s must be inside it; there is another in {part}"
            )
    return target


def guarded(expr: Expr) -> Expr:
    """Return where(s == s, expr, s) if a comparison, or the absence of s, could hide a NaN logit.

    >>> from unsoft.formula.parser import parse
    >>> guarded(parse("where(s > 0, s, 0)"))
    Expr('where(s == s, where(s > 0, s, 0), s)')
    """
    swallows = "s" not in expr.symbols or any(node.op in COMPARISONS for node in postorder(expr))
    s = symbol("s")
    return make("where", make("eq", s, s), expr, s) if swallows else expr


def _as_text(part: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Expr):
        return str(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(number(value))
    if any(base.__module__.partition(".")[0] == "sympy" for base in type(value).__mro__):
        from unsoft.formula.sympy_bridge import from_sympy

        return str(from_sympy(value))
    kind = type(value).__name__
    raise TypeError(f"{part}: expected formula text, a number, an Expr or a SymPy expression, not {kind}")
