"""Prints formulas as plain JavaScript arrow functions, for the playground of the report.

>>> from unsoft.formula.parser import parse
>>> print(arrow(parse("exp(s - m)"), ["s", "m"]))
(s, m) => {
  const _0 = s - m;
  const _1 = Math.exp(_0);
  return _1;
}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from unsoft.formula.expr import Expr
from unsoft.formula.instructions import Operand, lower
from unsoft.formula.operation import FUNCTIONS, OPERATIONS

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula


def arrow(expr: Expr, inputs: Sequence[str]) -> str:
    """Return an arrow function of numbers that contains the helpers it needs."""
    return _function(expr, inputs, _helpers(expr))


def formula_source(formula: Formula) -> str:
    """Return an arrow function from a row of logits to its weights.

    Its second argument may contain parameters and i, the position of the row. It must contain the fields: a
    number for those of the query, an array for those of the keys.

    >>> from unsoft.formula.formula import Formula
    >>> print(formula_source(Formula("max(s, 0)/n")))
    (logits, {i = logits.length - 1} = {}) => {
      const n = logits.length;
      const weight = (s, j) => {
        const _0 = Math.max(s, 0);
        const _1 = _0 / n;
        return _1;
      };
      return logits.map(weight);
    }
    """
    parts = {name: getattr(formula, name) for name in _INPUTS if getattr(formula, name) is not None}
    body = [*_helpers(*parts.values()), "const n = logits.length;"]
    for name, expr in parts.items():
        of_key = [f"const {field} = {field}_of[j];" for field in formula.symbols.key if field in expr.symbols]
        body.append(f"const {name} = {_function(expr, _INPUTS[name], of_key)};")
        if name == "peak":
            body.append("const m = logits.map(peak).reduce((a, b) => Math.max(a, b), -Infinity);")
    if "mass" not in parts:
        body.append("return logits.map(weight);")
    else:
        offset = " + offset_mass()" if "offset_mass" in parts else ""
        total = f"logits.map(mass).reduce((a, b) => a + b, 0){offset}"
        body.append(f"const total = {f'norm({total})' if 'norm' in parts else total};")
        body.append("return logits.map((s, j) => total === 0 ? 0 : weight(s, j) / total);")
    fields = [*formula.symbols.query, *(f"{name}: {name}_of" for name in formula.symbols.key)]
    options = ", ".join(
        ["i = logits.length - 1", *fields, *(f"{name} = {value!r}" for name, value in formula.params.items())]
    )
    return f"(logits, {{{options}}} = {{}}) => {_block(body)}"


def operations_source() -> str:
    """Return the table of all functions and operators, for a page that parses formulas itself.

    ``unsoftOperations`` maps the name or symbol of each to its number of operands and the function.

    >>> '["cos", {arity: 1, of: (a) => Math.cos(a)}]' in operations_source()
    True
    """
    entries = []
    for name, operation in OPERATIONS.items():
        letters = ["a", "b", "c"][: operation.arity]
        value = f"({', '.join(letters)}) => {_operation(name, letters)}"
        entries.append(
            f"    [{json.dumps(operation.symbol or name)}, {{arity: {operation.arity}, of: {value}}}],"
        )
    body = [x.javascript_definition for x in OPERATIONS.values() if x.javascript_definition]
    body += [f"const functions = new Set({json.dumps(list(FUNCTIONS))});", "const table = new Map(["]
    lines = "\n".join(f"  {line}" for line in [*body, *entries, "]);", "return { functions, table };"])
    return f"const unsoftOperations = (() => {{\n{lines}\n}})();\n"


_INPUTS: dict[str, list[str]] = {  # arguments of each part; m, n, i and the parameters are in scope
    "peak": ["s", "j"],
    "weight": ["s", "j"],
    "mass": ["s", "j"],
    "offset_mass": [],
    "norm": ["z"],
}


def _function(expr: Expr, inputs: Sequence[str], helpers: Sequence[str] = ()) -> str:
    instructions, results = lower({"value": expr})
    values = {target: _operation(op, [_operand(a) for a in args]) for target, op, args in instructions}
    statements = [f"const {target} = {value};" for target, value in values.items()]
    body = [*helpers, *statements, f"return {_operand(results['value'])};"]
    return f"({', '.join(inputs)}) => {_block(body)}"


def _helpers(*exprs: Expr) -> list[str]:
    """Return the definitions that the operations of all expressions need."""
    ops = {instruction.op for expr in exprs for instruction in lower({"": expr})[0]}
    texts = (OPERATIONS[op].javascript_definition for op in sorted(ops))
    return [text for text in texts if text]


def _operation(op: str, args: Sequence[str]) -> str:
    return OPERATIONS[op].write("javascript", f"Math.{op}", list(args))


def _operand(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    return repr(int(operand) if operand.is_integer() and abs(operand) < 2**53 else operand)


def _block(lines: Iterable[str]) -> str:
    indented = "\n".join(lines).replace("\n", "\n  ")
    return f"{{\n  {indented}\n}}"
