"""Reads what a user gives for the parts of a formula."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr, make, number, postorder, symbol
from unsoft.formula.fields import BUILT_IN, declared, hints
from unsoft.formula.operation import COMPARISONS, FUNCTIONS
from unsoft.formula.parser import parse
from unsoft.formula.substitute import substitute

# Names that a parameter cannot have, because the formula or the code printed from it uses them.
_SYMBOL_NAMES = frozenset("smnijz")
_PARTS = frozenset({"weight", "mass", "peak", "norm", "offset_mass"})
_CODE = frozenset({"logits", "total", "torch", "real", "Math", "NaN", "Infinity", "undefined", "arguments"})
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
_RESERVED = (
    _SYMBOL_NAMES
    | frozenset(BUILT_IN.values())
    | _PARTS
    | _CODE
    | _CPP_AND_JAVASCRIPT
    | frozenset(keyword.kwlist)
)

_SYMBOLS = {"weight": "smnij", "mass": "smnij", "peak": "snij", "norm": "zmni", "offset_mass": "mni"}
_NOT_HERE = {
    "s": "norm and offset_mass belong to a whole row, so they have no logit s",
    "j": "norm and offset_mass belong to a whole row, so they have no key position j",
    "m": "m, the row peak, exists only if peak= is given, and not in the peak itself",
    "z": "z, the summed mass, exists only in norm",
}


def read_part(
    part: str, given: Any, params: Iterable[str], has_peak: bool, fields: Mapping[str, str]
) -> Expr:
    """The expression of one part, checked to use no more than its symbols.

    >>> read_part("norm", "sqrt", [], has_peak=False, fields={})
    Expr('sqrt(z)')
    """
    symbols = {*_SYMBOLS[part], *params} - (set() if has_peak else {"m"})
    named = declared(fields)
    symbols |= {*named.query} if "s" not in symbols else {*named.all}
    if part == "norm" and isinstance(given, str) and FUNCTIONS.get(given.strip()) == 1:
        given = make(given.strip(), symbol("z"))
    return parse(_as_text(part, given), symbols, argument=part, hints=_NOT_HERE | hints(fields))


def read_params(params: Mapping[str, float] | None) -> dict[str, float]:
    """Names and default values of the parameters, sorted by name.

    >>> read_params({"tau": 1, "beta": 0.5})
    {'beta': 0.5, 'tau': 1.0}
    """
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping from name to default value, not {type(params).__name__}")
    for name, default in (params or {}).items():
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, re.ASCII)
            or name in _RESERVED
            or name in FUNCTIONS
        ):
            raise FormulaError(
                f"params: {name!r} cannot be the name of a parameter; use letters, digits and _, starting"
                " with a letter, and no symbol, function or keyword"
            )
        if isinstance(default, bool) or not isinstance(default, (int, float)) or not math.isfinite(default):
            raise FormulaError(f"params: the default of {name!r} must be a finite number, not {default!r}")
    return {name: float(default) for name, default in sorted((params or {}).items())}


def read_bias(
    given: str | Expr, parts: Iterable[Expr], params: Iterable[str], fields: Mapping[str, str]
) -> Expr | None:
    """What a float mask is added to in the parts of a formula; None if it changes their strength.

    >>> read_bias("logit", [], [], {})
    Expr('s')
    """
    if given == "strength":
        return None
    if given == "logit":
        return symbol("s")
    if not isinstance(given, (str, Expr)):
        raise TypeError(f"bias: expected 'logit', 'strength' or an expression, not {type(given).__name__}")
    try:
        symbols = {*"snij", *params, *declared(fields).all}
        target = parse(_as_text("bias", given), symbols, argument="bias", hints=_NOT_HERE | hints(fields))
    except FormulaError as problem:
        raise FormulaError(
            f"bias: expected 'logit', 'strength' or None, not {given!r}, which is no expression of s"
            f" either\n{problem}"
        ) from None
    if "s" not in target.symbols:
        raise FormulaError(f"bias: a mask is added to an expression of the logit s, but {target} has no s")
    for part in parts:
        if "s" in substitute(part, target, number(0)).symbols:
            raise FormulaError(
                f"bias: masks are added to {target}, so every s must stand inside it; there is another in"
                f" {part}"
            )
    return target


def guarded(expr: Expr) -> Expr:
    """where(s == s, expr, s) if a comparison, or the absence of s, could turn a NaN logit into a number.

    >>> from unsoft.formula.parser import parse
    >>> guarded(parse("where(s > 0, s, 0)"))
    Expr('where(s == s, where(s > 0, s, 0), s)')
    """
    swallows = "s" not in expr.symbols or any(node.op in COMPARISONS for node in postorder(expr))
    s = symbol("s")
    return make("where", make("eq", s, s), expr, s) if swallows else expr


def _as_text(part: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Expr):
        return str(given)
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return str(number(given))
    if any(base.__module__.partition(".")[0] == "sympy" for base in type(given).__mro__):
        from unsoft.formula.sympy_bridge import from_sympy

        return str(from_sympy(given))
    kind = type(given).__name__
    raise TypeError(f"{part}: expected formula text, a number, an Expr or a SymPy expression, not {kind}")
