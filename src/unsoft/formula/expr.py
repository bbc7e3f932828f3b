"""The expression tree: immutable nodes that are built once and shared.

A node is a number, a symbol or an operation on nodes. Equal expressions are the same object, so comparing and
hashing are instant and a shared subexpression is computed once. The tree keeps the author's numerical form:
nothing is reordered or rewritten beyond steps that cannot change a result (x + 0, x * 1, -(-x), arithmetic on
exact numbers).

>>> s, m = symbol("s"), symbol("m")
>>> make("exp", s - m) * 1
Expr('exp(s - m)')
>>> make("exp", s - m) is make("exp", s - m)
True
>>> str(-(s + 1) ** 2 / 3)
'-(s + 1)**2/3'
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

from unsoft.errors import FormulaError
from unsoft.formula.operation import ATOM, COMPARISONS, OPERATIONS

_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_lock = threading.RLock()
Operand: TypeAlias = "Expr | int | float"
T = TypeVar("T")
_LOOSE = 2
"""Operators of at most this precedence are printed between spaces."""


def _methods(op: str) -> tuple[Callable[[Expr, Operand], Expr], Callable[[Expr, Operand], Expr]]:
    """Return the special methods of an operation for an Expr on the left and on the right."""

    def left(self: Expr, other: Operand) -> Expr:
        return _operate(op, self, other)

    def right(self: Expr, other: Operand) -> Expr:
        return _operate(op, other, self)

    return left, right


class Expr:
    """One node. ``op`` is "num", "sym" or an operation; see :func:`number`, :func:`symbol`, :func:`make`.

    ``symbols`` are the names the value depends on; ``constant`` is the value in double precision if there are
    none. Python's operators build larger expressions; ``==`` compares (same expression or not), it builds
    nothing.
    """

    __slots__ = ("op", "args", "value", "name", "symbols", "constant", "text", "__weakref__")

    op: str
    args: tuple[Expr, ...]
    value: Any  # int or float of a "num", else None
    name: Any  # str of a "sym", else None
    symbols: frozenset[str]
    constant: Any  # float, bool for a comparison, None if there are symbols
    text: Any  # str, made on first use

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"an Expr cannot be changed (attribute {attribute!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _node, (self.op, self.args, self.value, self.name)

    def __str__(self) -> str:
        if self.text is None:
            object.__setattr__(self, "text", bottom_up(self, _source))
        return str(self.text)

    def __repr__(self) -> str:
        return f"Expr({str(self)!r})"

    def __bool__(self) -> bool:
        if self.op in COMPARISONS:
            raise TypeError(f"the truth of {self} depends on its symbols; use make('where', condition, a, b)")
        return True

    __add__, __radd__ = _methods("add")
    __sub__, __rsub__ = _methods("sub")
    __mul__, __rmul__ = _methods("mul")
    __truediv__, __rtruediv__ = _methods("div")
    __pow__, __rpow__ = _methods("pow")
    __lt__ = _methods("lt")[0]
    __le__ = _methods("le")[0]
    __gt__ = _methods("gt")[0]
    __ge__ = _methods("ge")[0]

    def __neg__(self) -> Expr:
        return make("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return make("abs", self)


def number(value: int | float) -> Expr:
    """Return the node of a finite number; 2 and 2.0 are the same node."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number in a formula must be an int or a float, not {type(value).__name__}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise FormulaError(f"the number {value!r} is not finite in double precision")
    small = real.is_integer() and abs(real) < 2**53
    return _node("num", (), int(real) if small else real, None)


def symbol(name: str) -> Expr:
    """Return the node of a named quantity."""
    return _node("sym", (), None, name)


def make(op: str, *operands: Expr | int | float) -> Expr:
    """Return the node ``op(operands)``, after the harmless simplifications described above.

    >>> make("max", symbol("s"), 0)
    Expr('max(s, 0)')
    """
    if op not in OPERATIONS:
        raise FormulaError(f"there is no operation {op!r}")
    if OPERATIONS[op].arity != len(operands):
        raise FormulaError(f"{op} takes {OPERATIONS[op].arity} argument(s), not {len(operands)}")
    args = tuple(a if isinstance(a, Expr) else number(a) for a in operands)
    for k, arg in enumerate(args):
        is_condition, is_comparison = op == "where" and k == 0, arg.op in COMPARISONS
        if is_condition and not is_comparison:
            raise FormulaError(f"the first argument of where must be a comparison, not {arg}")
        if is_comparison and not is_condition:
            raise FormulaError(f"the comparison {arg} is not a number; write where({arg}, 1, 0)")
    return _simplified(op, args) or _node(op, args, None, None)


def postorder(*roots: Expr) -> list[Expr]:
    """Return every node below the roots once, operands before the operations that use them; any depth."""
    done: dict[Expr, None] = {}
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        missing = [a for a in node.args if a not in done]
        if missing:
            stack.extend(reversed(missing))
        else:
            done.setdefault(stack.pop())
    return list(done)


def bottom_up(root: Expr, visit: Callable[[Expr, list[T]], T]) -> T:
    """Return ``visit(node, values of its operands)`` of the root, computed once for each node below it.

    >>> bottom_up(make("exp", symbol("s") - 1), lambda node, depths: 1 + max(depths, default=0))
    3
    """
    values: dict[Expr, T] = {}
    for node in postorder(root):
        values[node] = visit(node, [values[a] for a in node.args])
    return values[root]


