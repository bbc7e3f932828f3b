"""Fewer instructions with the same results, bit for bit: every instruction saved is one pass over a tile
saved.

Symbolic derivatives are full of (-1) x, a - (-b) and of products that differ only in the order of their
factors.

>>> from unsoft.formula import lower, parse
>>> instructions, results = tidy(*lower({"y": parse("s*m + m*s"), "x": parse("s - m*(-1)")}))
>>> for instruction in instructions: print(*instruction)
_0 mul ('s', 'm')
_2 add ('_0', '_0')
_4 add ('s', 'm')
>>> results
{'y': '_2', 'x': '_4'}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from unsoft.formula import Instruction
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import OPERATIONS


def tidy(
    instructions: Sequence[Instruction], results: Mapping[Any, Operand]
) -> tuple[list[Instruction], dict[Any, Operand]]:
    """Instructions and results as :func:`unsoft.formula.instructions` gives them, shorter."""
    renamed: dict[Operand, Operand] = {}
    known: dict[tuple[Operand, ...], str] = {}
    negated: dict[Operand, Operand] = {}
    kept: list[Instruction] = []
    for target, op, args in instructions:
        op, args = _rewritten(op, tuple(renamed.get(a, a) for a in args), negated)
        key = (op, *(sorted(args, key=str) if OPERATIONS[op].commutative else args))
        renamed[target] = known.setdefault(key, target)
        if renamed[target] == target:
            kept.append(Instruction(target, op, args))
            if op == "neg":
                negated[target] = args[0]
    final = {name: renamed.get(operand, operand) for name, operand in results.items()}
    return _used(kept, set(final.values())), final


def _rewritten(
    op: str, args: tuple[Operand, ...], negated: Mapping[Operand, Operand]
) -> tuple[str, tuple[Operand, ...]]:
    match op, args:
        case ("mul", (-1.0, x)) | ("mul", (x, -1.0)):
            return "neg", (x,)
        case "add", (a, b) if b in negated:
            return "sub", (a, negated[b])
        case "add", (a, b) if a in negated:
            return "sub", (b, negated[a])
        case "sub", (a, b) if b in negated:
            return "add", (a, negated[b])
    return op, args


def _used(instructions: list[Instruction], needed: set[Operand]) -> list[Instruction]:
    """Without the instructions that nothing needs any more."""
    used = []
    for instruction in reversed(instructions):
        if instruction.target in needed:
            used.append(instruction)
            needed.update(instruction.args)
    return used[::-1]
