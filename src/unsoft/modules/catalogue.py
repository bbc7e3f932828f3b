"""All mechanisms at a glance."""

from collections.abc import Iterator, Mapping

from unsoft.formula import Formula
from unsoft.modules.inline import label_of, parts_of
from unsoft.modules.registry import label, modifiers, names, resolve
from unsoft.modules.spec import MechanismSpec


class Catalogue(Mapping[str, Formula | MechanismSpec]):
    """Formulas and families by name, in alphabetical order; prints as a table of what each of them
    promises."""

    def __getitem__(self, name: str) -> Formula | MechanismSpec:
        if name not in names():
            raise KeyError(name)
        return resolve(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())

    def rows(self) -> list[dict[str, str]]:
        """The table, one dictionary of texts for each mechanism."""
        return [{"name": label(name), **formula.properties.texts()} for name, formula in self.items()]

    def __repr__(self) -> str:
        rows = self.rows()
        table = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table
        ]
        return "\n".join(line.rstrip() for line in lines)


def mechanisms() -> Catalogue:
    """All mechanisms; a parametrised one such as polynomial(p) stands there with its default."""
    return Catalogue()


def formulas() -> dict[str, Formula]:
    """Those mechanisms that are formulas."""
    return {name: found for name, found in mechanisms().items() if isinstance(found, Formula)}


def summary_of(mechanism: str | Formula) -> str:
    """What a mechanism does in a few words; of a composition what each of its parts does.

    >>> summary_of("sink+softmax").partition("; ")[2]
    'softmax: a probability distribution over the keys'
    """
    found = resolve(mechanism).summary or ""
    if isinstance(mechanism, Formula) or len(parts_of(mechanism)) == 1:
        return found
    *before, base = parts_of(mechanism)
    said = {modifier.name: modifier.summary for modifier in modifiers()}
    parts = [(part, said.get(part.partition("(")[0], "")) for part in before]
    every = [*parts, (label_of(base), resolve(base).summary or "a formula of your own")]
    return "; ".join(f"{part}: {words}" for part, words in every)
