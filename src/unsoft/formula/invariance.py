"""Numerical check, when a formula is made, that the row peak m cancels.

The engines subtract a running peak, and different engines see different intermediate values of it. That is
harmless exactly if raising m by c divides every weight and its normaliser by the same exp(c):

    weight(m + c) = exp(-c) weight(m)        mass(m + c) = exp(-p c) mass(m)
    norm(exp(-p c) z, m + c) = exp(-c) norm(z, m)        offset_mass(m + c) = exp(-p c) offset_mass(m)

p is the mass degree: 1 if weight and mass are of the same kind, 2 for squares under a square root.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unsoft.errors import FormulaError
from unsoft.formula.arguments import BUILT_IN
from unsoft.formula.derive import derivative
from unsoft.formula.evaluation import evaluate
from unsoft.formula.expr import Expr, bottom_up, make, postorder, symbol
from unsoft.formula.operation import OPERATIONS

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

_SHIFTS = (-2.5, 0.75, 6.0)
_EXTREMES = torch.tensor([-1e4, 0.5, 1e4], dtype=torch.float64)
_FAR = torch.tensor([1e5, -1e5], dtype=torch.float64)
"""Logits at which exp(s/100) overflows float64; in float32 it already does at 1e4."""
_FIELDS = torch.tensor([0.5, -1e3, 1e3], dtype=torch.float64)
"""An ordinary value of a field, and two at which exp overflows float64."""


def probes(formula: Formula, count: int = 256) -> dict[str, Tensor]:
    """Return random but fixed values of all symbols, in float64; parameters near their defaults."""
    generator = torch.Generator().manual_seed(20240613)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)

    env = {
        "s": uniform(-6, 6),
        "m": uniform(-1, 8),
        "n": uniform(1, 200).round(),
        "i": uniform(0, 200).round(),
        "j": uniform(0, 200).round(),
        "z": uniform(-3, 5).exp(),
    }
    near = torch.arange(count) % 2 == 0  # keys beside their query: farther away, weights may be 0
    env["j"] = torch.where(near, (env["i"] + env["m"].round()).clamp(min=0), env["j"])
    env |= {name: default * uniform(0.9, 1.1) for name, default in formula.params.items()}
    return env | {name: field_value(name, uniform(-2, 2)) for name in formula.symbols.all}


def field_value(name: str, x: Tensor) -> Tensor:
    """Return a value that the field can have: squared lengths are not negative."""
    return x.abs() if name in BUILT_IN.values() else x


def mass_degree(formula: Formula) -> float:
    """Return the p of this module: from the mass if it contains m, else from a homogeneous norm, else 1."""
    env = probes(formula)
    if formula.mass is not None and "m" in formula.mass.symbols:
        p = -_log_ratio(formula.mass, env, env | {"m": env["m"] + 1})
    elif formula.norm is not None:
        degree = _log_ratio(formula.norm, env, env | {"z": env["z"] * math.e})
        p = 1 / degree if degree and math.isfinite(degree) else 1.0
    else:
        return 1.0
    return round(p, 6) if math.isfinite(p) else 1.0


def _log_ratio(expr: Expr, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return log(after / before) if it is the same everywhere, else nan."""
    ratio = (evaluate(expr, after) / evaluate(expr, before)).log()
    ratio = ratio[ratio.isfinite()]
    if not ratio.numel() or (ratio - ratio.median()).abs().max() > 1e-6:
        return math.nan
    return ratio.median().item()


def check(formula: Formula) -> None:
    """Raise FormulaError unless m cancels and prevents overflow, or nothing overflows without a peak."""
    if formula.peak is None:
        _check_without_peak(formula)
        return
    if formula.mass is None:
        raise FormulaError("peak: a peak needs a mass: without a normaliser the shift by m cannot cancel")
    env, p = probes(formula), formula.mass_degree
    parts = {"weight": formula.weight, "mass": formula.mass, "offset_mass": formula.offset_mass}
    present = {name: expr for name, expr in parts.items() if expr is not None}
    for c in _SHIFTS:
        moved = env | {"m": env["m"] + c, "z": env["z"] * math.exp(-p * c)}
        for name, expr in (present | {"norm": formula.norm or symbol("z")}).items():
            _check_part(name, expr, p if name.endswith("mass") else 1.0, c, env, moved)
    for name, expr in present.items():
        _check_range(name, expr, formula.peak, formula)


