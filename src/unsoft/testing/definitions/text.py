"""A formula of a user's own, evaluated as it stands: its text is its definition."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Formula, evaluate
from unsoft.mechanisms.core.definition import Logits, Pointwise, over


def from_text(formula: Formula, params: Mapping[str, Tensor]) -> Pointwise:
    """A formula of a user's own, evaluated as it stands: its text is its definition."""

    def weights(x: Logits) -> Tensor:
        strength = formula.mask_target is None or x.strength
        boost = x.bias if strength else torch.zeros_like(x.bias)
        env = {"s": x.s if strength else x.s + x.bias, "n": x.n, "i": x.i, "j": x.j}
        env |= {name: value[:, None, None] for name, value in params.items()}
        shape = x.visible.shape
        if formula.peak is not None:
            peaks = (evaluate(formula.peak, env) + boost).expand(shape).masked_fill(~x.visible, -torch.inf)
            lowest = peaks.new_full((*shape[:3], 1), -torch.inf)
            env["m"] = torch.cat([peaks, lowest], -1).amax(-1, keepdim=True).nan_to_num(neginf=0.0).detach()
        # Where nothing is visible any finite logit will do: what is hidden is taken out below.
        env["s"] = torch.where(x.visible, env["s"], 0.0)
        weight = torch.where(x.visible, evaluate(formula.weight, env).expand(shape) * boost.exp(), 0.0)
        if formula.mass is None:
            return weight
        mass = evaluate(formula.mass, env).expand(shape) * (formula.mass_degree * boost).exp()
        total = torch.where(x.visible, mass, 0.0).sum(-1, keepdim=True)
        row = {name: value for name, value in env.items() if name not in ("s", "j")}
        if formula.offset_mass is not None:
            total = total + evaluate(formula.offset_mass, row)
        if formula.norm is not None:
            total = evaluate(formula.norm, row | {"z": total})
        return over(weight, total)

    return weights
