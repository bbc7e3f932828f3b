"""logn: logits scaled by the logarithm of how many keys a row sees,
so that attention stays as sharp on longer inputs.

    s -> s log(n) / log(n0)          n0 = 512: rows of that length are left as they are

Source: Su 2021, kexue.fm/archives/8823, from the wish that the entropy of attention not grow with the length;
the same idea with a learned factor is SSMax, arXiv 2501.19399.

n is what the row itself sees, so a prefix never changes when the sequence grows; a row that sees one key has
logit 0. Su's code (bert4keras) takes n as at least 16, which leaves the first rows of a causal sequence
sharper: outputs there differ by up to 0.4 for standard normal inputs. A float mask is not scaled: it is added
after the factor, as position biases such as ALiBi need it.

>>> import torch
>>> from unsoft.modules.registry import resolve
>>> weights = resolve("logn(2)+softmax").row(torch.tensor([1.0, 0.0, 0.0, 0.0]))          # log 4 / log 2 = 2
>>> torch.allclose(weights, torch.tensor([2.0, 0.0, 0.0, 0.0]).softmax(-1))
True
"""

import math
from dataclasses import replace

from unsoft.formula import Formula
from unsoft.formula.expr import make, symbol
from unsoft.modules.definition import Pointwise
from unsoft.modules.registry import modifier


def logn(base: Formula, n0: float = 512) -> Formula:
    """Return the formula with its logits scaled by log(n) / log(n0)."""
    if not (isinstance(n0, (int, float)) and 1 < n0 < math.inf):
        raise ValueError(f"mechanism: the length n0 of logn(n0) must be a number above 1, not {n0!r}")
    return base.with_logit(symbol("s") * (make("log", symbol("n")) / math.log(n0)))


def definition(inner: Pointwise, n0: float | None, layer: object) -> Pointwise:
    """s log(n) / log(n0); a float mask is added after it."""
    return lambda x: inner(replace(x, s=x.s * x.n.log() / math.log(n0 or 512)))


modifier("logn", logn, of_formula=True, summary="logits x log(n) / log(n0): as sharp on long inputs")
