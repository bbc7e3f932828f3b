"""Rewrite a weight as written in a paper so that no row of logits overflows or vanishes.

An exponential of the logit leaves the range of floats long before the weights of a row do: only their ratios
matter. ``scaled(w, m)`` is w exp(-m), with m moved into the exponents; ``growth(w)`` is an exponent g with
|w| <= exp(g) times powers of the logit. With the peak g, m is at least as large as every exponent, so nothing
overflows, and the largest weight of a row is about 1, so the sum does not vanish either.

>>> from unsoft.formula.parser import parse
>>> weight = parse("tanh(s)*exp(abs(s))")
>>> growth(weight), scaled(weight, symbol("m"))
(Expr('abs(s)'), Expr('tanh(s)*exp(abs(s) - m)'))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from unsoft.errors import FormulaError
from unsoft.formula.derive import ONE, ZERO, derivative
from unsoft.formula.evaluation import evaluate
from unsoft.formula.expr import Expr, bottom_up, make, number, postorder, symbol
from unsoft.formula.operation import OPERATIONS
from unsoft.formula.signed_log import SignedLog, signed_log

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

Normalise = Literal["sum", "abs", "square", "count"]
_FAR = torch.tensor([s for size in (1e3, 1e4, 1e5) for s in (-size, size)], dtype=torch.float64)
_NEAR = torch.linspace(-5.03, 5.07, 102, dtype=torch.float64)
_ROWS = torch.tensor(
    [
        [-1e4, -30.0, -0.7, 0.4, 2.0],
        [1e4, 9e3, 50.0, -3.0, 0.2],
        [-1e4, -1e4 + 0.5, -9999.0, -9990.0, -9.9e3],
        [1e4, 1e4 - 0.5, 9999.0, -1e4, 1.0],
        [-101.0, -100.0, -103.0, -90.0, -91.0],
    ],
    dtype=torch.float64,
)
_ORDINARY = torch.arange(-60, 61, dtype=torch.float64) / 10
"""Logits that every row has; 0 among them, the logit of a query or key that is 0."""
_RANGE = 80.0
"""Logarithm beyond which float32 overflows or loses digits: it ends at exp(88.7) and exp(-87.3)."""
_SATURATED = 40
"""tanh, erf and sigmoid do not change in float64 beyond it."""
_ROW_ONLY = frozenset({"n", "i", "m", "q2"})
_TAILS = ("sigmoid", "softplus")
"""Functions that decay exponentially on one side."""
_NOT_NEGATIVE = frozenset({"exp", "cosh", "abs", "sqrt", "sigmoid", "softplus", "relu"})


_EXPLICIT = "give weight, mass and peak explicitly, with exp(... - m) for every exponential"
_NORMALISED = 'normalise="sum" or "abs" divides by the sum over the row, in which the growth cancels'


class _Unstable(Exception):
    """A weight has no known stable form; the message says why, and ``fix`` what would work."""

    def __init__(self, reason: str, fix: str = _EXPLICIT) -> None:
        super().__init__(reason)
        self.fix = fix


def stabilised(
    weight: Expr, normalise: Normalise | None, offset: Expr | None, params: Mapping[str, float]
) -> dict[str, Expr | None]:
    """Return the parts of the formula weight / (its normaliser) in a form that stays in range.

    Without ``normalise``, or with "count", the weight itself has to: there is no sum in which a factor could
    cancel. Raise FormulaError with the reason if no stable form is known.
    """
    env = _environment(weight, params)
    if not evaluate(weight, env | {"s": _NEAR}).isfinite().any():
        raise FormulaError(
            f"weight: {weight} is not a finite number at any logit: it divides by zero, or takes the log or"
            " root of negative numbers"
        )
    written = weight
    try:
        weight = weight if _tame(weight) else bottom_up(weight, _rewritten)
        if normalise in (None, "count"):
            weight = _in_range(weight, env)
            return {"weight": weight if normalise is None else weight / symbol("n")}
        return _normalised(weight, normalise, offset, env)
    except _Unstable as reason:
        raise FormulaError(
            f"weight: {written} cannot be stabilised: {reason}. What would work: {reason.fix}; or write a"
            " weight that grows like a power of s"
        ) from None


def _normalised(
    weight: Expr, normalise: Normalise | None, offset: Expr | None, env: Mapping[str, Tensor]
) -> dict[str, Expr | None]:
    exponent = growth(weight) if _leaves_range(weight, env) else None
    if exponent is None:
        weight = _in_range(weight, env)
    else:
        # The offset becomes offset exp(-m), which overflows for a negative peak.
        exponent = exponent if offset is None else make("max", exponent, 0)
        weight = scaled(weight, symbol("m"))
    mass = {"sum": weight, "abs": _size(weight)}.get(str(normalise), weight**2)
    if offset is not None and exponent is not None:
        offset = offset * make("exp", -symbol("m") * (2 if normalise == "square" else 1))
    norm = make("sqrt", symbol("z")) if normalise == "square" else None
    return {"weight": weight, "mass": mass, "peak": exponent, "norm": norm, "offset_mass": offset}


def _environment(weight: Expr, params: Mapping[str, float]) -> dict[str, Tensor]:
    values = dict.fromkeys(weight.symbols, 0.5) | {"n": 2.0, "i": 1.0, "j": 0.0, **params}
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()} | {"s": _FAR}


def _leaves_range(weight: Expr, env: Mapping[str, Tensor]) -> bool:
    """Return True if an exponential takes the weight, or its slope, out of the range of float32."""
    if _tame(weight):
        return False
    true, plain = signed_log(weight, env), evaluate(weight, env)
    # An exact 0 (log = -inf) is in range. A weight may be finite where its slope is 0 * inf.
    far = true.log.isfinite() & (true.log.abs() > _RANGE)
    return bool((far | ~plain.isfinite() | ~evaluate(derivative(weight, "s"), env).isfinite()).any())


def _in_range(weight: Expr, env: Mapping[str, Tensor]) -> Expr:
    """Return a form of the weight that is finite wherever the weight is; it may decay, but not grow."""
    if _tame(weight):
        return weight
    for form in (weight, None):
        tried = scaled(weight, ZERO) if form is None else form
        value, slope = (evaluate(x, env) for x in (tried, derivative(tried, "s")))
        true = signed_log(weight, env)
        grows = true.log.isfinite() & (true.log > _RANGE)
        if grows.any():
            raise _Unstable(
                f"it grows like exp({growth(weight)}) and overflows at logits of about 100", _NORMALISED
            )
        # Where it is NaN already near 0, as the root of a negative number is, no form can help.
        defined = evaluate(weight, {**env, "s": 3 * _FAR.sign()}).isfinite()
        wrong = defined & ~(value.isfinite() & slope.isfinite())
        if not wrong.any():
            return tried
    raise _Unstable(f"it is not a finite number at the logit {_FAR[wrong.nonzero()[0, 0]]:g}")


@lru_cache(maxsize=1024)
def _tame(expr: Expr) -> bool:
    """Return True if no exponential depends on the key: the value grows like a power of the logit."""
    return not any(_is_exponential(node) for node in postorder(expr))


def _is_exponential(node: Expr) -> bool:
    if node.op in ("num", "sym") or not node.symbols - _ROW_ONLY:
        return False
    if node.op == "pow":
        return "s" in node.args[1].symbols
    return OPERATIONS[node.op].exponent is not None or node.op in _TAILS


def has_exponential(expr: Expr) -> bool:
    """Return True if an exponential of the logit occurs, beyond the bounded tail of a sigmoid or softplus."""
    return any(_is_exponential(node) and node.op not in _TAILS for node in postorder(expr))


@lru_cache(maxsize=1024)
def growth(expr: Expr) -> Expr | None:
    """Return an exponent g with |expr| <= exp(g), up to powers of the logit; None for no exponential."""
    if _tame(expr):
        return None
    op, args = expr.op, expr.args
    if any(not _tame(a) for a in args) and op in (*_EXPONENTS, "softplus"):
        raise _Unstable(f"in {expr} the exponent grows exponentially itself")
    if op in _EXPONENTS:
        return _EXPONENTS[op](*args)
    match op:
        case "neg" | "abs" | "relu":
            return growth(args[0])
        case "sqrt":
            return (growth(args[0]) or ZERO) / 2
        case "pow" if "s" not in args[1].symbols:
            return args[1] * (growth(args[0]) or ZERO)
        case "pow":
            return args[1] * make("log", args[0])
        case "mul" | "div":
            total: Expr | None = None
            for factor, up in _factors(expr):
                if (g := growth(factor)) is not None:
                    total = _plus(total, g, up)
            return total
        case "add" | "sub" | "max" | "min" | "where":
            # A sum is at most twice its larger term; the smaller of two positive numbers bounds their min.
            sides = [growth(a) or ZERO for a in args[-2:] if a is not ZERO]
            if op == "where" and len(sides) == 2:
                return make("where", args[0], *sides)
            least = op == "min" and all(_not_negative(a) for a in args)
            return reduce(lambda a, b: a if a is b else make("min" if least else "max", a, b), sides)
    return None  # log, sign and functions that saturate: their values are ordinary numbers


_EXPONENTS: dict[str, Callable[..., Expr]] = {
    "exp": lambda a: a,
    "expm1": lambda a: make("max", a, 0),
    "expdiff": lambda a, b, c: make("max", a, b) - c,
    "sinh": lambda a: make("abs", a),
    "cosh": lambda a: make("abs", a),
    "sigmoid": lambda a: -make("softplus", -a),  # log(sigmoid), exactly
    "softplus": lambda a: make("min", a, 0),
}


def scaled(expr: Expr, c: Expr) -> Expr:
    """Return ``expr * exp(-c)`` with c inside the exponents, where the difference stays in range.

    >>> from unsoft.formula.parser import parse
    >>> scaled(parse("s*(exp(s) - 1)/n"), symbol("m"))
    Expr('s*expdiff(s, 0, m)/n')
    """
    if expr is ZERO or c is ZERO and _tame(expr):
        return expr
    if _tame(expr):
        return _times(expr, _exp(-c))
    op, args = expr.op, expr.args
    match op:
        case "exp":
            return _exp(_minus(args[0], c))
        case "expm1":
            return make("expdiff", args[0], 0, c)
        case "expdiff":
            return make("expdiff", args[0], args[1], args[2] + c)
        case "sinh":  # not a difference of two exponentials, which loses the digits of small logits
            return make("expdiff", args[0], -args[0], c) / 2
        case "cosh":
            return (_exp(_minus(args[0], c)) + _exp(-args[0] - c)) / 2
        case "sigmoid" if _tame(args[0]):
            return _exp(-make("softplus", -args[0]) - c)
        case "softplus":
            # Below -40 it is exp(a) in float64. Above, the peak min(a, 0) keeps exp(-c) in range.
            tail = _exp(_minus(args[0], c))
            return make("where", make("lt", args[0], -_SATURATED), tail, expr * _exp(-c))
        case "pow" if "s" in args[1].symbols and not args[0].symbols:
            return _exp(args[1] * make("log", args[0]) - c)
        case "pow" if "s" not in args[1].symbols:
            g = growth(args[0]) or ZERO
            return _times(scaled(args[0], g) ** args[1], _exp(_minus(args[1] * g, c)))
        case "sqrt":
            g = growth(args[0]) or ZERO
            inner = scaled(args[0], g)
            return _times(inner if inner is ONE else make("sqrt", inner), _exp(_minus(g / 2, c)))
        case "mul" | "div":
            return _scaled_product(expr, c)
        case "sub" if args[0].op == "exp" and (args[1].op == "exp" or args[1] is ONE):
            return make("expdiff", args[0].args[0], args[1].args[0] if args[1].args else ZERO, c)
        case "neg" | "abs" | "relu" | "add" | "sub" | "max" | "min":
            return make(op, *(scaled(a, c) for a in args))
        case "where":
            return make("where", args[0], scaled(args[1], c), scaled(args[2], c))
        case "sign":
            return _times(make("sign", scaled(args[0], growth(args[0]) or ZERO)), _exp(-c))
        case "log":
            g = growth(args[0]) or ZERO
            return _times(make("log", scaled(args[0], g)) + g, _exp(-c))
        case "tanh" | "erf" | "sigmoid":
            inside = make("max", make("min", args[0], _SATURATED), -_SATURATED)
            return _times(make(op, inside), _exp(-c))
    raise _Unstable(f"no stable form of {expr} is known: {op} of an exponential")


def _rewritten(node: Expr, args: list[Expr]) -> Expr:
    """Return log(1 + exp(a)) and log1p(exp(a)) as softplus(a), and log1p(a) as log(1 + a)."""
    if node.op == "log1p" and not _tame(args[0]):
        return _rewritten(make("log", ONE + args[0]), [ONE + args[0]])
    if node.op == "log" and args[0].op == "add" and ONE in args[0].args:
        other = args[0].args[args[0].args[0] is ONE]
        if other.op == "exp":
            return make("softplus", *other.args)
    return make(node.op, *args) if args else node


def _scaled_product(expr: Expr, c: Expr) -> Expr:
    """Return a product times exp(-c): the exponents of all factors are added before one exponential."""
    total: Expr | None = None
    above, below = ONE, ONE
    wild = []  # factors whose exponential is inside another function; exponents of the others are added
    for factor, up in _factors(expr):
        if _tame(factor):
            above, below = (_times(above, factor), below) if up else (above, _times(below, factor))
        elif factor.op == "exp" and _tame(factor.args[0]):
            total = _plus(total, factor.args[0], up)
        else:
            wild.append((factor, up))
    if len(wild) == 1 and wild[0][1]:
        product = _times(above, scaled(wild[0][0], c if total is None else c - total))
        return product / below
    for factor, up in wild:
        g = growth(factor)
        part = scaled(factor, g or ZERO)
        above, below = (_times(above, part), below) if up else (above, _times(below, part))
        total = total if g is None else _plus(total, g, up)
    return _times(above / below, _exp(-c if total is None else _minus(total, c)))


def _factors(expr: Expr) -> list[tuple[Expr, bool]]:
    """Return the factors of a product, each with True, or False if it divides."""
    if expr.op not in ("mul", "div"):
        return [(expr, True)]
    left, right = (_factors(arg) for arg in expr.args)
    return left + [(factor, up == (expr.op == "mul")) for factor, up in right]


def _plus(total: Expr | None, term: Expr, up: bool) -> Expr:
    if total is None:
        return term if up else -term
    return total + term if up else total - term


def _minus(a: Expr, b: Expr) -> Expr:
    return ZERO if a is b else a - b


def _exp(a: Expr) -> Expr:
    return ONE if a is ZERO or a.constant == 0 else make("exp", a)


def _times(a: Expr, b: Expr) -> Expr:
    return ZERO if ZERO in (a, b) else a * b


def _not_negative(expr: Expr) -> bool:
    if expr.op == "num":
        return bool(expr.value >= 0)
    if expr.op in ("mul", "div", "add", "max", "min"):
        return all(map(_not_negative, expr.args))
    return expr.op in _NOT_NEGATIVE or expr.name in ("n", "i", "j", "q2", "k2") or _is_even_power(expr)


def _is_even_power(expr: Expr) -> bool:
    return expr.op == "pow" and (expr.args[1].constant or 1) % 2 == 0


def _size(expr: Expr) -> Expr:
    """Return the absolute value, taken of the factors that may be negative.

    >>> from unsoft.formula.parser import parse
    >>> _size(parse("-2*s*exp(s)"))
    Expr('2*abs(s)*exp(s)')
    """
    if _not_negative(expr):
        return expr
    if expr.op == "num":
        return number(abs(expr.value))
    if expr.op == "neg":
        return _size(expr.args[0])
    if expr.op in ("mul", "div"):
        return make(expr.op, *map(_size, expr.args))
    return make("abs", expr)


def _check_finite(weight: Expr, params: Mapping[str, float]) -> None:
    """Raise FormulaError if a weight is infinite or NaN at an ordinary logit, as 1/s or sqrt(s) is."""
    values = evaluate(weight, _environment(weight, params) | {"s": _ORDINARY}).expand(_ORDINARY.shape)
    if values.isfinite().all():
        return
    bad = _ORDINARY[~values.isfinite()]
    nearest = bad[bad.abs().argmin()]
    kind = "not a number" if values[nearest == _ORDINARY].isnan().any() else "infinite"
    raise FormulaError(
        f"weight: {weight} is {kind} at the logit {nearest:g}, and every row has"
        " such logits. What would work: abs(s) or relu(s) inside a root, log(1 + abs(s)), or"
        " where(condition, a, b) around a division"
    )


def verify(formula: Formula, weight: Expr, normalise: Normalise) -> None:
    """Raise FormulaError unless a derived formula gives the weights that were asked for.

    ``weight`` is the author's text, whose weights are computed here with logarithms, for logits up to 10,000.
    """
    _check_finite(weight, formula.params)
    if normalise == "sum" and formula.signed:
        raise FormulaError(
            f'normalise: "sum" divides by the sum of {weight}, which has both signs, so the sum can be 0;'
            ' use "abs" or "square", or "count" to divide by the number of keys'
        )
    count = _ROWS.shape[-1]
    fields = {name: torch.tensor(0.5, dtype=torch.float64) for name in formula.symbols.all}
    env: dict[str, Tensor | float] = {"s": _ROWS, "n": float(count), "i": count - 1.0, **formula.params}
    env |= {"j": torch.arange(count, dtype=torch.float64), **fields}
    true = signed_log(bottom_up(weight, _rewritten), env)
    true = SignedLog(*(x.expand(_ROWS.shape) for x in true))
    if not (true.sign != 0).any():
        raise FormulaError(f"weight: {weight} is 0 at every logit, so there is nothing to divide by")
    if normalise == "count":
        return
    power = 2 if normalise == "square" else 1
    offset = formula.offset_mass
    if offset is not None:  # written for m = 0
        extra = evaluate(offset, {**env, "m": torch.zeros((), dtype=torch.float64)}).expand(_ROWS.shape)[
            :, :1
        ]
        logs = torch.cat([true.log * power, extra.log()], dim=-1)
    else:
        logs = true.log * power
    total = torch.logsumexp(logs, dim=-1, keepdim=True) / power
    wanted = torch.where(true.log == -torch.inf, 0.0, true.sign * (true.log - total).exp())
    values = formula.row(_ROWS, **fields)
    wrong = ((values - wanted).abs() > 1e-7) | (values.isnan() & ~wanted.isnan())
    if wrong.any():
        row, key = wrong.nonzero()[0].tolist()
        shown = ", ".join(f"{s:g}" for s in _ROWS[row].tolist())
        raise FormulaError(
            f"weight: {weight} cannot be stabilised: the form {formula.weight} gives {values[row, key]:.4g}"
            f" instead of {wanted[row, key]:.4g} for the logit {_ROWS[row, key]:g} among {shown}. What would"
            " work: give weight, mass and peak explicitly, or write the weight without differences of large"
            " numbers"
        )
