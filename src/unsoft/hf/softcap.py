"""Gemma 2's cap on logits, carried into any formula: s becomes c tanh(s / c).

>>> import torch
>>> from unsoft.mechanisms.core.registry import resolve
>>> logits = torch.tensor([90.0, 0.0, -3.0])
>>> torch.allclose(capped(resolve("softmax"), 5.0).row(logits), (5 * (logits / 5).tanh()).softmax(-1))
True
"""

from __future__ import annotations

from unsoft.formula import Formula
from unsoft.formula.expr import make, symbol
from unsoft.mechanisms.core.module import Mechanism


def capped(formula: Formula, cap: float) -> Formula:
    """The formula of capped logits. A float mask acts after the cap, as in the model."""
    return formula.with_logit(cap * make("tanh", symbol("s") / cap))


def cap_logits(mechanism: Mechanism, cap: float) -> bool:
    """Caps every formula inside a mechanism; False if there is none, as in linear attention."""
    mechanism.replace_formulas(lambda formula: capped(formula, cap))
    return bool(mechanism.formulas)
