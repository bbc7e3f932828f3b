"""The definition of attention, written for reading and independent of every engine.

    a_ij = weight(s_ij) e^b / norm( sum over visible j of mass(s_ij) e^(p b) + offset_mass )
    m_i  = max over visible j of peak(s_ij) + b

with b the float mask of formulas whose bias is "strength" and 0 for others, which add it to the logit or to
an expression of it. It is the reference of the dense engine, and it supplies the sizes of the terms that a
result is summed from (see :mod:`unsoft.testing.rounding`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.formula import Expr, Formula, derivative, evaluate
from unsoft.formula.evaluation import vanishes
from unsoft.formula.expr import substitute, symbol
from unsoft.testing.case import CaseInputs

MASK = "_mask"
"""The symbol of a float mask that is added to an expression of the logit."""


class Matrices:
    """All matrices (B, H, L, S) of one call, in float64, without gradients."""

    def __init__(self, formula: Formula, inputs: CaseInputs) -> None:
        case = inputs.case
        arguments = inputs.arguments(inputs.leaves)
        group = case.heads // case.kv_heads
        self.formula, self.degree = _with_mask(formula), formula.mass_degree
        self.q: Tensor = arguments["query"]
        self.k: Tensor
        self.v: Tensor
        self.k, self.v = (arguments[name].repeat_interleave(group, dim=1) for name in ("key", "value"))
        self.scale: float = arguments.get("scale") or case.width**-0.5
        self.visible, self.bias = visible_entries(inputs), torch.zeros(())
        if "mask" in inputs.leaves:
            self.bias = torch.where(self.visible, inputs.leaves["mask"], 0.0)
        logits = self.scale * self.q @ self.k.mT
        self.boost = self.bias if formula.bias == "strength" else torch.zeros(())
        rows = torch.arange(case.length, dtype=torch.float64) + (case.offset or 0)
        self.key_symbols, self.symbols_used = formula.symbols.key, formula.symbols.all
        self.symbols = {
            "q2": self.scale * self.q.square().sum(-1)[..., :, None],
            "k2": self.scale * self.k.square().sum(-1)[..., None, :],
            **_field_symbols(inputs),
            "s": logits + self.bias if formula.bias == "logit" else logits,
            MASK: self.bias,
            "n": self.visible.sum(-1, keepdim=True).clamp(min=1).double(),
            "i": rows[:, None],
            "j": torch.arange(case.keys, dtype=torch.float64),
            **{
                name: inputs.leaves[f"params.{name}"].expand(case.heads)[:, None, None]
                for name in inputs.params
            },
        }
        if self.formula.peak is not None:
            peaks = self._evaluate(self.formula.peak) + self.boost
            # One more entry, so that there is a maximum over no keys.
            lowest = peaks.new_full((*case.shape[:3], 1), -torch.inf)
            m = torch.cat([lowest, peaks.masked_fill(~self.visible, -torch.inf)], -1).amax(-1, keepdim=True)
            self.symbols["m"] = m.nan_to_num(neginf=0.0)
        self.total = torch.ones(*case.shape[:3], 1, dtype=torch.float64)
        if self.formula.mass is not None:
            self.total = self.entries(self.formula.mass, self.degree).sum(-1, keepdim=True)
            if formula.offset_mass is not None:
                self.total = self.total + self.row(formula.offset_mass)
        self.norm = self.total if formula.norm is None else self.row(formula.norm)
        self.inverse = torch.where(vanishes(self.norm), 0.0, 1.0 / self.norm)

    def entries(self, expr: Expr, degree: float = 1.0) -> Tensor:
        """Return values at visible entries, 0 elsewhere, scaled by the float mask to the power ``degree``."""
        values = self._evaluate(expr) * (degree * self.boost).exp()
        return torch.where(self.visible, values, 0.0)

    def row(self, expr: Expr) -> Tensor:
        """Return values (B, H, L, 1) of an expression without symbols of keys."""
        of_keys = ("s", "j", MASK, "k2", *self.key_symbols)
        symbols = {name: x for name, x in self.symbols.items() if name not in of_keys}
        return evaluate(expr, symbols | {"z": self.total}).expand(self.total.shape)

    def shifted(self, expr: Expr, distance: Tensor) -> Tensor:
        """Return :meth:`entries` at logits moved by a distance."""
        values = evaluate(expr, self.symbols | {"s": self.symbols["s"] + distance})
        return torch.where(self.visible, values * self.boost.exp(), 0.0)

    @property
    def weights(self) -> Tensor:
        return self.entries(self.formula.weight) * self.inverse

    @property
    def output(self) -> Tensor:
        return self.weights @ self.v

    @property
    def logit_size(self) -> Tensor:
        """The size of a logit, and of its terms, which have random signs: the root of a sum of squares."""
        terms = self.scale * (self.q.square() @ self.k.square().mT).sqrt()
        size: Tensor = terms + self.symbols["s"].abs() + self.bias.abs()
        return size

    def _evaluate(self, expr: Expr) -> Tensor:
        return evaluate(expr, self.symbols).expand(self.visible.shape)


def _field_symbols(inputs: CaseInputs) -> dict[str, Tensor]:
    """Return fields under their symbols, as columns (of queries) or rows (of keys)."""
    symbols = {}
    for leaf, x in inputs.leaves.items():
        if leaf.startswith("fields."):
            _, name, letter = leaf.split(".")
            symbols[f"{name}_{letter}"] = x[..., :, None] if letter == "i" else x[..., None, :]
    return symbols


@dataclass(frozen=True)
class MaskedFormula:
    """A formula with the symbol of the float mask in its parts, if the mask is added to an expression."""

    weight: Expr
    mass: Expr | None
    peak: Expr | None
    norm: Expr | None
    offset_mass: Expr | None
    bias: str


def _with_mask(formula: Formula) -> MaskedFormula:
    target = None if formula.bias in ("logit", "strength") else formula.mask_target

    def masked(part: Expr) -> Expr:
        return part if target is None else substitute(part, target, target + symbol(MASK))

    mass, peak = (None if x is None else masked(x) for x in (formula.mass, formula.peak))
    return MaskedFormula(masked(formula.weight), mass, peak, formula.norm, formula.offset_mass, formula.bias)


def is_near_jump(formula: Formula, inputs: CaseInputs, distance: float) -> bool:
    """Return True if a weight, a mass or a slope jumps within a relative distance of some logit.

    There the exact result depends on how a logit is rounded, so it is no reference.
    """
    definition = Matrices(formula, inputs)
    if definition.visible.numel() == 0:
        return False
    step = distance * definition.logit_size
    parts = [part for part in (definition.formula.weight, definition.formula.mass) if part is not None]
    for expr in (*parts, *(derivative(part, "s") for part in parts)):
        change = definition.shifted(expr, step) - definition.shifted(expr, -step)
        smooth = 8 * step * definition.entries(derivative(expr, "s")).abs()
        size = definition.entries(expr).square().mean().sqrt()
        if bool((change.abs() > smooth + 1e-4 * size).any()):
            return True
    return False


def visible_entries(inputs: CaseInputs) -> Tensor:
    """Return a bool tensor (B, H, L, S): the keys that masks and the causal rule leave to each row."""
    case = inputs.case
    visible = torch.ones(case.shape, dtype=torch.bool)
    if inputs.visible is not None:
        visible = visible & inputs.visible
    if "mask" in inputs.leaves:
        visible = visible & (inputs.leaves["mask"] > -torch.inf)
    if case.offset is not None:
        visible = visible.tril(case.offset)
    return visible
