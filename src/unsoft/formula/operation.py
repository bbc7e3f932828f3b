"""The record of one operation: everything that an engine, a printer or a check needs to know about it.

Parser, derivatives, evaluation, C++, JavaScript, LaTeX, the theory and the test suite all read these
records, so an operation that is added here works everywhere:

>>> from unsoft.formula.expr import make
>>> cube = Operation(
...     name="cube", arity=1, fold=lambda x: x**3, torch=lambda x: x**3, slope=lambda node, a, da: 3*a**2*da,
...     cpp="({0} * {0} * {0})", javascript="({0})**3", python="({0})**3",
... )
>>> add(cube)
>>> from unsoft.formula import derivative, parse
>>> derivative(parse("cube(2*s)"), "s")
Expr('3*(2*s)**2*2')
>>> remove("cube")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from unsoft.formula.expr import Expr
    from unsoft.formula.signed_log import SignedLog

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ATOM = 6
"""Precedence of a number, a symbol or a call. Operators have a lower one."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of formulas. Templates contain the printed operands as {0}, {1}, ..."""

    name: str
    arity: int
    fold: Callable[..., float | bool]
    """Value for plain numbers in double precision."""
    torch: Callable[..., Any]
    """Value for tensors, some of which may be numbers. A NaN operand must give NaN."""
    slope: Callable[..., Expr] | None = None
    """(node, operands, slopes of the operands) -> derivative; None for comparisons, which are constant."""
    into: Callable[..., Any] | None = None
    """``torch`` with a keyword ``out``, for an engine that allocates nothing.
    Without it the result is copied."""
    python: str | None = None
    """Torch code; default: torch.NAME(...)."""
    cpp: str | None = None
    """C++ on SIMD registers; default: vNAME(...)."""
    cpp_definition: str = ""
    """C++ that the operation needs beyond kernel/simd.h; see :func:`lanewise`."""
    triton: str | None = None
    """Triton, with the functions of engines/triton/kernel/functions.py. Without it, formulas that use the
    operation are unsupported on the GPU."""
    javascript: str | None = None
    """Default: Math.NAME(...)."""
    javascript_definition: str = ""
    """JavaScript that the operation needs beyond Math. Names start with $, which no parameter has."""
    latex: str | None = None
    r"""Default: \operatorname{NAME}(...)."""
    latex_binds: int = ATOM
    """Precedence of the LaTeX form."""
    log_form: Callable[..., SignedLog] | None = None
    """Value as sign and logarithm, for numbers too large or small for a float; default: it stays in range."""
    error: Callable[..., Any] | None = None
    """(value, operands, their rounding errors) -> propagated error; default: that of the slopes."""
    symbol: str | None = None
    """The operator between two operands; None for functions."""
    precedence: int = ATOM
    """Precedence of the operator."""
    commutative: bool = False
    corner: Callable[..., Expr] | None = None
    """operands -> the expression at whose zero the value has a corner or jumps."""
    exponent: Callable[..., Expr] | None = None
    """operands -> the exponent, for operations that grow exponentially and so may overflow."""

    def write(self, language: str, default: str, operands: list[str]) -> str:
        """Return the text of the operation in one of the languages above."""
        template: str | None = getattr(self, language)
        if template is None:
            return f"{default}({', '.join(operands)})"
        return template.format(*operands)


OPERATIONS: dict[str, Operation] = {}
"""All operations by name."""
FUNCTIONS: dict[str, int] = {}
"""Number of operands of the operations that are written as calls."""


def add(operation: Operation) -> None:
    """Register an operation. Its name must be new."""
    if operation.name in OPERATIONS:
        raise ValueError(f"operation: there is an operation {operation.name!r} already")
    OPERATIONS[operation.name] = operation
    if operation.symbol is None and operation.name != "neg":
        FUNCTIONS[operation.name] = operation.arity


def remove(name: str) -> None:
    """Undo :func:`add`; expressions that use the operation become useless."""
    del OPERATIONS[name]
    FUNCTIONS.pop(name, None)


def add_operator(name: str, symbol: str, value: Callable[..., Any], **record: Any) -> None:
    """Add a binary operator that Python, Triton, C++ and JavaScript all write ``symbol``.

    ``record`` has the other fields of :class:`Operation`, and those that differ.
    """
    written = f"{{0}} {symbol} {{1}}"
    usual: dict[str, Any] = {"fold": value, "torch": value, "into": getattr(torch, name)}
    usual |= {"triton": written, "cpp": written, "javascript": written}
    add(Operation(name=name, arity=2, symbol=symbol, **usual | record))


def add_function(name: str, **record: Any) -> None:
    r"""Add a function, by default of one number, called ``name`` in math and torch, and ``\name`` in LaTeX.

    ``record`` has the other fields of :class:`Operation`, and those that differ.
    """
    value = getattr(torch, name, None)
    usual: dict[str, Any] = {"arity": 1, "fold": getattr(math, name, None), "torch": value, "into": value}
    usual |= {"triton": f"{name}({{0}})", "latex": rf"\{name}({{0}})"}
    add(Operation(name=name, **usual | record))


def lanewise(name: str, function: str) -> str:
    """Return C++ that applies a scalar function to each lane of a register.

    >>> lanewise("vcos", "std::cos")
    'UNSOFT_LANEWISE(vcos, std::cos)'
    """
    return f"UNSOFT_LANEWISE({name}, {function})"
