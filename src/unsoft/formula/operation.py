"""The record of one operation: everything that any engine, printer or check needs to know of it.

Parser, derivatives, evaluation, C++, JavaScript, LaTeX, SymPy, the theory and the battery all read these
records, so an operation that is added here works everywhere:

>>> import math, torch
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

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsoft.formula.expr import Expr
    from unsoft.formula.signed_log import SignedLog

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ATOM = 6
"""How tightly a number, a symbol or a call binds; operators bind less."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of formulas. Templates have the printed operands as {0}, {1}, ..."""

    name: str
    arity: int
    fold: Callable[..., float | bool]
    """The value for plain numbers in double precision."""
    torch: Callable[..., Any]
    """The value for tensors, some of which may be numbers. NaN must come through."""
    slope: Callable[..., Expr] | None = None
    """(node, operands, slopes of the operands) -> derivative; None for comparisons, which are flat."""
    into: Callable[..., Any] | None = None
    """``torch`` with a keyword ``out``, for an engine that allocates nothing;
    without it the result is copied."""
    python: str | None = None
    """Torch code; default: torch.NAME(...)."""
    cpp: str | None = None
    """C++ on SIMD registers; default: vNAME(...)."""
    cpp_definition: str = ""
    """C++ that this needs beyond kernel/simd.h; see :func:`lanewise`."""
    triton: str | None = None
    """Triton, with the functions of engines/triton/kernel/functions.py; without it the GPU engine declines
    formulas that use the operation."""
    javascript: str | None = None
    """Default: Math.NAME(...)."""
    javascript_definition: str = ""
    """What this needs beyond Math. Names start with $, which no parameter has."""
    latex: str | None = None
    r"""Default: \operatorname{NAME}(...)."""
    latex_binds: int = ATOM
    """How tightly that binds."""
    sympy: Callable[..., Any] | None = None
    """(sympy, operands) -> expression; default: SymPy's function of the same name."""
    sympy_name: str | None = None
    """SymPy's class that is read as this operation."""
    log_form: Callable[..., SignedLog] | None = None
    """The value in signs and logarithms, for numbers too large or small for a float; default:
    it stays in range."""
    error: Callable[..., Any] | None = None
    """(value, operands, their rounding errors) -> the error passed on; default: that of the slopes."""
    symbol: str | None = None
    """The operator between two operands; None for functions."""
    precedence: int = ATOM
    """How tightly the operator binds."""
    commutative: bool = False
    corner: Callable[..., Expr] | None = None
    """operands -> the expression at whose zero the value has a corner or jumps."""
    exponent: Callable[..., Expr] | None = None
    """operands -> the exponent, for operations that grow exponentially and so may overflow."""

    def write(self, language: str, default: str, operands: list[str]) -> str:
        """The text of the operation in one of the languages above."""
        template: str | None = getattr(self, language)
        if template is None:
            return f"{default}({', '.join(operands)})"
        return template.format(*operands)


OPERATIONS: dict[str, Operation] = {}
"""All operations by name."""
FUNCTIONS: dict[str, int] = {}
"""Those that are written as calls, with their number of operands."""


def add(operation: Operation) -> None:
    """Makes an operation known. Its name must be new."""
    if operation.name in OPERATIONS:
        raise ValueError(f"operation: there is an operation {operation.name!r} already")
    OPERATIONS[operation.name] = operation
    if operation.symbol is None and operation.name != "neg":
        FUNCTIONS[operation.name] = operation.arity


def remove(name: str) -> None:
    """Undoes :func:`add`; expressions that use the operation become useless."""
    del OPERATIONS[name]
    FUNCTIONS.pop(name, None)


def lanewise(name: str, function: str) -> str:
    """C++ that applies a scalar function to each lane of a register.

    >>> lanewise("vcos", "std::cos")
    'UNSOFT_LANEWISE(vcos, std::cos)'
    """
    return f"UNSOFT_LANEWISE({name}, {function})"
