"""Print the Triton functions of one formula, which its kernels call. Derivatives are symbolic.

The text does not distinguish values of a row from values of an entry: broadcasting keeps the former small. A
factor of the weight that belongs to the row (1/n in relu2) is moved out of the tile and applied to the sum,
so that small weights do not underflow in float16. Large weights are scaled by the kernels (``GROWS``).

>>> from unsoft.formula import Formula
>>> print(formula_source(Formula("max(s, 0)**2/n"), biased=False).split("def value")[1].split("@")[0].strip())
(s, m, row, key, b, p):
    _0 = tl.maximum(s, 0.0)
    _1 = _0 * _0
    return _1, 0.0 + tl.zeros_like(s)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from unsoft.engines.terms import BIAS, Terms, attention_terms, inverse_norm, row_value
from unsoft.engines.triton.instructions import gpu_instructions
from unsoft.formula import Expr, Formula, derivative
from unsoft.formula.expr import make, number, postorder, symbol
from unsoft.formula.instructions import Operand
from unsoft.formula.operation import OPERATIONS
from unsoft.tracing import constant_in_graph

_HEAD = """import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import (
    expdiff, expm1, log1p, power, root, sigmoid, sign, sinh, cosh, softplus, tanh, with_sign_of,
)
from unsoft.engines.triton.kernel.tiles import cleaned
"""
_SAFE = 2.0**14
_AT_MOST_ONE = ("sign", "tanh", "sigmoid", "sin", "cos", "erf")
_ROW, _ENTRY = ("m", "row"), ("s", "m", "row", "key", "b")
_ZERO, _ONE = number(0), number(1)
_OWN = {"exp2": "tl.exp2({0})", "with_sign_of": "with_sign_of({0}, {1})"}
_SYMBOLS = frozenset({"s", "m", "n", "i", "j", "z"})


@constant_in_graph
def unprintable(key: str) -> str | None:
    """Return why the formula of a key has no Triton code: a user's operation without it, or a symbol that the
    kernels do not have. None if it has."""
    formula = Formula.from_key(key)
    if unknown := formula.uses - _SYMBOLS - {*formula.params, *formula.symbols.all}:
        return f"its kernels know no {', '.join(sorted(unknown))}"
    parts = (formula.weight, formula.mass, formula.peak, formula.norm, formula.offset_mass)
    used = {node.op for node in postorder(*(part for part in parts if part is not None))} - {"num", "sym"}
    missing = sorted(op for op in used if OPERATIONS[op].triton is None)
    return f"it has no code for the operation {missing[0]}" if missing else None


def formula_source(formula: Formula, biased: bool) -> str:
    """Return the source of a formula's functions and constants; ``biased``: for calls with an additive
    mask."""
    terms, factor = row_factor(attention_terms(formula, biased))
    mass = terms.mass or _ZERO
    in_formula = biased and formula.bias != "logit"

    def slopes(name: str) -> list[Expr]:
        return [derivative(terms.weight, name), derivative(mass, name)]

    by_bias = slopes(BIAS) if in_formula else [_ZERO, _ZERO]
    kinds = {"parameter": terms.names, "query_field": terms.fields.query, "key_field": terms.fields.key}
    functions = [
        _function("peak", _ENTRY, [terms.peak or _ZERO], terms),
        _function("value", _ENTRY, [terms.weight, mass], terms),
        _function("slope", _ENTRY, [terms.weight, *slopes("s"), *by_bias], terms),
    ]
    for kind, names in kinds.items():
        several = [_function(f"{kind}_slope_{k}", _ENTRY, slopes(x), terms) for k, x in enumerate(names)]
        functions += [*several, _choice(kind, len(names))]
    functions += [
        _function("offset_mass", _ROW, [terms.offset or _ZERO], terms),
        _function("norm", (*_ROW, "z"), [terms.norm or symbol("z")], terms),
        _function("factor", _ROW, [factor], terms),
        _loads(len(terms.names)),
        *(_field_loads(kind, len(kinds[kind])) for kind in ("query_field", "key_field")),
    ]
    constants = {
        "HAS_PEAK": terms.peak is not None,
        "HAS_MASS": terms.mass is not None,
        "UNDEFINED_ALONE": undefined_alone(terms, factor),
        "BIAS_IN_FORMULA": in_formula,
        "DEGREE": float(terms.degree),
        "GROWS": grows(terms),
    }
    for kind, names in kinds.items():
        constants |= {f"{kind.upper()}S": len(names), f"{kind.upper()}_SLOTS": slots(len(names))}
    head = "".join(f"{name} = tl.constexpr({content!r})\n" for name, content in constants.items())
    return "\n\n".join([f"{_HEAD}\n{head}", *functions])


def slots(count: int) -> int:
    """Return the next power of two, the only sizes of Triton's tensors.

    >>> [slots(count) for count in (0, 1, 3)]
    [1, 1, 4]
    """
    return 1 << max(count - 1, 0).bit_length()


def row_factor(terms: Terms) -> tuple[Terms, Expr]:
    """Return the terms without the factor of the weight that belongs to the row, and that factor (1 if none).

    Formulas with a mass keep their factor, because it would have to be taken out of the mass as well. Guards
    for NaN logits are removed: kernels replace NaN before they compute.
    """
    weight, mass, factor = _unguarded(terms.weight), terms.mass, _ONE
    while mass is None and weight.op in ("mul", "div"):
        a, b = weight.args
        if b.symbols <= {"n", "i"}:
            weight, factor = a, factor * b if weight.op == "mul" else factor / b
        elif weight.op == "mul" and a.symbols <= {"n", "i"}:
            weight, factor = b, factor * a
        else:
            break
    return replace(terms, weight=weight, mass=None if mass is None else _unguarded(mass)), factor


def grows(terms: Terms) -> bool:
    """Return False if the expressions of the weight and its slopes show that they stay in the range of
    float16.

    >>> from unsoft.formula import Formula
    >>> [grows(attention_terms(Formula(*f), False)) for f in (("exp(s - m)", "exp(s - m)", "s"), ("s*s/n",))]
    [False, True]
    """
    weight, mass = _unguarded(terms.weight), _unguarded(terms.mass or _ZERO)
    parts = (weight, derivative(weight, "s"), derivative(mass, "s"))
    return any(_bound(part, terms.peak) > _SAFE for part in parts)


def _bound(part: Expr, peak: Expr | None) -> float:
    """Return an upper bound of the absolute value, infinite if the expression does not show one."""
    if part.constant is not None:
        return float(abs(part.constant))
    if part.op in _AT_MOST_ONE:
        return 1.0
    if part.op == "exp" and part.args[0].op == "sub":
        power, m = part.args[0].args
        return 1.0 if m is symbol("m") and _is_below(power, peak) else math.inf
    if part.op == "expdiff" and part.args[2] is symbol("m"):
        return 1.0 if all(_is_below(power, peak) for power in part.args[:2]) else math.inf
    bounds = [_bound(argument, peak) for argument in part.args]
    if part.op in ("neg", "abs", "max", "min"):
        return max(bounds)
    if part.op == "where":
        return max(bounds[1:])
    if part.op in ("add", "sub"):
        return sum(bounds)
    if part.op == "mul" and math.inf not in bounds:
        return math.prod(bounds)
    if part.op == "div" and part.args[1].constant:
        return bounds[0] / bounds[1]
    if part.op == "pow" and (part.args[1].constant or -1) > 0 and bounds[0] <= 1:
        return 1.0
    return math.inf


def _is_below(power: Expr, peak: Expr | None) -> bool:
    """Return True if the expression never exceeds the peak, so that exp(power - m) is at most 1."""
    if peak is None or power is peak:
        return power is peak
    if peak.op == "abs":
        return power is peak.args[0] or power is -peak.args[0]
    return peak.op == "max" and any(_is_below(power, part) for part in peak.args)


def undefined_alone(terms: Terms, factor: Expr) -> bool:
    """Return True if factor / norm may not be finite in a row that sees no key, so that kernels track such
    rows.

    >>> from unsoft.formula import Formula
    >>> [undefined_alone(*row_factor(attention_terms(Formula("s", "s*s", norm=norm), False)))
    ...  for norm in ("sqrt(z)", "sqrt(z - 1)", "sqrt(i + z)")]
    [False, True, True]
    """
    parts = [part for part in (factor, terms.offset, terms.norm) if part is not None]
    if not frozenset().union(*(part.symbols for part in parts)) <= {"m", "n", "z"}:
        return True  # depends on the position of the row, its parameters or fields
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    symbols = {"m": zero, "n": one}
    scale = one * row_value(factor, symbols)
    if terms.mass is not None:
        z = zero if terms.offset is None else zero + row_value(terms.offset, symbols)
        scale = scale * inverse_norm(terms, symbols, z, torch.tensor(True))
    return not bool(scale.isfinite())


def _unguarded(part: Expr) -> Expr:
    s = symbol("s")
    if part.op == "where" and part.args[0] is make("eq", s, s) and part.args[2] is s:
        return part.args[1]
    return part


def _function(name: str, arguments: Sequence[str], outputs: Sequence[Expr], terms: Terms) -> str:
    body, results = gpu_instructions(outputs, terms.fields.key)
    renamed = {BIAS: "b", "n": "row.n", "i": "row.i", "j": "key.j"}
    renamed |= {parameter: f"p[{k}]" for k, parameter in enumerate(terms.names)}
    renamed |= {field: f"row.fields[{k}]" for k, field in enumerate(terms.fields.query)}
    renamed |= {field: f"key.fields[{k}]" for k, field in enumerate(terms.fields.key)}
    spanning: set[Operand] = {"s", BIAS}
    """Operands of the size of the tile: all that depends on the logit or the bias."""

    def text(x: Operand) -> str:
        return renamed.get(x, x) if isinstance(x, str) else repr(float(x))

    lines = []
    for target, op, args in body:
        template = _OWN.get(op) or OPERATIONS[op].triton or ""
        lines.append(f"{target} = {template.format(*map(text, args))}")
        if spanning & set(args):
            spanning.add(target)
    whole = [
        text(x) if "s" not in arguments or x in spanning else f"{text(x)} + tl.zeros_like(s)" for x in results
    ]
    return _jitted(f"{name}({', '.join([*arguments, 'p'])})", [*lines, f"return {', '.join(whole)}"])


def _choice(kind: str, count: int) -> str:
    """Print the function that selects the slopes of weight and mass by the parameter or field K."""
    lines, entry = [], ", ".join(_ENTRY)
    for k in range(count):
        lines += [f"{'elif' if k else 'if'} K == {k}:", f"    return {kind}_slope_{k}({entry}, p)"]
    lines += ["else:", "    return 0.0, 0.0"] if count else ["return 0.0, 0.0"]
    return _jitted(f"{kind}_slope(K: tl.constexpr, {entry}, p)", lines)


def _loads(count: int) -> str:
    """Print the function that loads the parameters of one head."""
    loads = [f"tl.load(table + {k} * heads + h)" for k in range(count)]
    return _jitted("parameters(table, heads, h)", [f"return ({', '.join(loads or ['0.0'])},)"])


def _field_loads(kind: str, count: int) -> str:
    """Print the function that loads the fields of rows or keys, followed by a number that is NaN where one of
    them is NaN or Inf. ``at``: pointers to the first field, ``step``: distance to the next."""
    loads = [f"_{k} = tl.load(at + {k} * step, mask=mask, other=0.0)" for k in range(count)]
    clean = "".join(f"cleaned(_{k}, EXACT), " for k in range(count))
    bad = " + ".join(f"_{k} * 0.0" for k in range(count)) or "0.0"
    return _jitted(f"{kind}s(at, step, mask, EXACT: tl.constexpr)", [*loads, f"return ({clean}{bad},)"])


def _jitted(signature: str, lines: Sequence[str]) -> str:
    return f"@triton.jit\ndef {signature}:\n" + "".join(f"    {line}\n" for line in lines)
