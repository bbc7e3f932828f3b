"""Conjugate gradients: to the tolerance, or as many steps as are asked for and no more."""

from __future__ import annotations

from torch import Tensor

from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.conjugate import to_tolerance
from unsoft.magnitude.solvers.contract import Options, Outcome
from unsoft.magnitude.solvers.implicit import implicit
from unsoft.magnitude.solvers.registry import register
from unsoft.magnitude.solvers.truncated import truncated

_converged = implicit(lambda system, b, options: to_tolerance(system, b, options.tolerance))


def cg(system: System, b: Tensor, options: Options) -> Outcome:
    """With the gradient of the solution, or of the very steps that were made."""
    return _converged(system, b, options) if options.iterations is None else truncated(system, b, options)


register("cg", cg, takes=("iterations",), differentiable=True, truncates=True)
