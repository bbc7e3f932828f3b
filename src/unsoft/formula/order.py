"""The order in which symbols are listed in generated code."""

from collections.abc import Iterable


def in_order(symbols: Iterable[str]) -> list[str]:
    """s, z, m, n, i, j first, then parameters by name.

    >>> in_order({"tau", "n", "s", "beta"})
    ['s', 'n', 'beta', 'tau']
    """
    first = "szmnij"
    return sorted(symbols, key=lambda name: (first.index(name) if name in set(first) else len(first), name))
