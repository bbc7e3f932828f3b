"""The built-in mechanisms, one small file each, and the catalogue of all mechanisms.

>>> list(mechanisms())[:3]
['affine-scaled', 'asentmax', 'cog']
>>> formulas()["cog"].weight
Expr('sign(s)*exp(abs(s) - m)')
"""

from collections.abc import Iterator, Mapping
from typing import Any

from unsoft.formula import Formula
from unsoft.modules.plugins import register, unregister
from unsoft.modules.registry import label, label_of, modifiers, names, parts_of, resolve
from unsoft.modules.spec import MechanismSpec
from unsoft.notebook import data_frame, html_table

__all__ = ["formulas", "mechanisms", "register", "resolve", "summary_of", "unregister"]


class Catalogue(Mapping[str, Formula | MechanismSpec]):
    """Formulas and families by name, in alphabetical order; prints as a table of their properties."""

    def __getitem__(self, name: str) -> Formula | MechanismSpec:
        if name not in names():
            raise KeyError(name)
        return resolve(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())

    def rows(self) -> list[dict[str, str]]:
        """Return the table, one dictionary of texts for each mechanism."""
        return [{"name": label(name), **spec.properties.texts()} for name, spec in self.items()]

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())

    def __repr__(self) -> str:
        rows = self.rows()
        table = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
        return "\n".join(lines)


def mechanisms() -> Catalogue:
    """Return all mechanisms, a parametrised one such as polynomial(p) with its default."""
    return Catalogue()


def formulas() -> dict[str, Formula]:
    """Return the mechanisms that are formulas."""
    return {name: spec for name, spec in mechanisms().items() if isinstance(spec, Formula)}


def summary_of(mechanism: str | Formula) -> str:
    """Describe a mechanism in a few words; a composition by the summary of each part.

    >>> summary_of("sink+softmax").partition("; ")[2]
    'softmax: a probability distribution over the keys'
    """
    if isinstance(mechanism, Formula) or len(parts_of(mechanism)) == 1:
        return resolve(mechanism).summary or ""
    resolve(mechanism)  # raises for a name that is not a mechanism
    *before, base = parts_of(mechanism)
    summaries = {modifier.name: modifier.summary for modifier in modifiers()}
    parts = [(part, summaries.get(part.partition("(")[0], "")) for part in before]
    parts.append((label_of(base), resolve(base).summary or "a formula of your own"))
    return "; ".join(f"{part}: {summary}" for part, summary in parts)
