"""Bounds of rounding errors: the sizes of the terms that each result is a sum of.

A result that is a small difference of large terms cannot be more precise than the terms. So an error is
judged against the same sums with absolute values in them, carried from the logits through the formula
(:func:`with_error`) to the output and to every gradient. With N the normaliser, g the gradient of the output,
and err(x) the error of an expression that starts from a logit whose terms have the size
t = scale sqrt(sum q^2 k^2) + |s|:

    tau_i = sum_j err(mass) |norm'| / N            relative error of the normaliser
    w     = (err(weight) + |weight| tau) / N       of a weight
    o     : sum_j w |v|                            dv : sum_i w |g|
    P_ij  = sqrt(sum_c g_ic^2 v_jc^2)              D_i = sum_j w P
    ds    : (err(weight') + |weight'| tau) P / N + (err(mass') + |mass'| tau) |norm'| D / N
    dq    : scale sum_j ds |k|                     dk : scale sum_i ds |q|

and so on for masks and parameters. For softmax this is about (1 + 2 sigma) times the sizes of
docs/numerics.md. Signed, unnormalised or steep formulas need no constants of their own.

Half precision is computed in float32 and rounded once, so a result is off by half a unit of itself at most.
Only D_i, which the backward pass takes from the rounded output, is less exact:
by sqrt(sum_c g_ic^2 o_ic^2)/2.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.dropout import keep_factor
from unsoft.formula import Expr, Formula, derivative, evaluate
from unsoft.formula.expr import make, postorder, symbol
from unsoft.formula.operation import COMPARISONS, OPERATIONS
from unsoft.testing.case import CaseInputs
from unsoft.testing.reference import MASK, Matrices


def with_error(expr: Expr, values: Mapping[str, Tensor], errors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Return value and error of an expression, given the values of its symbols and the errors of some.

    This is running error analysis: every operation passes on the errors of its operands, multiplied by its
    slope, and adds its own rounding. Errors are in units of the machine precision, to first order. So a
    difference gets the error of its terms:

    >>> from unsoft.formula import parse
    >>> s = torch.tensor([0.5, 20.0], dtype=torch.float64)
    >>> value, error = with_error(parse("1 - tanh(s)**2"), {"s": s}, {"s": s})
    >>> (error / value > 100).tolist()        # at 20 not a digit of the difference is left
    [False, True]
    """
    known: dict[Expr, tuple[Any, Any]] = {}
    for node in postorder(expr):
        if node.op == "num":
            known[node] = float(node.value), abs(float(node.value))
        elif node.op == "sym":
            known[node] = values[node.name], errors.get(node.name, 0.0)
        else:
            operands = [known[arg][0] for arg in node.args]
            operation = OPERATIONS[node.op]
            if not node.symbols:
                operands = [torch.tensor(x).double() for x in operands]
            value = operation.torch(*operands)
            known[node] = value, None
            if node.op not in COMPARISONS:
                pass_on = operation.error or partial(_by_slopes, node.op)
                passed = pass_on(value, *operands, *(known[arg][1] for arg in node.args))
                known[node] = value, passed + abs(value)
    return known[expr]


def _by_slopes(op: str, value: Any, *operands_and_errors: Any) -> Any:
    """Return the error that an operation passes on by its slopes: the default of ``Operation.error``."""
    arity = OPERATIONS[op].arity
    operands, errors = operands_and_errors[:arity], operands_and_errors[arity:]
    names = [f"x{k}" for k in range(arity)]
    node = make(op, *map(symbol, names))
    env = dict(zip(names, operands, strict=True))
    return sum(
        evaluate(derivative(node, name), env).abs() * error for name, error in zip(names, errors, strict=True)
    )


def natural_sizes(formula: Formula, inputs: CaseInputs) -> dict[str, Tensor]:
    """Return the size of the output and of every gradient, in their shapes."""
    return _Sizes(Matrices(formula, inputs), inputs).by_name()