def _check_without_peak(formula: Formula) -> None:
    """Raise FormulaError if exponentials in the mass overflow, or all vanish, because there is no peak.

    A row would then be NaN, or 0, where the weights are ordinary numbers. Powers of the logit are allowed:
    they stay in range as long as logits do, and a peak could not help them.
    """
    mass, offset = formula.mass, formula.offset_mass
    if mass is None:
        return
    exponents = list(dict.fromkeys(filter(None, map(_exponent, postorder(formula.weight, mass)))))
    if not exponents:
        return
    env: dict[str, Tensor | float] = {"n": 2.0, "i": 1.0, "j": 0.0, **formula.params, "s": _FAR}
    env |= dict.fromkeys(formula.symbols.all, 0.5)
    total = mass if offset is None else mass + offset
    value = evaluate(total, env)
    largest = reduce(lambda a, b: make("max", a, b), exponents)
    for k, s in enumerate(_FAR.tolist()):
        if value[k].isinf():
            problem = f"overflows at the logit {s:g}"
        elif value[k] == 0 and evaluate(_floored(total), env)[k] != 0:
            problem = f"vanishes at the logit {s:g}, so that a row of such logits has no weights"
        else:
            continue
        raise FormulaError(
            f"mass: {mass} {problem}. Subtract the row peak m in the exponents, which cancels in weight /"
            " mass: write exp(... - m) in weight and mass and give"
            f' peak="{largest}" (multiply an offset_mass and terms without exponential by exp(-m), with a'
            ' peak that is never negative), leave the mass out and give normalise="sum" or "abs", or write a'
            " form that stays in range"
        )


def _exponent(node: Expr) -> Expr | None:
    """Return the exponent of a node that grows exponentially with it, if it depends on the logit."""
    rule = None if node.op in ("num", "sym") else OPERATIONS[node.op].exponent
    # A power grows exponentially with the logit only if the logit is in its exponent.
    if rule is None or (node.op == "pow" and "s" not in node.args[1].symbols):
        return None
    exponent = rule(*node.args)
    return exponent if "s" in exponent.symbols else None


def _floored(expr: Expr) -> Expr:
    """Return the expression with exponentials that do not underflow."""

    def floored(node: Expr, args: list[Expr]) -> Expr:
        args = [make("max", args[0], -200)] if node.op == "exp" else args
        return make(node.op, *args) if args else node

    return bottom_up(expr, floored)


def _check_range(name: str, expr: Expr, peak: Expr, formula: Formula) -> None:
    """Raise FormulaError if the value or its slope overflows in a row of two logits.

    Logits are up to +-10,000 and fields up to +-1,000.
    """
    fields = formula.symbols
    choices = (_EXTREMES, _EXTREMES, *((_FIELDS,) * 3 if fields.all else ()))
    s, other, *values = (x.flatten() for x in torch.meshgrid(*choices, indexing="ij"))
    env: dict[str, Tensor | float] = {"n": 2.0, "i": 1.0, "j": 0.0, **formula.params}
    second = dict(env)
    if fields.all:
        query, own, others = values
        env |= {name: field_value(name, query) for name in fields.query}
        second = env | {name: field_value(name, others) for name in fields.key}
        env |= {name: field_value(name, own) for name in fields.key}
    m = torch.maximum(evaluate(peak, env | {"s": s}), evaluate(peak, second | {"s": other}))
    value, slope = (evaluate(x, env | {"s": s, "m": m}) for x in (expr, derivative(expr, "s")))
    bad = ~(value.isfinite() & slope.isfinite()) & ~m.isnan()
    if bad.any() and evaluate(expr, probes(formula)).isfinite().all():
        k = int(bad.nonzero()[0])
        sample = {name: env[name][k] for name in fields.all}  # type: ignore[index]
        where = "".join(f", {name} = {value:g}" for name, value in sample.items())
        raise FormulaError(
            f"{name}: {expr} overflows in a row of logits {s[k]:g} and {other[k]:g}{where}, whose peak m is"
            f" {m[k]:g}. The peak {peak} must be at least as large as every exponent, for all keys; an extra"
            " exp(-m) needs a peak that is never negative, such as max(s, 0)"
        )


def _check_part(
    name: str, expr: Expr, degree: float, c: float, env: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> None:
    before, after = evaluate(expr, env) * math.exp(-degree * c), evaluate(expr, moved)
    # 1e-290: numbers that small are about to become subnormal and have lost digits
    wrong = (after - before).abs() > 1e-8 * (before.abs() + after.abs()) + 1e-290
    wrong |= after.isnan() != before.isnan()
    if wrong.any():
        k = int(wrong.nonzero()[0])
        sample = [f"{symbol} = {env[symbol][k]:.6g}" for symbol in sorted(expr.symbols)] + [f"c = {c:g}"]
        scale = "exp(-c)" if degree == 1 else f"exp(-{degree:g} c)"
        raise FormulaError(
            f"{name}: the row peak m does not cancel. Raising m by c must multiply {name} = {expr} by {scale}"
            f"{' (with z scaled along)' if name == 'norm' else ''}; at {', '.join(sample)} it gives"
            f" {after[k]:.6g} instead of {before[k]:.6g}. Write exponentials as exp(... - m), also in"
            " offset_mass, and leave peak out if no exponential needs it"
        )
