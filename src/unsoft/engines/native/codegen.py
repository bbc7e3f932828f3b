"""Writes the C++ of one formula: the ``struct Formula`` that kernel/tile.h is compiled around.

What depends on the query only (m, n, i and the parameters) is computed once a row and kept in ``struct Row``;
what depends on the logit s or the key position j is computed for every entry. Derivatives are symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unsoft.engines.terms import BIAS, masked
from unsoft.formula import Expr, Formula, Instruction, derivative, lower
from unsoft.formula.cpp import definitions, literal, operation
from unsoft.formula.expr import number, postorder, symbol
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import COMPARISONS

_ENTRY = {"s", "j", BIAS}
_ROW_ARGUMENTS = "V m, V n, V i, const real *params"


def formula_source(formula: Formula) -> str:
    """The whole translation unit of a formula."""
    names = sorted(formula.params)
    weight, mass, peak = formula.safe_weight, formula.safe_mass, formula.peak
    operand = formula.bias not in ("logit", "strength")
    if operand:
        weight = masked(weight, formula)
        mass, peak = (None if part is None else masked(part, formula) for part in (mass, peak))
    value = {"weight": weight} | ({} if mass is None else {"mass": mass})
    slope = value | {f"d{part}": derivative(expr, "s") for part, expr in value.items()}
    by_parameter = {
        f"d{part}[{k}]": derivative(expr, name)
        for k, name in enumerate(names)
        for part, expr in value.items()
    }
    by_bias = {f"d{part}": derivative(expr, BIAS) for part, expr in value.items()}
    functions = {
        "peak": {} if peak is None else {"peak": peak},
        "value": value,
        "slope": slope,
        "bias_slopes": by_bias,
    }
    entry = _EntryFunctions(functions | {"parameter_slopes": by_parameter}, names)
    offset, norm = formula.offset_mass, formula.norm
    row_slopes = {f"doffset[{k}]": derivative(offset, p) for k, p in enumerate(names) if offset is not None}
    row_slopes |= {f"dnorm[{k}]": derivative(norm, p) for k, p in enumerate(names) if norm is not None}
    for k in range(len(names)):
        row_slopes.setdefault(f"doffset[{k}]", _ZERO), row_slopes.setdefault(f"dnorm[{k}]", _ZERO)
    norm_slope = _ONE if norm is None else derivative(norm, "z")
    signature = f"(V z, {_ROW_ARGUMENTS})"
    rows = [x for x in (peak, offset, norm, norm_slope, *row_slopes.values()) if x is not None]
    used = {node.op for node in postorder(*slope.values(), *by_bias.values(), *by_parameter.values(), *rows)}
    return f"""#include "interface.h"
{definitions(used - {"num", "sym"})}
struct Formula {{
    static constexpr bool has_peak = {_bool(formula.peak)}, has_mass = {_bool(mass)};
    static constexpr bool strength = {_bool(formula.bias == "strength" or None)};
    static constexpr bool operand = {_bool(operand or None)};
    static constexpr int parameters = {len(names)};
    static constexpr double mass_degree = {formula.mass_degree!r};
    struct Row {{
{_lines(entry.row_declarations)}
    }};
    UNSOFT_INLINE Row row({_ROW_ARGUMENTS}) {{
{_lines(entry.row_body)}
    }}
    UNSOFT_INLINE V peak(V s, const Row &row, V j, V b) {{
        V peak = {{}};
{_lines(entry.bodies["peak"])}
        return peak;
    }}
    UNSOFT_INLINE void value(V s, const Row &row, V j, V b, V &weight, V &mass) {{
        mass = V{{}};
{_lines(entry.bodies["value"])}
    }}
    UNSOFT_INLINE void slope(V s, const Row &row, V j, V b, V &weight, V &dweight, V &mass, V &dmass) {{
        mass = dmass = V{{}};
{_lines(entry.bodies["slope"])}
    }}
    UNSOFT_INLINE void parameter_slopes(V s, const Row &row, V j, V b, V *dweight, V *dmass) {{
{_lines(entry.bodies["parameter_slopes"])}
    }}
    UNSOFT_INLINE void bias_slopes(V s, const Row &row, V j, V b, V &dweight, V &dmass) {{
        dmass = V{{}};
{_lines(entry.bodies["bias_slopes"])}
    }}
    UNSOFT_INLINE V offset({_ROW_ARGUMENTS}) {{
{_lines(_row_function({"return": offset or _ZERO}, names))}
    }}
    UNSOFT_INLINE V norm{signature} {{
{_lines(_row_function({"return": norm or _Z}, names))}
    }}
    UNSOFT_INLINE V norm_slope{signature} {{
{_lines(_row_function({"return": norm_slope}, names))}
    }}
    UNSOFT_INLINE void row_parameter_slopes(V z, {_ROW_ARGUMENTS}, V *doffset, V *dnorm) {{
{_lines(_row_function(row_slopes, names))}
    }}
}};
#include "tile.h"
"""


class _EntryFunctions:
    """Functions of one logit: their bodies, and the row constants they share."""

    def __init__(self, functions: Mapping[str, Mapping[str, Expr]], names: list[str]) -> None:
        outputs = {f"{f}.{output}": expr for f, group in functions.items() for output, expr in group.items()}
        instructions, results = lower(outputs)
        by_target = {x.target: x for x in instructions}
        per_entry = set(_ENTRY)
        for x in instructions:
            if per_entry & set(x.args):
                per_entry.add(x.target)
        row_operand = _operand_names(names)
        row_constants: list[Operand] = []
        self.bodies: dict[str, list[str]] = {}

        def operand(x: Operand) -> str:
            """A name as an entry function sees it: what belongs to the row is read from there."""
            if not isinstance(x, str) or x in per_entry:
                return row_operand(x)
            if x not in row_constants:
                row_constants.append(x)
            return f"row.{row_operand(x)}"

        for f, group in functions.items():
            wanted = _needed([results[f"{f}.{output}"] for output in group], by_target)
            body = [
                _statement(x, operand) for x in instructions if x.target in wanted and x.target in per_entry
            ]
            self.bodies[f] = body + [f"{output} = {operand(results[f'{f}.{output}'])};" for output in group]
        wanted = _needed(row_constants, by_target)
        self.row_fields = [row_operand(x) for x in row_constants]
        self.row_declarations = [
            f"{'I' if x in by_target and by_target[x].op in COMPARISONS else 'V'} {row_operand(x)};"
            for x in row_constants
        ]
        self.row_body = _parameters(names)
        self.row_body += [_statement(x, row_operand) for x in instructions if x.target in wanted]
        self.row_body.append("Row row;")
        self.row_body += [f"row.{field} = {field};" for field in self.row_fields]
        self.row_body.append("return row;")


def _row_function(outputs: Mapping[str, Expr], names: list[str]) -> list[str]:
    instructions, results = lower(outputs)
    operand = _operand_names(names)
    body = _parameters(names) + [_statement(x, operand) for x in instructions]
    if "return" in results:
        return [*body, f"return {operand(results['return'])};"]
    return body + [f"{output} = {operand(result)};" for output, result in results.items()]


def _needed(wanted: list[Operand], by_target: Mapping[str, Instruction]) -> set[str]:
    """Targets of all instructions that the wanted operands rest on."""
    seen: set[str] = set()
    stack = [w for w in wanted if isinstance(w, str) and w in by_target]
    while stack:
        target = stack.pop()
        if target not in seen:
            seen.add(target)
            stack.extend(a for a in by_target[target].args if isinstance(a, str) and a in by_target)
    return seen


def _statement(x: Instruction, operand: Callable[[Operand], str]) -> str:
    args = [operand(a) for a in x.args]
    if x.op in ("max", "min") and any(not isinstance(a, str) for a in x.args):
        # Against a number, one instruction that lets NaN through will do, if the number comes first.
        first, second = args if not isinstance(x.args[0], str) else reversed(args)
        return f"const auto {x.target} = {'larger' if x.op == 'max' else 'smaller'}({first}, {second});"
    return f"const auto {x.target} = {operation(x.op, args)};"


def _operand_names(names: list[str]) -> Callable[[Operand], str]:
    """Operands as C++: parameters are renamed, since their names may mean something there."""
    renamed = {name: f"param_{k}" for k, name in enumerate(names)} | {BIAS: "b"}
    return lambda x: renamed.get(x, x) if isinstance(x, str) else f"splat({literal(x)})"


def _parameters(names: list[str]) -> list[str]:
    return [f"[[maybe_unused]] const V param_{k} = splat(params[{k}]);" for k in range(len(names))]


def _bool(part: object) -> str:
    return "false" if part is None else "true"


def _lines(statements: list[str]) -> str:
    return "\n".join(f"        {line}" for line in statements)


_ZERO, _ONE, _Z = number(0), number(1), symbol("z")
