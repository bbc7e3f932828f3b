"""The expressions that an engine evaluates: a formula with its additive mask written into it.

A float mask b becomes one more symbol, :data:`BIAS`. A formula with ``bias="logit"`` gets it on the logit,
where the engine adds it before evaluating anything. A formula with ``bias="strength"`` is multiplied by it,
weight by exp(b) and mass by exp(p b), and since weight(s, m) scales as exp(-m) the stable way to write that
is weight(s, m - b), with the peak raised by b. Any other ``bias`` is an expression of s that b is added to.

>>> from unsoft.formula import Formula
>>> cog = Formula(weight="sign(s)*exp(abs(s) - m)", mass="exp(abs(s) - m)", peak="abs(s)")
>>> terms = attention_terms(cog, biased=True)
>>> print(terms.weight, terms.peak, sep="; ")
sign(s)*exp(abs(s) - (m - _bias)); abs(s) + _bias
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unsoft.formula import Expr, Formula, Instruction, derivative, lower
from unsoft.formula.arguments import Symbols
from unsoft.formula.evaluation import vanishes
from unsoft.formula.expr import make, substitute, symbol
from unsoft.formula.instructions import Operand, run
from unsoft.tracing import constant_in_graph

BIAS = "_bias"


@dataclass(frozen=True)
class Terms:
    """The parts of a_ij = weight / norm(sum of mass + offset); None = absent (norm: the sum itself)."""

    weight: Expr
    mass: Expr | None
    peak: Expr | None
    norm: Expr | None
    offset: Expr | None
    degree: float
    """p: mass scales as exp(-p m)."""
    names: tuple[str, ...]
    """Parameter names, in the order of the rows of ``Call.params``."""
    fields: Symbols
    """Names of fields, in the order of ``Call.query_fields`` and ``Call.key_fields``."""


_made: dict[str, Terms] = {}


def attention_terms(formula: Formula, biased: bool) -> Terms:
    """Return the terms of a formula, with a strength bias in them if ``biased``."""
    return _made[_prepare(formula, biased)]


@constant_in_graph
def _prepare(formula: Formula, biased: bool) -> str:
    """Make the terms unless they are cached; return the key of the cache."""
    name = f"{biased:d}{formula.key}"
    if name not in _made:
        _made[name] = _make(formula, biased)
    return name


def _make(formula: Formula, biased: bool) -> Terms:
    weight, mass, peak = formula.safe_weight, formula.safe_mass, formula.peak
    degree = formula.mass_degree
    bias = symbol(BIAS)
    if biased and formula.bias not in ("logit", "strength"):
        weight, mass, peak = masked(weight, formula), _masked(mass, formula), _masked(peak, formula)
    elif biased and formula.bias == "strength":
        if peak is not None:
            shifted = symbol("m") - bias
            weight = substitute(weight, "m", shifted)
            mass = None if mass is None else substitute(mass, "m", shifted)
            peak = peak + bias
        else:
            weight = weight * make("exp", bias)
            mass = None if mass is None else mass * make("exp", bias if degree == 1 else degree * bias)
    names = tuple(sorted(formula.params))
    return Terms(weight, mass, peak, formula.norm, formula.offset_mass, degree, names, formula.symbols)


def masked(part: Expr, formula: Formula) -> Expr:
    """Return a part of a formula with the mask added to its target.

    >>> from unsoft.formula import parse
    >>> masked(parse("exp(2*s - m)"), Formula("exp(2*s)", normalise="sum", bias="2*s"))
    Expr('exp(2*s + _bias - m)')
    """
    target = formula.mask_target
    return part if target is None else substitute(part, target, target + symbol(BIAS))


def _masked(part: Expr | None, formula: Formula) -> Expr | None:
    return None if part is None else masked(part, formula)


def inverse_norm(terms: Terms, symbols: dict[str, Tensor], z: Tensor, live: Tensor) -> Tensor:
    """Return 1 / norm(z) without autograd, and 0 where the norm vanishes or a row is not ``live`` (it sees no
    key, and its norm may be undefined): such rows have weights 0."""
    # Below the smallest normal number 1 / norm would be Inf, and Inf times a weight of 0 is NaN.
    norm = z if terms.norm is None else torch.zeros_like(z) + row_value(terms.norm, symbols | {"z": z})
    return torch.where(live & ~vanishes(norm), 1.0 / norm, 0.0)


def norm_gradients(
    terms: Terms, symbols: dict[str, Tensor], inverse: Tensor, delta: Tensor
) -> tuple[Tensor, Callable[[str], Tensor]]:
    """Return the gradient of the total mass z of every row, and a function that gives the gradient of a
    parameter or query field through norm and offset.

    With a_ij = w_ij / N and delta_i = g_i . o_i the normaliser has the gradient -delta / N. ``symbols``
    include z; ``inverse``: 1 / N, and 0 in rows whose weights are 0: slopes there may be infinite or NaN.
    """
    d_norm = -delta * inverse
    slope = 1.0 if terms.norm is None else row_value(derivative(terms.norm, "z"), symbols)
    d_total = torch.where(inverse == 0, 0.0, d_norm * slope)

    def by(name: str) -> Tensor:
        part = torch.zeros_like(d_total)
        if terms.norm is not None:
            part = part + d_norm * row_value(derivative(terms.norm, name), symbols)
        if terms.offset is not None:
            part = part + d_total * row_value(derivative(terms.offset, name), symbols)
        return torch.where(inverse == 0, 0.0, part)

    return d_total, by


def row_value(expr: Expr, symbols: dict[str, Tensor]) -> Tensor | float:
    """Return the value of an expression of row quantities, without autograd; a number if it is constant."""
    value: Tensor | float = run(*_lowered(expr), symbols)["value"]
    return value


@lru_cache(maxsize=1024)
def _lowered(expr: Expr) -> tuple[list[Instruction], dict[str, Operand]]:
    return lower({"value": expr})
