"""An independent interpreter of expressions in 50-digit arithmetic, as an oracle."""

from collections.abc import Callable, Mapping

import mpmath
import pytest

from unsoft.formula import Expr

_OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "neg": lambda a: -a,
    "exp": mpmath.exp,
    "expm1": mpmath.expm1,
    "expdiff": lambda a, b, c: mpmath.exp(a - c) - mpmath.exp(b - c),
    "log": mpmath.log,
    "sqrt": mpmath.sqrt,
    "abs": abs,
    "sign": mpmath.sign,
    "max": max,
    "min": min,
    "tanh": mpmath.tanh,
    "sigmoid": lambda a: 1 / (1 + mpmath.exp(-a)),
    "relu": lambda a: max(a, mpmath.mpf(0)),
    "erf": mpmath.erf,
    "softplus": lambda a: mpmath.log1p(mpmath.exp(a)),
    **{name: getattr(mpmath, name) for name in ("log1p", "sin", "cos", "sinh", "cosh")},
    "where": lambda c, a, b: a if c else b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


def _exact(expr: Expr, env: Mapping[str, float]) -> mpmath.mpf:
    if expr.op == "num":
        return mpmath.mpf(expr.value)
    if expr.op == "sym":
        return mpmath.mpf(env[expr.name])
    return _OPS[expr.op](*(_exact(a, env) for a in expr.args))


@pytest.fixture
def exact() -> Callable[[Expr, Mapping[str, float]], mpmath.mpf]:
    """Value of an expression in 50-digit arithmetic."""
    with mpmath.workdps(50):
        yield _exact
