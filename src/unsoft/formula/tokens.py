"""Cuts formula text into tokens, and points at the place when something is wrong.

>>> [(token.kind, token.text) for token in tokenize("2*exp(s)")]
[('number', '2'), ('mark', '*'), ('name', 'exp'), ('mark', '('), ('name', 's'), ('mark', ')'), ('end', '')]
"""

import re
import unicodedata
from typing import NamedTuple

from unsoft.errors import FormulaError

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>\*\*|<=|>=|==|!=|[-+*/(),<>])"
)
_HINTS = {
    "^": "powers are written with **",
    "=": "equality is written with ==",
    ".": "attributes do not exist in formulas",
    "'": "text does not exist in formulas",
    '"': "text does not exist in formulas",
    "[": "only round brackets are allowed",
    "{": "only round brackets are allowed",
    "|": "the absolute value is written abs(s)",
    "%": "there is no remainder in formulas",
}


class Token(NamedTuple):
    """A piece of formula text: kind is "number", "name", "mark" or "end"; place is its column."""

    kind: str
    text: str
    place: int


def tokenize(source: str, argument: str = "formula") -> list[Token]:
    """All tokens of a formula text, closed by one of kind "end"."""
    tokens, place = [], 0
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None:
            raise error(_describe(source[place]), source, place, argument)
        if match.lastgroup != "space":
            tokens.append(Token(match.lastgroup or "", match.group(), place))
        place = match.end()
    return [*tokens, Token("end", "", len(source))]


def error(problem: str, source: str, place: int, argument: str) -> FormulaError:
    """The error that shows the text with a caret under the problem; long texts are cut around it.

    >>> print(error("unknown name 'x'", "s + x", 4, "weight"))
    weight: unknown name 'x'
        s + x
            ^
    """
    line = re.sub(r"[^ -~]", lambda c: c.group() if c.group().isprintable() else " ", source)
    start = max(0, place - 60)
    shown = line[start : start + 100]
    lead, tail = ("..." if start else ""), ("..." if start + 100 < len(line) else "")
    caret = " " * (len(lead) + place - start) + "^"
    return FormulaError(f"{argument}: {problem}\n    {lead}{shown}{tail}\n    {caret}")


def _describe(character: str) -> str:
    if character in _HINTS:
        return f"unexpected {character!r}: {_HINTS[character]}"
    if ord(character) < 128:
        return f"unexpected {character!r}"
    name = unicodedata.name(character, "a character without a name")
    return f"unexpected {character!r} (U+{ord(character):04X}, {name}): formulas are plain ASCII"
