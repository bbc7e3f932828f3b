"""The weight of a mechanism as a function of the logit: its formula, values, kinks and moments.

Formulas with a closed form are written here a second time, so that the theory also checks the mechanisms' own
text. Every other name ("tanh", "polynomial(3)", "logn+cog") is looked up in the registry, from which only the
expressions are used. They are evaluated here, apart from :mod:`unsoft.formula.evaluation`, which the engines
use: the oracle does not share their arithmetic.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS
from unsoft.formula.signed_log import SignedLog, signed_log
from unsoft.theory.arguments import Mechanism, Numbers, Params, read_at_least
from unsoft.theory.quadrature import log_moments

WEIGHTS = {  # up to the factors that cancel
    **dict.fromkeys(("exp", "softmax", "softmax1", "l2"), "exp(s)"),
    **dict.fromkeys(("identity", "linear-identity"), "s"),
    "relu": "max(s, 0)",
    "relu2": "max(s, 0)**2",
    "cog": "sign(s)*exp(abs(s))",
    "sinh": "(exp(s) - exp(-s))/2",
    "sigmoid": "sigmoid(s - log(n))",
}
_AT_ONCE = 256  # points, each with some thousand nodes
_PROBES = torch.tensor([-7.3, -1.1, -0.2, 0.3, 1.7, 8.9], dtype=torch.float64)
_REACH, _FINE, _POINTS = 1e5, 0.25, 8001
_HALVINGS = 90


def formula_of(mechanism: Mechanism) -> Formula:
    """Return the formula to integrate, given by name or directly.

    >>> formula_of("relu").weight, formula_of("tanh").weight
    (Expr('max(s, 0)'), Expr('tanh(s)/n'))
    """
    if isinstance(mechanism, str) and mechanism in WEIGHTS:
        return Formula(WEIGHTS[mechanism], normalise="abs")
    # Not at the top: of the mechanisms, which come later in the import order, only the names are needed.
    from unsoft.modules.registry import resolve

    formula = resolve(mechanism)
    if not isinstance(formula, Formula):
        raise ValueError(
            f"mechanism: {mechanism!r} is not a formula, so it has no weight that depends on the logit alone"
        )
    return formula


class Weight:
    """The weight of a formula as a function of the logit alone, up to a constant factor.

    The row peak m is 0, since it cancels; ``n`` is needed if the formula depends on the number of keys in
    more than its scale.

    >>> Weight(Formula("max(s, 0)/n")).signed_log(torch.tensor([2.0, -3.0])).plain
    tensor([2., 0.], dtype=torch.float64)
    """

    def __init__(self, formula: Formula, *, n: Numbers | None = None, params: Params = None) -> None:
        if unknown := set(params or {}) - formula.params.keys():
            known = ", ".join(formula.params) or "none"
            raise ValueError(
                f"params: the formula has no {', '.join(sorted(unknown))}; its parameters: {known}"
            )
        if positions := formula.weight.symbols & {"i", "j"}:
            raise ValueError(
                f"formula: the weight depends on the position ({', '.join(sorted(positions))}), so its keys"
                " do not share one distribution and S(beta, gamma) is not defined"
            )
        self.expr = formula.weight
        self.env: dict[str, float | Tensor] = {"m": 0.0, **formula.params, **(params or {})}
        self.keys = self.env["n"] = self._count(n)

    def _count(self, n: Numbers | None) -> Tensor:
        if n is not None:
            return read_at_least("n", n, 1.0)
        # A factor such as 1/n cancels in S: it changes log|weight| by the same amount at every logit.
        few, many = (
            signed_log(self.expr, {"s": _PROBES, **self.env, "n": count}).log for count in (2.0, 1000.0)
        )
        change = (many - few)[few.isfinite() & many.isfinite()]
        if len(change) and change.max() - change.min() > 1e-9:
            raise ValueError(
                "n: the weights of this formula depend on the number of visible keys; give n, such as 1024"
            )
        return torch.ones((), dtype=torch.float64)

    def signed_log(self, logits: Tensor) -> SignedLog:
        """Return sign and logarithm of the weight at each logit."""
        return signed_log(self.expr, {"s": logits.double(), **self.env})

    def log_size(self, logits: Tensor) -> Tensor:
        """Return log|weight|, expanded to the shape of the logits."""
        return self.signed_log(logits).log.expand(logits.shape)

    def log_moments(self, beta: Tensor, gamma: Tensor, powers: tuple[int, ...], dim: int | None) -> Tensor:
        """Return log E|weight|^p, the powers in the first dimension; for one number of keys."""
        if self.keys.ndim:
            raise ValueError(
                f"n: expected one number of keys, not a tensor of shape {tuple(self.keys.shape)}"
            )
        breaks = kinks(self.expr, self.env)
        points = zip(beta.flatten().split(_AT_ONCE), gamma.flatten().split(_AT_ONCE), strict=True)
        moments = [log_moments(self.log_size, *point, powers, breaks, dim) for point in points]
        return torch.cat(moments, dim=1).reshape(len(powers), *beta.shape)


def limit_spread(beta: Tensor) -> Tensor:
    """Return a gamma that is small enough to extrapolate S to 0 and large enough for float64."""
    return 1e-5 * beta.abs().clamp(min=1.0)


def kinks(expr: Expr, params: Mapping[str, float | Tensor]) -> Tensor:
    """Return the logits in +-100,000 at which |expression| has a corner or a jump, in rising order.

    These are where a max, abs or where switches, or the weight changes sign. A switch is detected by a change
    of sign between neighbours of a grid (of step 0.01 near 0, growing with the distance) and then located by
    bisection down to the last bit. A pair of switches inside one step is missed; the adaptive quadrature then
    has to resolve it.

    >>> from unsoft.formula import parse
    >>> kinks(parse("max(s - 2, 0) + abs(s + 1)"), {})
    tensor([-1., 2.], dtype=torch.float64)
    """
    # The grid is shifted so that the usual corners, such as 0, lie between two of its points.
    steps = torch.linspace(-1, 1, _POINTS, dtype=torch.float64) + 1 / (3 * _POINTS)
    grid = _FINE * torch.sinh(steps * torch.asinh(torch.tensor(_REACH / _FINE, dtype=torch.float64)))
    roots = [_roots(switch, params, grid) for switch in _switches(expr)]
    corners: Tensor = torch.cat([*roots, grid.new_zeros(0)]).unique()
    return corners


def _switches(expr: Expr) -> set[Expr]:
    """Return the expressions whose change of sign makes a corner or a jump."""
    switches = {expr}
    for node in postorder(expr):
        corner = None if node.op in ("num", "sym") else OPERATIONS[node.op].corner
        if corner is not None:
            switches.add(corner(*node.args))
    return {switch for switch in switches if "s" in switch.symbols}


def _roots(switch: Expr, params: Mapping[str, float | Tensor], grid: Tensor) -> Tensor:
    sign = signed_log(switch, {"s": grid, **params}).sign
    changes = (sign[1:] != sign[:-1]) & ~sign[1:].isnan() & ~sign[:-1].isnan()
    left, right, before = grid[:-1][changes], grid[1:][changes], sign[:-1][changes]
    for _ in range(_HALVINGS if len(left) else 0):
        middle = (left + right) / 2
        same = signed_log(switch, {"s": middle, **params}).sign == before
        left, right = torch.where(same, middle, left), torch.where(same, right, middle)
    exact = signed_log(switch, {"s": right, **params}).sign == 0
    return torch.where(exact, right, left)
