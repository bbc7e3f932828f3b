"""Shifts of whole rows of logits, which softmax does not notice and other formulas need.

Softmax is the same for s and s + c. Some formulas become softmax for large c: cog, since sign(s + c) is 1 and
exp|s + c| is proportional to exp(s); sinh and softpick likewise. So c is added to the logits of every row, by
the projections of the model: a channel of the keys becomes a constant, and the same channel of the queries
becomes c. Both are linear in the hidden state up to a small error, and are fitted by least squares.

The margin decides how close to softmax that is: SmolLM2 with cog, before any training, has a perplexity of
1967 for a margin of 4, 63 for 8, 33 for 12 and 32 for 16, and 1.6 million without a shift. Small shifts leave
negative weights, large ones amplify the errors of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.formula import Formula
from unsoft.hf.attention import NAME
from unsoft.lab.training.conversion.matching import Pair

_KEY_SIZE = 10.0
"""The constant in the channel of the keys, so large that the same gradient step changes both sides alike."""
_RIDGE = 1e-3
"""In units of the mean square of the hidden state."""


def becomes_softmax(formula: Formula) -> bool:
    """Return True if a formula is softmax for large logits, with the default parameters, but not for others.

    >>> from unsoft.modules.registry import resolve
    >>> [name for name in ("softmax", "cog", "sinh", "softpick", "sigmoid", "relu2")
    ...  if becomes_softmax(resolve(name))]
    ['cog', 'sinh', 'softpick']
    """
    if formula.fields or formula.uses & {"i", "j"}:
        return False
    row = torch.linspace(-4, 3, 16, dtype=torch.float64)
    shifted, plain = ((formula.row(row + shift) - row.softmax(-1)).abs().max() for shift in (20.0, 0.0))
    return bool(shifted < 1e-3 < plain)


@torch.no_grad()
def shift_rows(pair: Pair, windows: Tensor, margin: float) -> int:
    """Shift the logits of the layers of ``pair.student`` whose formula becomes softmax by that; return how
    many were changed.

    windows
        Texts (count, tokens); they go through the original once. Layers whose queries and keys are not linear
        in the hidden state (normalised, latent) stay unchanged.
    margin
        The strongest negative weight becomes exp(-margin) of the largest weight of its row.
    """
    assert pair.teacher is not None
    names = [name for name in pair.changed if _can_shift(pair.student.get_submodule(name))]
    inputs: dict[str, Tensor] = {}

    def keep_input(name: str) -> Callable[..., None]:
        return lambda module, args: inputs.__setitem__(name, args[0])

    def shift(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            query, key = args[:2]
            student, scaling = pair.student.get_submodule(name), options["scaling"]
            _shift(student, inputs.pop(name), query, key, scaling, margin)

        return before

    with ExitStack() as hooks:
        for name in names:
            module: Any = pair.teacher.get_submodule(name)
            hooks.callback(module.q_proj.register_forward_pre_hook(keep_input(name)).remove)
            attention = getattr(module, NAME)
            hooks.callback(attention.register_forward_pre_hook(shift(name), with_kwargs=True).remove)
        if names:
            pair.teacher.base_model(input_ids=windows, use_cache=False)
    return len(names)


def _can_shift(module: nn.Module) -> bool:
    formulas = getattr(module, NAME).mechanism.formulas
    linear = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "k_proj"))
    normalised = any(hasattr(module, name) for name in ("q_norm", "k_norm"))
    return linear and not normalised and len(formulas) == 1 and becomes_softmax(formulas[0])


def _shift(module: Any, x: Tensor, query: Tensor, key: Tensor, scaling: float, margin: float) -> None:
    """Replace the last channel of every head, the one that rotary positions turn least."""
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    logits = query @ key.repeat_interleave(heads // key_heads, 1).mT * scaling
    visible = torch.ones_like(logits[0, 0], dtype=torch.bool).tril()
    lowest = logits.masked_fill(~visible, math.inf).amin(-1)
    highest = logits.masked_fill(~visible, -math.inf).amax(-1)
    # With the shift c the largest weight is exp(highest + c), the strongest negative one exp(-(lowest + c)):
    # highest + lowest + 2c >= margin. The second bound makes the largest weight positive by itself.
    shifts = torch.maximum((margin - highest - lowest) / 2, margin / 2 - highest).clamp_min(0)
    x, shifts = x.flatten(0, 1).double(), shifts.transpose(1, 2).flatten(0, 1).double()
    products = x.mT @ x
    products.diagonal().add_(_RIDGE * products.diagonal().mean())
    fitted = torch.linalg.solve(products, x.mT @ torch.cat([torch.ones_like(x[:, :1]), shifts], 1))
    of_key, of_query = _KEY_SIZE * fitted[:, 0], fitted[:, 1:].mT / (_KEY_SIZE * scaling)
    for projection, count, rows in ((module.k_proj, key_heads, of_key), (module.q_proj, heads, of_query)):
        projection.weight.view(count, width, -1)[:, -1] = rows
        if projection.bias is not None:
            projection.bias.view(count, width)[:, -1] = 0
