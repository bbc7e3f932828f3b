"""Where a formula is not smooth: logits at which a max, abs or where switches, or the weight changes sign."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS
from unsoft.theory.signed_log import signed_log

_REACH, _FINE, _POINTS = 1e5, 0.25, 8001
_HALVINGS = 90


def kinks(expr: Expr, params: Mapping[str, float | Tensor]) -> Tensor:
    """Logits in +-100,000 at which |expression| has a corner or a jump, in rising order.

    A switch is found by a change of sign between neighbours of a grid (of step 0.01 near 0, growing with the
    distance) and then halved down to the last bit. A pair of switches inside one step is missed; the
    quadrature then has to find it itself.

    >>> from unsoft.formula import parse
    >>> kinks(parse("max(s - 2, 0) + abs(s + 1)"), {})
    tensor([-1., 2.], dtype=torch.float64)
    """
    # Half a step is shifted out so that the usual corners, such as 0, lie between two points of the grid.
    steps = torch.linspace(-1, 1, _POINTS, dtype=torch.float64) + 1 / (3 * _POINTS)
    grid = _FINE * torch.sinh(steps * torch.asinh(torch.tensor(_REACH / _FINE, dtype=torch.float64)))
    found = [_roots(switch, params, grid) for switch in _switches(expr)]
    corners: Tensor = torch.cat([*found, grid.new_zeros(0)]).unique()
    return corners


def _switches(expr: Expr) -> set[Expr]:
    """Expressions whose change of sign makes a corner or a jump."""
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