def substitute(expr: Expr, part: str | Expr, replacement: Expr) -> Expr:
    """Return the expression with a symbol, or every occurrence of a larger part, replaced.

    >>> s, m = symbol("s"), symbol("m")
    >>> substitute(make("exp", s - m), "s", 2 * s)
    Expr('exp(2*s - m)')
    >>> substitute(make("exp", 2 * s) + 2 * s, 2 * s, symbol("n"))
    Expr('exp(n) + n')
    """
    part = symbol(part) if isinstance(part, str) else part

    def replaced(node: Expr, args: list[Expr]) -> Expr:
        if node is part:
            return replacement
        return make(node.op, *args) if args else node

    return bottom_up(expr, replaced)


def precedence(node: Expr) -> int:
    """Return how tightly the printed form of a node binds; a negative number binds like a negation."""
    if node.op == "num":
        return OPERATIONS["neg"].precedence if node.value < 0 else ATOM
    return ATOM if node.op == "sym" else OPERATIONS[node.op].precedence


def infix(node: Expr, parts: list[str]) -> str | None:
    """Return an atom, or an operator between its printed operands with the brackets it needs; else None."""
    if node.op in ("num", "sym"):
        return repr(node.value) if node.op == "num" else str(node.name)
    own = precedence(node)
    if own == ATOM:
        return None
    # Operators group to the left, ** to the right: the other operand needs brackets at equal precedence.
    unbracketed = {"neg": None, "pow": 1}.get(node.op, 0)
    wrapped = [
        part if precedence(arg) > own or (precedence(arg) == own and k == unbracketed) else f"({part})"
        for k, (arg, part) in enumerate(zip(node.args, parts, strict=True))
    ]
    if node.op == "neg":
        return "-" + wrapped[0]
    left, right = wrapped
    between = OPERATIONS[node.op].symbol or ""
    between = f" {between} " if own <= _LOOSE else between
    return left + between + (f"({right})" if right.startswith("-") else right)  # s*(-2), not s*-2


def _source(node: Expr, parts: list[str]) -> str:
    """Return formula text that parses back to the same expression."""
    return infix(node, parts) or f"{node.op}({', '.join(parts)})"


def _simplified(op: str, args: tuple[Expr, ...]) -> Expr | None:
    a, b = args[0], args[-1]
    if all(arg.op == "num" for arg in args) and (value := exact(op, [arg.value for arg in args])) is not None:
        return number(value)
    match op:
        case "neg" if a.op == "num":
            return number(-a.value)
        case "neg" if a.op == "neg":
            return a.args[0]
        case "add" if a.value == 0:
            return b
        case "add" | "sub" if b.value == 0:
            return a
        case "sub" if a.value == 0:
            return make("neg", b)
        case "mul" if a.value == 1:
            return b
        case "mul" | "div" if b.value == 1:
            return a
        case "pow" if b.constant == 0:
            return number(1)
        case "pow" if b.constant == 1:
            return a
        case "where" if a.constant is not None:
            return args[1] if a.constant else b
        case "where" if args[1] is b:
            return b
    return None


def _operate(op: str, a: Any, b: Any) -> Expr:
    for operand in (a, b):
        if isinstance(operand, bool) or not isinstance(operand, (Expr, int, float)):
            return NotImplemented  # type: ignore[no-any-return]  # Python tries the other side
    return make(op, a, b)


def _node(op: str, args: tuple[Expr, ...], value: Any, name: Any) -> Expr:
    key = (op, args, value, name)
    with _lock:
        node = _nodes.get(key)
        if node is None:
            node = _nodes[key] = _new(*key)
    return node


def _new(op: str, args: tuple[Expr, ...], value: Any, name: Any) -> Expr:
    symbols = frozenset({name}) if op == "sym" else frozenset().union(*(a.symbols for a in args))
    constant = None if symbols else float(value) if op == "num" else fold(op, [a.constant for a in args])
    node = object.__new__(Expr)
    for field, content in zip(Expr.__slots__, (op, args, value, name, symbols, constant, None), strict=False):
        object.__setattr__(node, field, content)
    return node


def fold(op: str, values: Sequence[float | bool]) -> float | bool:
    """Return one operation on numbers in double precision. Raise FormulaError unless it is a finite number.

    >>> fold("add", (2, 3)), fold("max", (2, 3)), fold("lt", (2, 3))
    (5.0, 3.0, True)
    """
    numbers = [v if isinstance(v, bool) else float(v) for v in values]
    try:
        result = OPERATIONS[op].fold(*numbers)
    except (ArithmeticError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        shown = ", ".join(f"{v:g}" for v in numbers)
        raise FormulaError(f"the constant {op}({shown}) is not a finite real number")
    return result


def exact(op: str, values: Sequence[float]) -> int | float | None:
    """Return an arithmetic operation on numbers if a double can hold it without rounding, else None.

    Only such constants are folded while a formula is read, so that ``s/3`` keeps its 3 and ``1/3`` stays a
    fraction.

    >>> exact("div", (1, 4)), exact("div", (1, 3))
    (0.25, None)
    """
    if op not in _EXACT or (op == "div" and values[1] == 0) or (op == "pow" and not _small_power(*values)):
        return None
    a, b = values
    true = _EXACT[op](Fraction(a), int(b) if op == "pow" else Fraction(b))
    try:
        rounded = float(true)
    except OverflowError:
        return None
    return rounded if Fraction(rounded) == true else None


def _small_power(base: float, exponent: float) -> bool:
    return float(exponent).is_integer() and abs(exponent) <= 64 and (base != 0 or exponent > 0)


_EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}
