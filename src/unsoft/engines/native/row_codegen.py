"""Writes the C++ of a rule with a threshold per row: the ``struct Rule`` of kernel/rows/threshold.h."""

from __future__ import annotations

from collections.abc import Mapping

from unsoft.engines.native.codegen import EntryFunctions, code_lines, row_function
from unsoft.formula import Expr, derivative
from unsoft.formula.cpp import definitions
from unsoft.formula.expr import postorder

_ROW = "V m, V n, V i, V t, const real *params"
_LIMITS = "V n, V i, const real *params"


def threshold_source(parts: Mapping[str, Expr], names: list[str]) -> str:
    """The whole translation unit; ``parts`` are weight, mass, low, high, straight and straight_slope."""
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
    UNSOFT_INLINE Row row({_ROW}) {{
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
