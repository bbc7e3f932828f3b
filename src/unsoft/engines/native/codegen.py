"""Generates the C++ of one formula, the ``struct Formula`` of kernel/tile.h, or of one rule of rows.

What depends on the query only (m, n, i, its fields and the parameters) is computed once a row and kept in
``struct Row``; what depends on the logit s, the key position j or fields of the key is computed for every
entry. Derivatives are symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unsoft.engines.terms import BIAS, masked
from unsoft.formula import Expr, Formula, Instruction, derivative, lower
from unsoft.formula.arguments import NO_SYMBOLS, Symbols
from unsoft.formula.cpp import definitions, literal, operation
from unsoft.formula.expr import number, postorder, symbol
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import COMPARISONS

_ENTRY = {"s", "j", BIAS}
_ROW_ARGUMENTS = "V m, V n, V i, const V *fields, const real *params"
_RULE_ROW = "V m, V n, V i, V t, const real *params"
_LIMITS = "V n, V i, const real *params"


def formula_source(formula: Formula) -> str:
    """Return the translation unit of a formula."""
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
    fields = formula.symbols
    by_field = {
        f"{side}_d{part}[{k}]": derivative(expr, name)
        for side, symbols in zip(fields._fields, fields, strict=True)
        for k, name in enumerate(symbols)
        for part, expr in value.items()
    }
    functions = {
        "peak": {} if peak is None else {"peak": peak},
        "value": value,
        "slope": slope,
        "bias_slopes": by_bias,
        "parameter_slopes": by_parameter,
        "field_slopes": {f"slopes.{output}": expr for output, expr in (slope | by_field).items()},
    }
    entry = EntryFunctions(functions, names, fields)
    offset, norm = formula.offset_mass, formula.norm
    row_slopes = _row_slopes(offset, norm, names)
    row_field_slopes = _row_slopes(offset, norm, fields.query)
    norm_slope = _ONE if norm is None else derivative(norm, "z")
    signature = f"(V z, {_ROW_ARGUMENTS})"
    slopes = (*slope.values(), *by_bias.values(), *by_parameter.values(), *by_field.values())
    of_rows = (peak, offset, norm, norm_slope, *row_slopes.values(), *row_field_slopes.values())
    used = {node.op for node in postorder(*slopes, *(x for x in of_rows if x is not None))}
    return f"""#include "interface.h"
{definitions(used - {"num", "sym"})}
struct Formula {{
    static constexpr bool has_peak = {_bool(formula.peak)}, has_mass = {_bool(mass)};
    static constexpr bool strength = {_bool(formula.bias == "strength" or None)};
    static constexpr bool operand = {_bool(operand or None)};
    static constexpr int parameters = {len(names)};
    static constexpr int query_fields = {len(fields.query)}, key_fields = {len(fields.key)};
    static constexpr double mass_degree = {formula.mass_degree!r};
    struct Key {{
        V j, field[key_fields + 1];
    }};
    struct FieldSlopes {{
        V weight, dweight, mass, dmass;
        V query_dweight[query_fields + 1], query_dmass[query_fields + 1];
        V key_dweight[key_fields + 1], key_dmass[key_fields + 1];
    }};
    struct Row {{
{code_lines(entry.row_declarations)}
    }};
    UNSOFT_INLINE Row row({_ROW_ARGUMENTS}) {{
{code_lines(entry.row_body)}
    }}
    UNSOFT_INLINE V peak(V s, const Row &row, const Key &key, V b) {{
        V peak = {{}};
{code_lines(entry.bodies["peak"])}
        return peak;
    }}
    UNSOFT_INLINE void value(V s, const Row &row, const Key &key, V b, V &weight, V &mass) {{
        mass = V{{}};
{code_lines(entry.bodies["value"])}
    }}
    UNSOFT_INLINE void slope(
        V s, const Row &row, const Key &key, V b, V &weight, V &dweight, V &mass, V &dmass
    ) {{
        mass = dmass = V{{}};
{code_lines(entry.bodies["slope"])}
    }}
    UNSOFT_INLINE void parameter_slopes(V s, const Row &row, const Key &key, V b, V *dweight, V *dmass) {{
{code_lines(entry.bodies["parameter_slopes"])}
    }}
    UNSOFT_INLINE void bias_slopes(V s, const Row &row, const Key &key, V b, V &dweight, V &dmass) {{
        dmass = V{{}};
{code_lines(entry.bodies["bias_slopes"])}
    }}
    UNSOFT_INLINE void field_slopes(V s, const Row &row, const Key &key, V b, FieldSlopes &slopes) {{
        slopes.mass = slopes.dmass = V{{}};
{code_lines(entry.bodies["field_slopes"])}
    }}
    UNSOFT_INLINE V offset({_ROW_ARGUMENTS}) {{
{code_lines(row_function({"return": offset or _ZERO}, names, fields))}
    }}
    UNSOFT_INLINE V norm{signature} {{
{code_lines(row_function({"return": norm or _Z}, names, fields))}
    }}
    UNSOFT_INLINE V norm_slope{signature} {{
{code_lines(row_function({"return": norm_slope}, names, fields))}
    }}
    UNSOFT_INLINE void row_parameter_slopes(V z, {_ROW_ARGUMENTS}, V *doffset, V *dnorm) {{
{code_lines(row_function(row_slopes, names, fields))}
    }}
    UNSOFT_INLINE void row_field_slopes(V z, {_ROW_ARGUMENTS}, V *doffset, V *dnorm) {{
{code_lines(row_function(row_field_slopes, names, fields))}
    }}
}};
#include "tile.h"
"""


def _row_slopes(offset: Expr | None, norm: Expr | None, names: Sequence[str]) -> dict[str, Expr]:
    """Return the derivatives of offset and norm by each of the names."""
    parts = {"doffset": offset, "dnorm": norm}
    return {
        f"{part}[{k}]": _ZERO if expr is None else derivative(expr, name)
        for k, name in enumerate(names)
        for part, expr in parts.items()
    }


class EntryFunctions:
    """Functions of one logit: their bodies, and the row constants they share."""

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Expr]],
        names: list[str],
        fields: Symbols = NO_SYMBOLS,
    ) -> None:
        outputs = {f"{f}.{output}": expr for f, group in functions.items() for output, expr in group.items()}
        instructions, results = lower(outputs)
        by_target = {x.target: x for x in instructions}
        per_entry = {*_ENTRY, *fields.key}
        for x in instructions:
            if per_entry & set(x.args):
                per_entry.add(x.target)
        row_operand = _operand_names(names, fields)
        row_constants: list[Operand] = []
        self.bodies: dict[str, list[str]] = {}

        def operand(x: Operand) -> str:
            """Return an operand of an entry function: what belongs to the row is read from there."""
            if not isinstance(x, str) or x in per_entry:
                return row_operand(x)
            if x not in row_constants:
                row_constants.append(x)
            return f"row.{row_operand(x)}"

        of_key = _loaded("key_field", "key.field", fields.key)
        if any("j" in expr.symbols for expr in outputs.values()):
            of_key.append("[[maybe_unused]] const V j = key.j;")
        for f, group in functions.items():
            wanted = _needed([results[f"{f}.{output}"] for output in group], by_target)
            body = [
                _statement(x, operand) for x in instructions if x.target in wanted and x.target in per_entry
            ]
            self.bodies[f] = (
                of_key + body + [f"{output} = {operand(results[f'{f}.{output}'])};" for output in group]
            )
        wanted = _needed(row_constants, by_target)
        self.row_fields = [row_operand(x) for x in row_constants]
        self.row_declarations = [
            f"{'I' if x in by_target and by_target[x].op in COMPARISONS else 'V'} {row_operand(x)};"
            for x in row_constants
        ]
        self.row_body = _parameters(names, fields)
        self.row_body += [_statement(x, row_operand) for x in instructions if x.target in wanted]
        self.row_body.append("Row row;")
        self.row_body += [f"row.{field} = {field};" for field in self.row_fields]
        self.row_body.append("return row;")


def row_function(outputs: Mapping[str, Expr], names: list[str], fields: Symbols = NO_SYMBOLS) -> list[str]:
    instructions, results = lower(outputs)
    operand = _operand_names(names, fields)
    body = _parameters(names, fields) + [_statement(x, operand) for x in instructions]
    if "return" in results:
        return [*body, f"return {operand(results['return'])};"]
    return body + [f"{output} = {operand(result)};" for output, result in results.items()]


def _needed(operands: list[Operand], by_target: Mapping[str, Instruction]) -> set[str]:
    """Return the targets of all instructions that ``operands`` depend on."""
    seen: set[str] = set()
    stack = [x for x in operands if isinstance(x, str) and x in by_target]
    while stack:
        target = stack.pop()
        if target not in seen:
            seen.add(target)
            stack.extend(a for a in by_target[target].args if isinstance(a, str) and a in by_target)
    return seen


def _statement(x: Instruction, operand: Callable[[Operand], str]) -> str:
    args = [operand(a) for a in x.args]
    if x.op in ("max", "min") and any(not isinstance(a, str) for a in x.args):
        # Against a number, one instruction propagates NaN if the number comes first.
        first, second = args if not isinstance(x.args[0], str) else reversed(args)
        return f"const auto {x.target} = {'larger' if x.op == 'max' else 'smaller'}({first}, {second});"
    return f"const auto {x.target} = {operation(x.op, args)};"


def _operand_names(names: list[str], fields: Symbols) -> Callable[[Operand], str]:
    """Return a function from operands to C++. Parameters and fields are renamed: their names may be taken."""
    renamed = {name: f"param_{k}" for k, name in enumerate(names)} | {BIAS: "b"}
    for kind, symbols in zip(("query_field", "key_field"), fields, strict=True):
        renamed |= {name: f"{kind}_{k}" for k, name in enumerate(symbols)}
    return lambda x: renamed.get(x, x) if isinstance(x, str) else f"splat({literal(x)})"


def _parameters(names: list[str], fields: Symbols) -> list[str]:
    parameters = [f"[[maybe_unused]] const V param_{k} = splat(params[{k}]);" for k in range(len(names))]
    return parameters + _loaded("query_field", "fields", fields.query)


def _loaded(kind: str, array: str, symbols: Sequence[str]) -> list[str]:
    return [f"[[maybe_unused]] const V {kind}_{k} = {array}[{k}];" for k in range(len(symbols))]


def _bool(part: object) -> str:
    return "false" if part is None else "true"


def code_lines(statements: list[str]) -> str:
    return "\n".join(f"        {line}" for line in statements)


def threshold_source(parts: Mapping[str, Expr], names: list[str]) -> str:
    """Return the translation unit of a rule with a threshold per row: the ``struct Rule`` of
    kernel/rows/threshold.h. ``parts`` are weight, mass, low, high, straight and straight_slope."""
    weight, mass = parts["weight"], parts["mass"]
    functions = {
        "mass": {"mass": mass, "mass_t": derivative(mass, "t")},
        "weight": {"weight": weight},
        "slope": {
            "weight": weight,
            "weight_s": derivative(weight, "s"),
            "weight_t": derivative(weight, "t"),
            "mass_s": derivative(mass, "s"),
            "mass_t": derivative(mass, "t"),
        },
        "parameter_slopes": {
            f"{part}_p[{k}]": derivative(parts[part], name)
            for k, name in enumerate(names)
            for part in ("weight", "mass")
        },
    }
    entry = EntryFunctions(functions, names)
    whole = [expr for group in functions.values() for expr in group.values()]
    used = {node.op for node in postorder(*whole, *parts.values())}

    def limit(part: str) -> str:
        return code_lines(row_function({"return": parts[part]}, names))

    straight = {"y": parts["straight"], "slope": parts["straight_slope"]}
    return f"""#include "simd.h"
{definitions(used - {"num", "sym"})}
struct Rule {{
    static constexpr int parameters = {len(names)};
    struct Row {{
{code_lines(entry.row_declarations)}
    }};
    UNSOFT_INLINE Row row({_RULE_ROW}) {{
{code_lines(entry.row_body)}
    }}
    UNSOFT_INLINE void mass(V s, const Row &row, V &mass, V &mass_t) {{
{code_lines(entry.bodies["mass"])}
    }}
    UNSOFT_INLINE void weight(V s, const Row &row, V &weight) {{
{code_lines(entry.bodies["weight"])}
    }}
    UNSOFT_INLINE void slope(V s, const Row &row, V &weight, V &weight_s, V &weight_t, V &mass_s,
                             V &mass_t) {{
{code_lines(entry.bodies["slope"])}
    }}
    UNSOFT_INLINE void parameter_slopes(V s, const Row &row, V *weight_p, V *mass_p) {{
{code_lines(entry.bodies["parameter_slopes"])}
    }}
    UNSOFT_INLINE V low({_LIMITS}) {{
{limit("low")}
    }}
    UNSOFT_INLINE V high({_LIMITS}) {{
{limit("high")}
    }}
    UNSOFT_INLINE void straight(V z, {_LIMITS}, V &y, V &slope) {{
{code_lines(row_function(straight, names))}
    }}
}};
#include "rows/threshold.h"
"""


_ZERO, _ONE, _Z = number(0), number(1), symbol("z")
