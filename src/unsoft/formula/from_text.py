"""A whole formula as one text, as the command line and names of mechanisms have it."""

from __future__ import annotations

import re

from unsoft.errors import FormulaError
from unsoft.formula.formula import Formula

PARTS = ("weight", "mass", "peak", "norm", "offset_mass", "name")


def formula_from_text(text: str) -> Formula:
    """Reads "weight=...;mass=...;peak=..." (also norm, offset_mass, name); other names are parameters.

    >>> formula_from_text("weight=exp(tau*s - m); mass=exp(tau*s - m); peak=tau*s; tau=2").params["tau"]
    2.0
    """
    parts: dict[str, str] = {}
    params: dict[str, float] = {}
    for piece in filter(str.strip, text.split(";")):
        name, found, content = (x.strip() for x in piece.partition("="))
        if not found or not content or name in parts or name in params:
            raise FormulaError(
                f"formula: expected 'weight=...;mass=...;peak=...', each once, but there is {piece.strip()!r}"
            )
        if name in PARTS:
            parts[name] = content
            continue
        try:
            params[name] = float(content)
        except ValueError:
            raise FormulaError(
                f"formula: {name!r} is neither a part ({', '.join(PARTS)}) nor a parameter with a number,"
                f" in {piece.strip()!r}"
            ) from None
    if not re.fullmatch(r"[\w .+()-]*", parts.get("name", "")):  # it becomes part of pages and tables
        raise FormulaError(f"formula: a name is made of letters, digits and . + - ( ), not {parts['name']!r}")
    if "weight" not in parts:
        raise FormulaError("formula: it needs at least 'weight=...'")
    return Formula.from_dict({**parts, "params": params})