def half_sizes(
    formula: Formula, inputs: CaseInputs, references: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what rounding to half precision adds, given the exact results."""
    sizes = _Sizes(Matrices(formula, inputs), inputs, only_rounded_output=True).by_name()
    smallest = torch.finfo(dtype).smallest_normal  # below it the error no longer shrinks with the number
    return {name: sizes[name] + references[name].abs().clamp(min=smallest) / 2 for name in sizes}


class _Sizes:
    def __init__(self, definition: Matrices, inputs: CaseInputs, only_rounded_output: bool = False) -> None:
        self.definition, self.inputs, formula = definition, inputs, definition.formula
        self.exact = only_rounded_output
        kept = keep_factor(inputs.case.dropout)
        g, v = inputs.grad_out, definition.v
        self.per_weight = definition.inverse.abs()
        self.per_mass = torch.zeros_like(self.per_weight)
        if formula.mass is not None:
            slope = 1.0 if formula.norm is None else definition.row(derivative(formula.norm, "z")).abs()
            self.per_mass = torch.where(self.per_weight == 0, 0.0, self.per_weight * slope)
        self.tau = torch.zeros_like(self.per_weight)
        if only_rounded_output:
            self.w = self.p = torch.zeros(inputs.case.shape, dtype=torch.float64)
            self.delta = kept * (g * definition.output).square().sum(-1, keepdim=True).sqrt() / 2
        else:
            self.tau = self._mass(definition.mass).sum(-1, keepdim=True)
            self.w = self._weight(definition.weight)
            self.p = kept * (g.square() @ v.square().mT).sqrt()
            self.delta = (self.w * self.p).sum(-1, keepdim=True)
        self.ds = self._by("s")
        self.output = kept * self.w @ v.abs()
        self.value = kept * self.w.mT @ g.abs()
        self.query = definition.scale * self.ds @ definition.k.abs()
        self.key = definition.scale * self.ds.mT @ definition.q.abs()
        if "q2" in formula.symbols.query:
            by_length = self._by("q2").sum(-1, keepdim=True) + self._by_rows("q2")
            self.query = self.query + 2 * definition.scale * definition.q.abs() * by_length
        if "k2" in formula.symbols.key:
            by_length = self._by("k2").sum(-2)[..., None]
            self.key = self.key + 2 * definition.scale * definition.k.abs() * by_length

    def by_name(self) -> dict[str, Tensor]:
        """Return all sizes, summed like gradients over what a tensor is shared by or broadcast to."""
        leaves, case = self.inputs.leaves, self.inputs.case
        groups = (case.kv_heads, case.heads // case.kv_heads)
        sizes = {"output": self.output, "query": self.query}
        sizes |= {
            name: size.reshape(size.shape[0], *groups, *size.shape[2:]).sum(2)
            for name, size in (("key", self.key), ("value", self.value))
        }
        if "mask" in leaves:
            sizes["mask"] = self.mask.expand(case.shape).sum_to_size(leaves["mask"].shape)
        for leaf, x in leaves.items():
            kind, _, name = leaf.partition(".")
            if kind == "params":
                size = self._by(name).sum((0, 2, 3)) + self._by_rows(name).sum((0, 2, 3))
                sizes[leaf] = size.sum_to_size(x.shape)
            elif kind == "fields":
                symbol_name = name.replace(".", "_")
                by, of_rows = self._by(symbol_name), self._by_rows(symbol_name)[..., 0]
                sizes[leaf] = by.sum(-1) + of_rows if name.endswith(".i") else by.sum(-2)
        return sizes

    @property
    def mask(self) -> Tensor:
        """(B, H, L, S); a strength bias multiplies weight and mass, so those are its slopes."""
        if self.definition.formula.mask_target is not None:
            return self._by(MASK)
        by_mass = self.definition.degree * self._mass(self.definition.mass) * self.delta
        return self.w * self.p + by_mass

    def _by_rows(self, name: str) -> Tensor:
        """(B, H, L, 1): the part of offset and norm."""
        formula, definition = self.definition.formula, self.definition
        rows = torch.zeros_like(self.delta)
        if formula.offset_mass is not None:
            rows = rows + definition.row(derivative(formula.offset_mass, name)).abs() * self.per_mass
        if formula.norm is not None:
            rows = rows + definition.row(derivative(formula.norm, name)).abs() * self.per_weight
        return rows * self.delta

    def _by(self, name: str) -> Tensor:
        """(B, H, L, S): the size of the gradient's terms by a symbol of weight and mass."""
        weight, mass = self.definition.weight, self.definition.mass
        by_weight = self._weight(derivative(weight, name)) * self.p
        if mass is None:
            return by_weight
        return by_weight + self._mass(derivative(mass, name)) * self.delta

    def _weight(self, expr: Expr) -> Tensor:
        return self._entries(expr, 1.0) * self.per_weight

    def _mass(self, expr: Expr | None) -> Tensor:
        zero = torch.zeros_like(self.per_mass)
        return zero if expr is None else self._entries(expr, self.definition.degree) * self.per_mass

    def _entries(self, expr: Expr, degree: float) -> Tensor:
        """err(expr) + |expr| tau at the visible entries."""
        definition = self.definition
        errors = {name: definition.symbols[name].abs() for name in ("q2", "k2", MASK)}
        errors["s"] = definition.logit_size
        value, error = with_error(expr, definition.symbols, errors)
        value = torch.as_tensor(value, dtype=torch.float64).abs()
        # A symbol or a number alone is exact, but what it is multiplied with is rounded.
        size = value if self.exact else torch.as_tensor(error).maximum(value) + value * self.tau
        size = size * (degree * definition.boost).exp()
        return torch.where(definition.visible, size, 0.0)
