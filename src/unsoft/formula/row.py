"""The definition, for one row: the shortest complete reading of a formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unsoft.formula.evaluation import evaluate

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula


def weights_of_row(formula: Formula, logits: Tensor, values: Mapping[str, Tensor | float]) -> Tensor:
    """Weights of one row in which every key is visible; see :meth:`Formula.row`."""
    fields = set(formula.symbols.all)
    if unknown := values.keys() - formula.params.keys() - fields - {"i"}:
        raise ValueError(
            f"values: {', '.join(sorted(unknown))} is neither a parameter or field of the formula nor i"
        )
    if missing := fields - values.keys():
        raise ValueError(f"values: no value for the field {', '.join(sorted(missing))}")
    count = logits.shape[-1]
    env = {"s": logits, "n": count, "i": count - 1, **formula.params, **values}
    # As tensors, so that a part without s is not evaluated in the default dtype.
    env = {name: torch.as_tensor(x, dtype=logits.dtype, device=logits.device) for name, x in env.items()}
    env["j"] = torch.arange(count, dtype=logits.dtype, device=logits.device)
    if formula.peak is not None:
        env["m"] = evaluate(formula.peak, env).detach().amax(-1, keepdim=True)
    weight = evaluate(formula.safe_weight, env)
    if formula.safe_mass is None:
        return weight
    rest = {name: value for name, value in env.items() if name not in ("s", "j", *formula.symbols.key)}
    total = evaluate(formula.safe_mass, env).sum(-1, keepdim=True)
    if formula.offset_mass is not None:
        total = total + evaluate(formula.offset_mass, rest)
    if formula.norm is not None:
        total = evaluate(formula.norm, rest | {"z": total})
    vanishing = vanishes(total)
    return torch.where(vanishing, 0, weight / torch.where(vanishing, 1, total))


def vanishes(norm: Tensor) -> Tensor:
    """Where a normaliser counts as 0: below the smallest normal number, since its inverse may overflow.

    >>> vanishes(torch.tensor([0.0, 1e-40, 1e-30, -1.0]))
    tensor([ True,  True, False, False])
    """
    return norm.abs() < torch.finfo(norm.dtype).smallest_normal
