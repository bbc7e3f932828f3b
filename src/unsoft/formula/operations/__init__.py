"""The operations of formulas, each one record (:class:`unsoft.formula.operation.Operation`).

A new one is one entry in a file of this folder.
"""

from unsoft.formula.operations import arithmetic, choices, functions

__all__ = ["arithmetic", "choices", "functions"]
