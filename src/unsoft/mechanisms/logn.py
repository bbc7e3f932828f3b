"""logn: logits scaled by the logarithm of how many keys a row sees,
so that attention stays as sharp on longer inputs.

    s -> s log(n) / log(n0)          n0 = 512: rows of that length are left as they are

Source: Su 2021, kexue.fm/archives/8823, from the wish that the entropy of attention not grow with the length;
the same idea with a learned factor is SSMax, arXiv 2501.19399.

n is what the row itself sees, so a prefix never changes when the sequence grows; a row that sees one key has
logit 0. Su's code (bert4keras) takes n as at least 16, which leaves the first rows of a causal sequence
sharper: outputs there differ by up to 0.4 for standard normal inputs. ``logn16`` does the same. A float mask
is not scaled: it is added after the factor, as ALiBi and its like want it.

>>> import torch
>>> from unsoft.modules.registry import resolve
>>> weights = resolve("logn(2)+softmax").row(torch.tensor([1.0, 0.0, 0.0, 0.0]))          # log 4 / log 2 = 2
>>> torch.allclose(weights, torch.tensor([2.0, 0.0, 0.0, 0.0]).softmax(-1))
True
>>> weights = resolve("logn16(4)+softmax").row(torch.tensor([1.0, 0.0, 0.0, 0.0]))        # log 16 / log 4 = 2
>>> torch.allclose(weights, torch.tensor([2.0, 0.0, 0.0, 0.0]).softmax(-1))
True
"""

import math
from dataclasses import replace

from unsoft.formula import Formula
from unsoft.formula.expr import make, symbol
from unsoft.modules.definition import Pointwise
from unsoft.modules.registry import modifier


def logn(base: Formula, n0: float = 512, least: float = 1) -> Formula:
    """Return the formula with its logits scaled by log(n) / log(n0), where n counts as at least ``least``."""
    if not (isinstance(n0, (int, float)) and 1 < n0 < math.inf):
        raise ValueError(f"mechanism: the length n0 of logn(n0) must be a number above 1, not {n0!r}")
    n = symbol("n") if least == 1 else make("max", symbol("n"), least)
    return base.with_logit(symbol("s") * (make("log", n) / math.log(n0)))


def logn16(base: Formula, n0: float = 512) -> Formula:
    """Return :func:`logn` with n at least 16, as in Su's own code."""
    return logn(base, n0, least=16)


def definition(inner: Pointwise, n0: float | None, layer: object, least: float = 1.0) -> Pointwise:
    """s log(n) / log(n0), with n at least ``least``; a float mask is added after it."""
    return lambda x: inner(replace(x, s=x.s * x.n.clamp(min=least).log() / math.log(n0 or 512)))


def definition16(inner: Pointwise, n0: float | None, layer: object) -> Pointwise:
    return definition(inner, n0, layer, least=16.0)


modifier(
    "logn",
    logn,
    of_formula=True,
    summary="logits x log(n) / log(n0): as sharp on long inputs",
    definition=definition,
)
modifier(
    "logn16",
    logn16,
    of_formula=True,
    summary="logn with n counted as at least 16",
    definition=definition16,
)
