"""gpam: softmax attention minus a second softmax attention, with a fixed row sum (dual attention, daGPAM).

    P = (1 + l+) softmax(q k) - l- softmax(q- k)          q- = ReLU(q) W-

Paper: Heo and Choi, Generalized Probabilistic Attention Mechanism in Transformers, arXiv 2410.15578 (rejected from ICLR 2025).

Can: subtract, with guarantees: the row sum is exactly 1 + l+ - l-, every weight lies in [-l-, 1 + l+]. As an affine instead of a
convex combination it lets tokens drift apart where softmax pulls them together. Cannot: be free of its parameters: with a
random W- the second map is nearly uniform, and what is subtracted is the mean value. It costs two attention maps.

l+ and l- are learnable per head and stay in (0, ``bound``); ``tied=True`` makes them one number, so that rows sum to 1;
``fixed`` sets both to a constant. The start W- = -I is the case the paper analyses (q- looks away from where q looks).

>>> import torch
>>> from unsoft.mechanisms.module import Place
>>> layer = Gpam(Place(heads=2, head_dim=4), tied=True)
>>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
>>> _, weights = layer(q, k, v, return_weights=True)
>>> torch.allclose(weights.sum(-1), torch.ones(1, 2, 5), atol=1e-6)
True
"""

import math

import torch
from torch import Tensor, nn

from unsoft.formula import Formula
from unsoft.formula.analysis import Properties
from unsoft.mechanisms.affine import combine, paired_attention
from unsoft.mechanisms.module import Inputs, Mechanism, Place
from unsoft.mechanisms.registry import family, resolve


class Gpam(Mechanism):
    """See the module's docstring. ``start``: l+ and l- at the beginning; ``opposed``: W- = -I, else a random map."""

    def __init__(
        self, place: Place, base: Formula | None = None, *, bound: float = 1.0, start: float = 0.5, tied: bool = False,
        fixed: float | None = None, opposed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(place)
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"gpam: argument 'bound' must be positive, not {bound!r}")
        if not 0 < start < bound:
            raise ValueError(
                f"gpam: argument 'start' must lie between 0 and bound = {bound:g}, not {start!r}"
            )
        if fixed is not None and not 0 <= fixed < math.inf:
            raise ValueError(f"gpam: argument 'fixed' must be a non-negative number, not {fixed!r}")
        self.base = base or resolve("softmax")
        self.bound, self.tied, self.fixed = bound, tied, fixed
        heads, width = place.heads, place.head_dim
        first = (
            -torch.eye(width).expand(heads, width, width)
            if opposed
            else torch.randn(heads, width, width) / width**0.5
        )
        self.negative_map = nn.Parameter(first.clone())
        if fixed is None:
            logit = math.log(start / (bound - start))
            self.plus = nn.Parameter(torch.full((heads,), logit))
            self.minus = None if tied else nn.Parameter(torch.full((heads,), logit))

    def strengths(self) -> tuple[Tensor, Tensor]:
        """l+ and l-, one value per head."""
        if self.fixed is not None:
            both = self.negative_map.new_full((self.place.heads,), self.fixed)
            return both, both
        plus = self.bound * self.plus.sigmoid()
        return plus, plus if self.minus is None else self.bound * self.minus.sigmoid()

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        plus, minus = (x.to(inputs.query.dtype)[:, None, None] for x in self.strengths())
        negative = inputs.query.relu() @ self.negative_map.to(inputs.query.dtype)
        first, second = paired_attention(inputs, negative, self.base)
        return combine(first, second, 1 + plus, minus)


family(
    "gpam",
    Gpam,
    summary="softmax attention minus a second one, with a fixed row sum",
    paper="Heo and Choi 2024, arXiv 2410.15578",
    properties=Properties(True, "1 + l+ - l-", "<= 1 + l+ + l-", False, False, True),
    base="softmax",
)
