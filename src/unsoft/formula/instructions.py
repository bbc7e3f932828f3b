"""Lowers expressions to a straight list of instructions, every shared part computed once, and runs them.

The torch evaluation runs these, and the C++ and JavaScript printers write them out. Constants are folded,
integer powers become multiplications, and an instruction uses only symbols, numbers and earlier targets.

>>> from unsoft.formula.parser import parse
>>> instructions, results = lower({"weight": parse("exp(s - m)"), "mass": parse("exp(s - m)**3")})
>>> for instruction in instructions: print(*instruction)
_0 sub ('s', 'm')
_1 exp ('_0',)
_2 mul ('_1', '_1')
_3 mul ('_2', '_1')
>>> results
{'weight': '_1', 'mass': '_3'}
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS

Operand = str | float


class Instruction(NamedTuple):
    """``target = op(*args)``; an argument is a symbol, an earlier target or a number."""

    target: str
    op: str
    args: tuple[Operand, ...]


def lower(outputs: Mapping[str, Expr]) -> tuple[list[Instruction], dict[str, Operand]]:
    """Return instructions that compute all outputs, and the operand that holds each of them.

    Targets are called _0, _1, ...; no symbol of a formula starts with an underscore. An operation on a
    comparison (only ``where`` has one) receives it as a target whose op is lt, le, gt, ge, eq or ne.
    """
    builder = _Builder()
    operand: dict[Expr, Operand] = {}
    for node in postorder(*outputs.values()):
        if node.constant is not None:
            operand[node] = node.constant
        elif node.op == "sym":
            operand[node] = node.name
        elif node.op == "pow" and (exponent := _integer(node.args[1])) is not None:
            operand[node] = builder.power(operand[node.args[0]], exponent)
        else:
            operand[node] = builder.emit(node.op, *(operand[a] for a in node.args))
    return builder.instructions, {name: operand[expr] for name, expr in outputs.items()}


def _integer(exponent: Expr) -> int | None:
    value = exponent.constant
    return int(value) if value is not None and value.is_integer() else None


def run(
    instructions: Sequence[Instruction], results: Mapping[str, Operand], env: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Execute lowered instructions on tensors of one dtype, one torch call each, and return the results.

    The derivatives are autograd's own, without the conventions of :mod:`unsoft.formula.derive`.

    >>> import torch
    >>> from unsoft.formula.parser import parse
    >>> run(*lower({"y": parse("max(s, 0)")}), {"s": torch.tensor([-1.0, 3.0])})["y"].tolist()
    [0.0, 3.0]

    Results have the shape of the symbols they depend on; a result that depends on none is a number.
    """
    values: dict[str, Any] = dict(env)
    for target, op, args in instructions:
        values[target] = OPERATIONS[op].torch(*(values[a] if isinstance(a, str) else a for a in args))
    return {
        name: values[operand] if isinstance(operand, str) else operand for name, operand in results.items()
    }


class _Builder:
    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.known: dict[tuple[Operand, ...], str] = {}

    def emit(self, op: str, *args: Operand) -> str:
        key = (op, *args)
        if key not in self.known:
            self.known[key] = f"_{len(self.instructions)}"
            self.instructions.append(Instruction(self.known[key], op, args))
        return self.known[key]

    def power(self, base: Operand, exponent: int) -> Operand:
        """Emit binary powering; x**-n is 1 / x**n, so it overflows and underflows like the product."""
        if exponent < 0:
            return self.emit("div", 1.0, self.power(base, -exponent))
        if exponent == 1:
            return base
        half = self.power(base, exponent // 2)
        square = self.emit("mul", half, half)
        return self.emit("mul", square, base) if exponent % 2 else square
