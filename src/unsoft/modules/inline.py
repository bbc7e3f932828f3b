"""Names that hold a formula of one's own: "logn+{weight=s*exp(s - m);mass=abs(s)*exp(s - m);peak=s}".

Such a name needs nothing registered: it can be kept in files, sent to other processes, and read there.
"""

from __future__ import annotations

import re

from unsoft.formula import Formula
from unsoft.formula.formula import formula_from_text

_PLUS = re.compile(r"\+(?![^{}]*\})")


def parts_of(text: str) -> list[str]:
    """The modifiers and the mechanism that a name is made of.

    >>> parts_of("logn + {weight=s + 1}")
    ['logn', '{weight=s + 1}']
    """
    return [part.strip() for part in _PLUS.split(text)]


def written(part: str) -> Formula | None:
    """The formula inside braces; None for a part that is a name."""
    return formula_from_text(part[1:-1]) if part.startswith("{") and part.endswith("}") else None


def label_of(text: str) -> str:
    """The name as it is shown: a formula in braces by its own name, or else its weight.

    >>> label_of("logn+{name=mine;weight=s/n}"), label_of("{weight=s/n}"), label_of("magnitude+cog")
    ('logn+mine', 's/n', 'magnitude+cog')
    """
    if "{" not in text:
        return text
    found = [(part, written(part)) for part in parts_of(text)]
    return "+".join(part if one is None else one.name or str(one.weight) for part, one in found)
