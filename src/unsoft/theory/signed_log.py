"""Values of an expression that may be far too large or small for a float: sign and logarithm beside the value.

The moments of exp(s) at gamma = 30 reach exp(1800); a sigmoid far below its threshold is exp(-1000). Every
node of an expression is evaluated both ways, and the logarithm takes over only where the plain value has left
the range of float64. It is written apart from :mod:`unsoft.formula.evaluate`, which the engines use: the
oracle does not share their arithmetic.

>>> from unsoft.formula import parse
>>> s = torch.tensor([1000.0, 0.0, -1000.0], dtype=torch.float64)
>>> signed_log(parse("exp(s) - 1"), {"s": s}).log
tensor([1000., -inf, 0.], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.formula.expr import COMPARISONS, Expr, postorder

_LARGE, _TINY = 1e300, 1e-300


class SignedLog(NamedTuple):
    """A number x: itself (may have overflowed or underflowed), its sign, and log|x|."""

    plain: Tensor
    sign: Tensor
    log: Tensor


def signed_log(expr: Expr, env: Mapping[str, Tensor | float]) -> SignedLog:
    """Value of an expression for float64 symbols."""
    found: dict[Expr, SignedLog] = {}
    for node in postorder(expr):
        if node.op == "num":
            found[node] = of_plain(torch.tensor(float(node.value), dtype=torch.float64))
        elif node.op == "sym":
            found[node] = of_plain(torch.as_tensor(env[node.name], dtype=torch.float64))
        else:
            found[node] = _operate(node.op, [found[a] for a in node.args])
    return found[expr]


def of_plain(x: Tensor) -> SignedLog:
    """A number that is in range."""
    return SignedLog(x, x.sign(), x.abs().log())


def _in_range(x: SignedLog) -> Tensor:
    size = x.plain.abs()
    return (size > _TINY) & (size < _LARGE) | (x.log == -math.inf)


def _choose(condition: Tensor, a: SignedLog, b: SignedLog) -> SignedLog:
    return SignedLog(*(torch.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _operate(op: str, args: list[SignedLog]) -> SignedLog:
    a, b = args[0], args[-1]
    match op:
        case "neg":
            return _negative(a)
        case "add":
            return _sum(a, b)
        case "sub":
            return _sum(a, _negative(b))
        case "mul":
            return SignedLog(_zero_wins(a, b), a.sign * b.sign, _log_sum(a.log, b.log))
        case "div":
            return SignedLog(a.plain / b.plain, a.sign * b.sign, _log_sum(a.log, -b.log))
        case "pow":
            return _power(a, b)
        case "exp":
            return SignedLog(a.plain.exp(), torch.ones_like(a.plain), a.plain)
        case "expm1":
            return _expm1(a)
        case "log":
            return of_plain(torch.where(a.sign >= 0, a.log, math.nan))
        case "sqrt":
            return SignedLog(a.plain.sqrt(), a.sign, torch.where(a.sign >= 0, a.log / 2, math.nan))
        case "abs":
            return SignedLog(a.plain.abs(), a.sign.abs(), a.log)
        case "sign":
            return of_plain(a.sign)
        case "tanh" | "erf":
            return of_plain(getattr(torch, op)(a.plain))
        case "sigmoid":
            log = torch.nn.functional.logsigmoid(a.plain)
            return SignedLog(a.plain.sigmoid(), torch.ones_like(log), log)
        case "relu":
            return _choose(a.sign > 0, a, of_plain(torch.zeros_like(a.plain)))
        case "max":
            return _choose(_sum(a, _negative(b)).sign >= 0, a, b)
        case "min":
            return _choose(_sum(a, _negative(b)).sign <= 0, a, b)
        case "where":
            return _choose(a.plain > 0, args[1], b)
        case _ if op in COMPARISONS:
            difference = _sum(a, _negative(b)).sign
            return of_plain(getattr(torch, op)(difference, torch.zeros_like(difference)).double())
    raise ValueError(f"formula: the theory does not know the operation {op!r}")


def _expm1(a: SignedLog) -> SignedLog:
    """exp(a) - 1; far above 1 its logarithm is a, nearly."""
    plain = a.plain.expm1()
    far = SignedLog(plain, torch.ones_like(plain), a.plain)
    return _choose(a.plain < 600, of_plain(plain), far)


def _negative(a: SignedLog) -> SignedLog:
    return SignedLog(-a.plain, -a.sign, a.log)


def _zero_wins(a: SignedLog, b: SignedLog) -> Tensor:
    """The plain product, where an exact 0 beats an overflow."""
    return torch.where((a.sign == 0) | (b.sign == 0), 0.0, a.plain * b.plain)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == -math.inf) | (b == -math.inf), -math.inf, a + b)


def _power(a: SignedLog, b: SignedLog) -> SignedLog:
    plain = a.plain**b.plain
    odd = b.plain.remainder(2) == 1
    whole = b.plain == b.plain.round()
    sign = torch.where(odd, a.sign, a.sign.abs())
    log = torch.where(b.plain == 0, 0.0, a.log * b.plain)
    return SignedLog(plain, sign, torch.where(whole | (a.sign >= 0), log, math.nan))


def _sum(a: SignedLog, b: SignedLog) -> SignedLog:
    plain = a.plain + b.plain
    top = torch.maximum(a.log, b.log)
    # exp(log - top) is at most 1; where both are exactly 0, top is -inf and the plain branch is taken
    scaled = a.sign * torch.exp(a.log - top) + b.sign * torch.exp(b.log - top)
    far = SignedLog(plain, scaled.sign(), top + scaled.abs().log())
    return _choose(_in_range(a) & _in_range(b) & (plain.abs() < _LARGE), of_plain(plain), far)
