"""The definition of attention, written for reading and independent of every engine.

    a_ij = weight(s_ij) e^b / norm( sum over visible j of mass(s_ij) e^(p b) + offset_mass )
    m_i  = max over visible j of peak(s_ij) + b

with b the float mask of formulas whose bias is "strength" and 0 for others, which add it to the logit or to
an expression of it. It is the reference of the dense engine and of the module of a formula. It also supplies
the sizes of the terms that a result is summed from (see :mod:`unsoft.testing.rounding`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Expr, Formula, derivative, evaluate
from unsoft.formula.evaluation import vanishes
from unsoft.formula.expr import substitute, symbol
from unsoft.testing.case import CaseInputs

MASK = "_mask"
"""The symbol of a float mask that is added to an expression of the logit."""


class FormulaRows:
    """Weights of a formula on rows of logits, and what they are made of: matrices (B, H, L, S).

    ``symbols`` has the values of s, n, i, j, parameters and fields; ``bias`` is the float mask, 0 where it
    hides. With ``strength`` it multiplies weight and mass, whatever the formula's own rule is. Gradients flow
    to all of them.
    """

    def __init__(
        self,
        formula: Formula,
        symbols: Mapping[str, Tensor],
        visible: Tensor,
        bias: Tensor,
        *,
        strength: bool = False,
    ) -> None:
        target = None if strength else formula.mask_target

        def masked(part: Expr) -> Expr:
            return part if target is None else substitute(part, target, target + symbol(MASK))

        self.formula, self.visible, self.degree = formula, visible, formula.mass_degree
        self.boost = bias if target is None else torch.zeros(())
        self.weight = masked(formula.weight)
        self.mass = None if formula.mass is None else masked(formula.mass)
        # Any finite number does for a hidden logit. Its own may have an infinite slope, and 0 * inf is NaN.
        self.symbols = {**symbols, MASK: bias, "s": torch.where(visible, symbols["s"], 0.0)}
        one_per_row = (*visible.shape[:3], 1)
        if formula.peak is not None:
            peaks = (evaluate(masked(formula.peak), self.symbols) + self.boost).expand(visible.shape)
            # One more entry, so that there is a maximum over no keys.
            lowest = peaks.new_full(one_per_row, -torch.inf)
            m = torch.cat([lowest, peaks.masked_fill(~visible, -torch.inf)], -1).amax(-1, keepdim=True)
            self.symbols["m"] = m.nan_to_num(neginf=0.0).detach()
        self.total = torch.ones(one_per_row, dtype=torch.float64)
        if self.mass is not None:
            self.total = self.entries(self.mass, self.degree).sum(-1, keepdim=True)
            if formula.offset_mass is not None:
                self.total = self.total + self.row(formula.offset_mass)
        norm = self.total if formula.norm is None else self.row(formula.norm)
        nothing = vanishes(norm)
        self.inverse = torch.where(nothing, 0.0, 1 / torch.where(nothing, 1.0, norm))

    def entries(self, expr: Expr, degree: float = 1.0, moved: Tensor | float = 0.0) -> Tensor:
        """Return values at visible entries, 0 elsewhere, scaled by the float mask to the power ``degree``.

        ``moved`` is added to the logits.
        """
        values = evaluate(expr, self.symbols | {"s": self.symbols["s"] + moved}).expand(self.visible.shape)
        return torch.where(self.visible, values * (degree * self.boost).exp(), 0.0)

    def row(self, expr: Expr) -> Tensor:
        """Return values (B, H, L, 1) of an expression without symbols of keys."""
        of_keys = ("s", "j", MASK, "k2", *self.formula.symbols.key)
        symbols = {name: x for name, x in self.symbols.items() if name not in of_keys}
        return evaluate(expr, symbols | {"z": self.total}).expand(self.total.shape)

    @property
    def weights(self) -> Tensor:
        return self.entries(self.weight) * self.inverse


class Matrices(FormulaRows):
    """All matrices (B, H, L, S) of one call, in float64, without gradients."""

    def __init__(self, formula: Formula, inputs: CaseInputs) -> None:
        case = inputs.case
        arguments = inputs.arguments(inputs.leaves)
        group = case.heads // case.kv_heads
        self.q: Tensor = arguments["query"]
        self.k: Tensor
        self.v: Tensor
        self.k, self.v = (arguments[name].repeat_interleave(group, dim=1) for name in ("key", "value"))
        self.scale: float = arguments.get("scale") or case.width**-0.5
        visible, self.bias = visible_entries(inputs), torch.zeros((), dtype=torch.float64)
        if "mask" in inputs.leaves:
            self.bias = torch.where(visible, inputs.leaves["mask"], 0.0)
        symbols = {
            "s": self.scale * self.q @ self.k.mT,
            "q2": self.scale * self.q.square().sum(-1)[..., :, None],
            "k2": self.scale * self.k.square().sum(-1)[..., None, :],
            "n": visible.sum(-1, keepdim=True).clamp(min=1).double(),
            "i": (torch.arange(case.length, dtype=torch.float64) + (case.offset or 0))[:, None],
            "j": torch.arange(case.keys, dtype=torch.float64),
        }
        for leaf, x in inputs.leaves.items():
            kind, _, name = leaf.partition(".")
            if kind == "params":
                symbols[name] = x.expand(case.heads)[:, None, None]
            elif kind == "fields":  # "c.i" is a column of queries, "c.j" a row of keys
                symbols[name.replace(".", "_")] = x[..., :, None] if name.endswith(".i") else x[..., None, :]
        super().__init__(formula, symbols, visible, self.bias)

    @property
    def output(self) -> Tensor:
        return self.weights @ self.v

    @property
    def logit_size(self) -> Tensor:
        """The size of a logit, and of its terms, which have random signs: the root of a sum of squares."""
        terms = self.scale * (self.q.square() @ self.k.square().mT).sqrt()
        size: Tensor = terms + self.symbols["s"].abs() + self.bias.abs()
        return size


def is_near_jump(formula: Formula, inputs: CaseInputs, distance: float) -> bool:
    """Return True if a weight, a mass or a slope jumps within a relative distance of some logit.

    There the exact result depends on how a logit is rounded, so it is no reference.
    """
    definition = Matrices(formula, inputs)
    if definition.visible.numel() == 0:
        return False
    step = distance * definition.logit_size
    parts = [part for part in (definition.weight, definition.mass) if part is not None]
    for expr in (*parts, *(derivative(part, "s") for part in parts)):
        change = definition.entries(expr, moved=step) - definition.entries(expr, moved=-step)
        smooth = 8 * step * definition.entries(derivative(expr, "s")).abs()
        size = definition.entries(expr).square().mean().sqrt()
        if bool((change.abs() > smooth + 1e-4 * size).any()):
            return True
    return False


def seen_entries(inputs: CaseInputs) -> Tensor:
    """Return a bool tensor (B, H, L, S): the keys that the masks alone leave to each row."""
    seen = torch.ones(*inputs.leaves["query"].shape[:3], inputs.case.keys, dtype=torch.bool)
    if inputs.visible is not None:
        seen = seen & inputs.visible
    if "mask" in inputs.leaves:
        seen = seen & (inputs.leaves["mask"] > -torch.inf)
    return seen


def visible_entries(inputs: CaseInputs) -> Tensor:
    """Return a bool tensor (B, H, L, S): the keys that masks and the causal rule leave to each row."""
    seen, offset = seen_entries(inputs), inputs.case.offset
    return seen if offset is None else seen.tril(offset)
