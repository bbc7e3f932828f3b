r"""gpam: softmax attention minus a second softmax attention, with a fixed row sum (dual attention, daGPAM).

    P = (1 + l+) softmax(q k) - l- softmax(q- k)          q- = ReLU(q) W-

Paper: Heo and Choi, Generalized Probabilistic Attention Mechanism in Transformers,
arXiv 2410.15578 (rejected from ICLR 2025).

Strengths: it subtracts, with guarantees: the row sum is exactly 1 + l+ - l-, and every weight lies in [-l-, 1
+ l+]. As an affine instead of a convex combination it lets tokens drift apart where softmax pulls them
together.
Limitations: it depends on its parameters. With a random W- the second map is nearly uniform, and what is
subtracted is the mean value. It costs two attention maps.

The survey of negative attention (2025) that this file follows writes

    Y = P^GX_V \\
    P^G = (1+\lambda^+)P^+ + \lambda^-P^- \\
    p^- = \frac{\sigma(W_Q^-X_Q)X_K}{\sqrt{d_{qk}}}

and adds that P = Q K^T and that + marks the quantities of the original attention. The softmax around p^- is
ours: the survey writes none, but P^+ has one in the original attention, and the row sums of the affine
combination need one in both. It says nothing of signs, sizes and starts. What is ours besides, and why:

| here by default              | instead of            | because                                             |
|------------------------------|-----------------------|-----------------------------------------------------|
| minus l-, with l- >= 0       | plus l-, of any sign  | it always subtracts; the range of weights is known  |
| ReLU(q) W-                   | sigma of the mapped x | a mechanism is given q, not x; W- = -I looks away   |
| l+, l- in (0, ``bound`` = 1) | unbounded             | weights stay within [-1, 2]                         |
| l+ = l- = ``start`` = 0.5    | no start given        | rows begin with sum 1                               |
| W- = -I (``opposed``)        | no start given        | the case that the paper's theory treats             |

``literal=True`` is the formula as written, with sigma = ReLU and q in the place of x: plus l-, q- = ReLU(q
W-), l+ and l- without a bound, beginning at ``start`` and -``start``; rows then sum to 1 + l+ + l-.

l+ and l- are learnable per head; ``tied=True`` makes them one number, so that rows sum to 1;
``fixed`` sets both to a constant.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Gpam(LayerSpec(heads=2, head_dim=4), tied=True)
>>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
>>> _, weights = layer(q, k, v, return_weights=True)
>>> torch.allclose(weights.sum(-1), torch.ones(1, 2, 5), atol=1e-6)
True
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from unsoft.checks import positive
from unsoft.engines.call import compute_dtype
from unsoft.engines.native.step import pair_difference, pair_queries, pairs_ready
from unsoft.formula import Formula, Interval, Properties
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, visible_part
from unsoft.modules.head_pairs import QueryPair
from unsoft.modules.module import Derived, Inputs
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


class Gpam(QueryPair):
    """See the module's docstring.

    ``start``: l+ and l- at the beginning; ``opposed``: W- = -I, else a random map.
    """

    def __init__(
        self,
        layer_spec: LayerSpec,
        base: Formula | None = None,
        *,
        bound: float = 1.0,
        start: float = 0.5,
        tied: bool = False,
        fixed: float | None = None,
        opposed: bool = True,
        literal: bool = False,
    ) -> None:
        super().__init__(layer_spec, base)
        positive("gpam", "bound", bound)
        if not 0 < start < (math.inf if literal else bound):
            raise ValueError(
                f"gpam: argument 'start' must lie between 0 and bound = {bound:g}, not {start!r}"
            )
        if fixed is not None and not 0 <= fixed < math.inf:
            raise ValueError(f"gpam: argument 'fixed' must be a non-negative number, not {fixed!r}")
        self.bound, self.tied, self.fixed, self.literal = bound, tied, fixed, literal
        self._known_factors = Derived()
        heads, width = layer_spec.heads, layer_spec.head_dim
        first = (
            -torch.eye(width).expand(heads, width, width)
            if opposed
            else torch.randn(heads, width, width) / width**0.5
        )
        self.negative_map = nn.Parameter(first.clone())
        self.plus = None if fixed is not None else nn.Parameter(torch.empty(heads))
        self.minus = None if fixed is not None or tied else nn.Parameter(torch.empty(heads))
        self.begin_at(start)

    @torch.no_grad()
    def begin_at(self, strength: float) -> None:
        """Set how much is added of the first map and subtracted of the second, if that is learnable."""
        if self.plus is not None:
            self.plus.fill_(strength if self.literal else math.log(strength / (self.bound - strength)))
            if self.minus is not None:
                self.minus.copy_(-self.plus if self.literal else self.plus)

    def open_start(self) -> None:
        """Add 2 % of the first map and subtract 2 % of the second."""
        self.begin_at(min(0.02, self.bound / 2))

    def strengths(self) -> tuple[Tensor, Tensor]:
        """Return how much is added of the first map and subtracted of the second, one value per head: l+ and
        l- (-l- if literal)."""
        if self.plus is None:
            both = self.negative_map.new_full((self.layer_spec.heads,), cast(float, self.fixed))
            return both, both
        if self.literal:
            return self.plus, self.plus if self.minus is None else -self.minus
        plus = self.bound * self.plus.sigmoid()
        return plus, plus if self.minus is None else self.bound * self.minus.sigmoid()

    def second_query(self, query: Tensor) -> Tensor:
        """Return q-, the query of the map that is subtracted."""
        negative_map = self.negative_map.to(query.dtype)
        return (query @ negative_map).relu() if self.literal else query.relu() @ negative_map

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        query, key = inputs.query, inputs.key
        # The compiled code before and after the step has no gradient, and the parameters may want one.
        if type(cache) is not KeyValueCache or not cache.length or torch.is_grad_enabled():
            return None
        if not pairs_ready(query, self.negative_map) or key.dim() != 4 or not self._fits(inputs):
            return None
        both = pair_queries(query, self.negative_map, self.literal)
        maps = cache.step_by(self.base, both, key, inputs.value, inputs.options["scale"], enable_gqa=True)
        return None if maps is None else pair_difference(maps, *self._factors(query.dtype))

    def factors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        plus, minus = self._factors(compute_dtype(inputs.query.dtype))
        return plus[:, None, None], minus[:, None, None]

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return 1 + l+ and l-."""

        def compute() -> tuple[Tensor, Tensor]:
            plus, minus = self.strengths()
            return (1 + plus).to(dtype), minus.to(dtype)

        factors: tuple[Tensor, Tensor] = self._known_factors.get(
            compute, (dtype, self.negative_map.device), self.plus, self.minus
        )
        return factors


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> Tensor:
    """(1 + l+) A(q) - l- A(relu(q) W-), or as written: plus l- A(relu(q W-)) (Heo and Choi 2024)."""
    plus, minus = (x[:, None, None] for x in (layer.plus, layer.minus))
    plus, minus = (
        (plus, -minus) if layer.literal else (layer.bound * plus.sigmoid(), layer.bound * minus.sigmoid())
    )
    mapped = (call.query @ layer.negative_map).relu(), call.query.relu() @ layer.negative_map
    negative = call.move(mapped[0] if layer.literal else mapped[1])
    first, second = (visible_part(formula(logits_of(call, q)), call.visible) for q in (call.query, negative))
    weights: Tensor = (1 + plus) * first - minus * second
    return weights


def _row_sum(layer: Gpam) -> tuple[Tensor, Tensor]:
    plus, minus = (strength.detach()[:, None] for strength in layer.strengths())
    return 1 + plus - minus, 1 + plus - minus


def _largest_l1(layer: Gpam) -> tuple[float, Tensor]:
    plus, minus = (strength.detach()[:, None] for strength in layer.strengths())
    return -math.inf, 1 + plus + minus


family(
    "gpam",
    Gpam,
    summary="softmax attention minus a second one, with a fixed row sum",
    paper="Heo and Choi 2024, arXiv 2410.15578",
    properties=Properties(
        signed=True,
        row_sum=Interval(text="1 + l+ - l-", of_module=_row_sum),
        l1=Interval(text="<= 1 + l+ + l-", of_module=_largest_l1),
    ),
    base="softmax",
)
