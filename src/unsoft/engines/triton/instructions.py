"""Rewrite the instructions of a formula for a GPU.

An operand is a number, belongs to the row (m, n, i, parameters, query fields) or to the entry (s, j, the
bias, key fields). Operations on rows are cheap, so work is moved there: exp(x) becomes exp2(x log2(e)) with
the factor folded into operands of the row, so that exp(s - m) takes one fused multiply-add and one special
function. A division by an operand of the row becomes a product. sign(x) y becomes y with the sign bit
flipped, unless y is a number.

>>> from unsoft.formula import parse
>>> body, results = gpu_instructions([parse("exp(s - m)/n")])
>>> for instruction in body: print(*instruction)
_x1 mul ('s', 1.4426950408889634)
_x2 mul ('m', 1.4426950408889634)
_x3 sub ('_x1', '_x2')
_1 exp2 ('_x3',)
_x5 div (1.0, 'n')
_2 mul ('_1', '_x5')
>>> results
['_2']
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unsoft.engines.terms import BIAS
from unsoft.engines.tiled.program import tidy
from unsoft.formula import Expr, Instruction, lower
from unsoft.formula.instructions import Operand

LOG2E = 1 / math.log(2)
_ENTRY = frozenset({"s", "j", BIAS})


def gpu_instructions(
    outputs: Sequence[Expr], key_fields: Sequence[str] = ()
) -> tuple[list[Instruction], list[Operand]]:
    """Return instructions that compute all outputs, and the operand that holds each. Besides the operations
    of formulas they use ``exp2`` and ``with_sign_of``."""
    instructions, results = tidy(*lower({str(k): expr for k, expr in enumerate(outputs)}))
    rewriting = _Rewriting(instructions, key_fields)
    for instruction in instructions:
        rewriting.add(instruction)
    final = [results[str(k)] for k in range(len(outputs))]
    needed, kept = set(final), []
    for instruction in reversed(rewriting.body):
        if instruction.target in needed:
            kept.append(instruction)
            needed.update(instruction.args)
    return kept[::-1], final


class _Rewriting:
    def __init__(self, instructions: Sequence[Instruction], key_fields: Sequence[str]) -> None:
        self.made = {x.target: x for x in instructions}
        self.body: list[Instruction] = []
        self.entry: set[Operand] = {*_ENTRY, *key_fields}
        self.scaled: dict[str, Operand] = {}

    def add(self, x: Instruction) -> None:
        match x:
            case (_, "exp", (a,)):
                self.emit(x.target, "exp2", self.times_log2e(a))
            case (_, "sigmoid", (a,)):
                power = self.new("exp2", self.new("neg", self.times_log2e(a)))
                self.emit(x.target, "div", 1.0, self.new("add", 1.0, power))
            case (_, "div", (a, b)) if a in self.entry and b not in self.entry:
                inverse = self.new("div", 1.0, b) if isinstance(b, str) else 1.0 / b
                self.emit(x.target, "mul", a, inverse)
            case (_, "pow", (float(a), b)) if a > 0:
                self.emit(x.target, "exp2", self.new("mul", b, math.log2(a)))
            case (_, "mul", (a, str(b))) if self.is_sign(a):
                self.emit(x.target, "with_sign_of", b, self.made[str(a)].args[0])
            case (_, "mul", (str(a), b)) if self.is_sign(b):
                self.emit(x.target, "with_sign_of", a, self.made[str(b)].args[0])
            case _:
                self.emit(x.target, x.op, *x.args)

    def is_sign(self, x: Operand) -> bool:
        return isinstance(x, str) and x in self.made and self.made[x].op == "sign"

    def times_log2e(self, x: Operand) -> Operand:
        if not isinstance(x, str):
            return x * LOG2E
        if x not in self.scaled:
            self.scaled[x] = self._times_log2e(x)
        return self.scaled[x]

    def _times_log2e(self, x: str) -> Operand:
        _, op, args = self.made.get(x, Instruction(x, "", ()))
        row = [a for a in args if a not in self.entry]
        match op:
            case "neg":
                return self.new("neg", self.times_log2e(args[0]))
            case "add" | "sub" if row and x in self.entry:
                return self.new(op, *(self.times_log2e(a) for a in args))
            case "mul" if row and x in self.entry:
                a, b = args if args[1] in row else args[::-1]
                return self.new("mul", a, self.times_log2e(b))
        return self.new("mul", x, LOG2E)

    def new(self, op: str, *args: Operand) -> str:
        target = f"_x{len(self.body)}"
        self.emit(target, op, *args)
        return target

    def emit(self, target: str, op: str, *args: Operand) -> None:
        self.body.append(Instruction(target, op, args))
        if self.entry & set(args):
            self.entry.add(target)
