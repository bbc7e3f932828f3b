"""Numbers far too large or small for a float, as sign and logarithm beside the plain value.

The logarithm takes over only where the plain value has left the range of float64. The theory integrates with
these: its moments of exp(s) reach exp(1800).

>>> total = plus(exponential(of_plain(torch.tensor(1000.0))), of_plain(torch.tensor(-1.0)))
>>> total.log
tensor(1000.)
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.formula.expr import Expr, bottom_up
from unsoft.formula.operation import OPERATIONS

_LARGE, _TINY = 1e300, 1e-300


class SignedLog(NamedTuple):
    """A number x: itself (may have overflowed or underflowed), its sign, and log|x|."""

    plain: Tensor
    sign: Tensor
    log: Tensor


def of_plain(x: Tensor) -> SignedLog:
    """Return the signed logarithm of a number that is in range."""
    return SignedLog(x, x.sign(), x.abs().log())


def beyond(
    limit: float, function: Callable[[Tensor], Tensor], log: Callable[[Tensor], Tensor]
) -> Callable[..., SignedLog]:
    """Return the log form of a function whose value leaves the range of floats where |x| is above ``limit``.

    ``log`` returns the logarithm of its size there.
    """

    def form(a: SignedLog) -> SignedLog:
        plain = function(a.plain)
        near, far = of_plain(plain), log(a.plain)
        sign = torch.where(plain == 0, 1.0, plain.sign())
        return choose(a.plain.abs() < limit, near, SignedLog(plain, sign, far))

    return form


def choose(condition: Tensor, a: SignedLog, b: SignedLog) -> SignedLog:
    """Return a where the condition is True, else b."""
    return SignedLog(*(torch.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def negative(a: SignedLog) -> SignedLog:
    return SignedLog(-a.plain, -a.sign, a.log)


def plus(a: SignedLog, b: SignedLog) -> SignedLog:
    plain = a.plain + b.plain
    top = torch.maximum(a.log, b.log)
    # exp(log - top) is at most 1; where both are exactly 0, top is -inf and the plain branch is taken
    scaled = a.sign * torch.exp(a.log - top) + b.sign * torch.exp(b.log - top)
    far = SignedLog(plain, scaled.sign(), top + scaled.abs().log())
    return choose(_in_range(a) & _in_range(b) & (plain.abs() < _LARGE), of_plain(plain), far)


def minus(a: SignedLog, b: SignedLog) -> SignedLog:
    return plus(a, negative(b))


def product(a: SignedLog, b: SignedLog) -> SignedLog:
    """Return a * b, where an exact 0 wins against an overflow."""
    plain = torch.where((a.sign == 0) | (b.sign == 0), 0.0, a.plain * b.plain)
    return SignedLog(plain, a.sign * b.sign, _log_sum(a.log, b.log))


def quotient(a: SignedLog, b: SignedLog) -> SignedLog:
    return SignedLog(a.plain / b.plain, a.sign * b.sign, _log_sum(a.log, -b.log))


def power(a: SignedLog, b: SignedLog) -> SignedLog:
    # A negative base has a real power only for whole exponents: odd ones keep the sign, others give NaN.
    odd = b.plain.remainder(2) == 1
    whole = b.plain == b.plain.round()
    sign = torch.where(odd, a.sign, a.sign.abs())
    log = torch.where(b.plain == 0, 0.0, a.log * b.plain)
    return SignedLog(a.plain**b.plain, sign, torch.where(whole | (a.sign >= 0), log, math.nan))


def exponential(a: SignedLog) -> SignedLog:
    return SignedLog(a.plain.exp(), torch.ones_like(a.plain), a.plain)


def logarithm(a: SignedLog) -> SignedLog:
    return of_plain(torch.where(a.sign >= 0, a.log, math.nan))


def root(a: SignedLog) -> SignedLog:
    return SignedLog(a.plain.sqrt(), a.sign, torch.where(a.sign >= 0, a.log / 2, math.nan))


def compare(test: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., SignedLog]:
    """Return the log form of a comparison: 1 or 0."""

    def form(a: SignedLog, b: SignedLog) -> SignedLog:
        difference = minus(a, b).sign
        return of_plain(test(difference, torch.zeros_like(difference)).double())

    return form


def _in_range(x: SignedLog) -> Tensor:
    # Below 1e-300 sums lose digits to subnormal numbers; an exact 0 (log = -inf) is in range.
    size = x.plain.abs()
    return (size > _TINY) & (size < _LARGE) | (x.log == -math.inf)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    # The logarithm of 0 wins: -inf + inf, which is 0 times an overflow, would be NaN.
    return torch.where((a == -math.inf) | (b == -math.inf), -math.inf, a + b)


def signed_log(expr: Expr, env: Mapping[str, Tensor | float]) -> SignedLog:
    """Return sign and logarithm beside the value, for values too large or small for a float.

    The moments of exp(s) at gamma = 30 reach exp(1800); a sigmoid far below its threshold is exp(-1000).
    Every node is evaluated both ways, and the logarithm takes over only where the plain value has left the
    range of float64.

    >>> from unsoft.formula.parser import parse
    >>> s = torch.tensor([1000.0, 0.0, -1000.0], dtype=torch.float64)
    >>> signed_log(parse("exp(s) - 1"), {"s": s}).log
    tensor([1000., -inf, 0.], dtype=torch.float64)
    """

    def value(node: Expr, operands: list[SignedLog]) -> SignedLog:
        if node.op in ("num", "sym"):
            number = node.value if node.op == "num" else env[node.name]
            return of_plain(torch.as_tensor(number, dtype=torch.float64))
        operation = OPERATIONS[node.op]
        if operation.log_form is None:
            return of_plain(operation.torch(*(x.plain for x in operands)))
        return operation.log_form(*operands)

    return bottom_up(expr, value)
