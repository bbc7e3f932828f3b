"""Generates the C++ of one formula, the ``struct Formula`` of kernel/tile.h, or of one rule of rows.

What depends on the query only (m, n, i, its fields and the parameters) is computed once a row and kept in
``struct Row``; what depends on the logit s, the key position j or fields of the key is computed for every
entry. Derivatives are symbolic.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from unsoft.engines.terms import BIAS, masked
from unsoft.formula import Expr, Formula, Instruction, derivative, lower
from unsoft.formula.arguments import NO_SYMBOLS, Symbols
from unsoft.formula.cpp import definitions, literal, operation
from unsoft.formula.evaluation import evaluate
from unsoft.formula.expr import number, postorder, symbol
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import COMPARISONS

_ENTRY = {"s", "j", BIAS}
_ENTRY_ARGUMENTS = "V s, const Row &row, const Key &key, V b"
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
    norm_slope = _ONE if norm is None else derivative(norm, "z")
    of_row = {
        "offset": {"return": offset or _ZERO},
        "norm": {"return": norm or _Z},
        "norm_slope": {"return": norm_slope},
        "row_parameter_slopes": _row_slopes(offset, norm, names),
        "row_field_slopes": _row_slopes(offset, norm, fields.query),
    }
    whole = [expr for group in (*functions.values(), *of_row.values()) for expr in group.values()]
    begin = {
        "peak": "V peak = {};",
        "value": "mass = V{};",
        "slope": "mass = dmass = V{};",
        "bias_slopes": "dmass = V{};",
        "field_slopes": "slopes.mass = slopes.dmass = V{};",
    }
    bodies = {name: [begin[name], *body] if name in begin else body for name, body in entry.bodies.items()}
    bodies["peak"].append("return peak;")
    bodies["value_half"] = [re.sub(r"\b(vexp|vexpdiff)\(", r"\1_short(", line) for line in bodies["value"]]
    bodies |= {name: row_function(outputs, names, fields) for name, outputs in of_row.items()}
    signatures = {
        "peak": f"V peak({_ENTRY_ARGUMENTS})",
        "value": f"void value({_ENTRY_ARGUMENTS}, V &weight, V &mass)",
        "value_half": f"void value_half({_ENTRY_ARGUMENTS}, V &weight, V &mass)",
        "slope": f"void slope({_ENTRY_ARGUMENTS}, V &weight, V &dweight, V &mass, V &dmass)",
        "parameter_slopes": f"void parameter_slopes({_ENTRY_ARGUMENTS}, V *dweight, V *dmass)",
        "bias_slopes": f"void bias_slopes({_ENTRY_ARGUMENTS}, V &dweight, V &dmass)",
        "field_slopes": f"void field_slopes({_ENTRY_ARGUMENTS}, FieldSlopes &slopes)",
        "offset": f"V offset({_ROW_ARGUMENTS})",
        "norm": f"V norm(V z, {_ROW_ARGUMENTS})",
        "norm_slope": f"V norm_slope(V z, {_ROW_ARGUMENTS})",
        "row_parameter_slopes": f"void row_parameter_slopes(V z, {_ROW_ARGUMENTS}, V *doffset, V *dnorm)",
        "row_field_slopes": f"void row_field_slopes(V z, {_ROW_ARGUMENTS}, V *doffset, V *dnorm)",
    }
    return f"""#include "interface.h"
{_definitions(whole)}
struct Formula {{
    static constexpr bool has_peak = {_bool(peak is not None)}, has_mass = {_bool(mass is not None)};
    static constexpr bool exact_peak = {_bool(_peak_is_exact(formula))};
    static constexpr bool strength = {_bool(formula.bias == "strength")};
    static constexpr bool operand = {_bool(operand)};
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
{entry.row_struct(_ROW_ARGUMENTS)}
{_methods(signatures, bodies)}
}};
#include "tile.h"
"""


def _peak_is_exact(formula: Formula) -> bool:
    """Return whether the largest weight of a peaked row is a power of two, which bfloat16 does not round."""
    if formula.peak is None:
        return False
    env: dict[str, torch.Tensor | float] = dict.fromkeys(("n", "i", "j"), 1.0)
    env.update((name, 1.1 + 0.3 * k) for k, name in enumerate(formula.symbols.all))  # no powers of two
    env.update(formula.params)
    env["s"] = torch.tensor([9.0, 17.5], dtype=torch.float64)
    env["m"] = evaluate(formula.peak, env)
    exponent = evaluate(formula.safe_weight, env).abs().log2()
    return bool(((exponent - exponent.round()).abs() < 1e-3).all())


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
        self, functions: Mapping[str, Mapping[str, Expr]], names: list[str], fields: Symbols = NO_SYMBOLS
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
        self._row_declarations = [
            f"{'I' if x in by_target and by_target[x].op in COMPARISONS else 'V'} {row_operand(x)};"
            for x in row_constants
        ]
        computed = [_statement(x, row_operand) for x in instructions if x.target in wanted]
        copied = (f"row.{row_operand(x)} = {row_operand(x)};" for x in row_constants)
        self._row_body = [*_parameters(names, fields), *computed, "Row row;", *copied, "return row;"]

    def row_struct(self, arguments: str) -> str:
        """Return the struct of the row constants and the function that computes it."""
        function = _methods({"row": f"Row row({arguments})"}, {"row": self._row_body})
        return f"    struct Row {{\n{code_lines(self._row_declarations)}\n    }};\n{function}"


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


def _bool(flag: bool) -> str:
    return "true" if flag else "false"


def code_lines(statements: Sequence[str]) -> str:
    return "\n".join(f"        {line}" for line in statements)


def _methods(signatures: Mapping[str, str], bodies: Mapping[str, Sequence[str]]) -> str:
    """Return the definitions of member functions, from their signatures and statements by name."""
    return "\n".join(
        f"    UNSOFT_INLINE {signature} {{\n{code_lines(bodies[name])}\n    }}"
        for name, signature in signatures.items()
    )


def _definitions(whole: Sequence[Expr]) -> str:
    """Return the C++ functions that the expressions use."""
    return definitions({node.op for node in postorder(*whole)} - {"num", "sym"})


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
    of_row = {part: {"return": parts[part]} for part in ("low", "high")}
    of_row["straight"] = {"y": parts["straight"], "slope": parts["straight_slope"]}
    whole = [expr for group in (*functions.values(), *of_row.values()) for expr in group.values()]
    entry_arguments = "V s, const Row &row"
    slopes = "V &weight, V &weight_s, V &weight_t, V &mass_s, V &mass_t"
    signatures = {
        "mass": f"void mass({entry_arguments}, V &mass, V &mass_t)",
        "weight": f"void weight({entry_arguments}, V &weight)",
        "slope": f"void slope({entry_arguments}, {slopes})",
        "parameter_slopes": f"void parameter_slopes({entry_arguments}, V *weight_p, V *mass_p)",
        "low": f"V low({_LIMITS})",
        "high": f"V high({_LIMITS})",
        "straight": f"void straight(V z, {_LIMITS}, V &y, V &slope)",
    }
    bodies = entry.bodies | {name: row_function(outputs, names) for name, outputs in of_row.items()}
    return f"""#include "simd.h"
{_definitions(whole)}
struct Rule {{
    static constexpr int parameters = {len(names)};
{entry.row_struct(_RULE_ROW)}
{_methods(signatures, bodies)}
}};
#include "rows/threshold.h"
"""


_ZERO, _ONE, _Z = number(0), number(1), symbol("z")
