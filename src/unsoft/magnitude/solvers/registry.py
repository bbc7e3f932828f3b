"""Solvers by name. A solver is a file in this folder that ends with :func:`register`; ``weighting`` and the
mechanism then know it.
"""

from __future__ import annotations

from dataclasses import dataclass

from unsoft.magnitude.solvers.contract import Solve
from unsoft.magnitude.solvers.implicit import implicit


@dataclass(frozen=True)
class Solver:
    """A solver under its name."""

    name: str
    solve: Solve
    """Its weights carry the gradient with respect to the points."""
    takes: frozenset[str]
    """Which of "iterations" and "rank" mean something to it."""
    truncates: bool
    """Are ``iterations`` the steps to make, whatever the residual, with the gradient of those? Otherwise they
    are the most.
    """
    needs_ridge: bool
    """Must eps be positive?"""


_solvers: dict[str, Solver] = {}


def register(
    name: str,
    solve: Solve,
    *,
    takes: tuple[str, ...] = (),
    differentiable: bool = False,
    truncates: bool = False,
    needs_ridge: bool = False,
) -> None:
    """Makes a solver known by name.

    Unless it is ``differentiable`` by itself, ``solve`` is called without gradients, on a few systems at a
    time, and the gradient is that of the solution: one more call.
    """
    found = solve if differentiable else implicit(solve)
    _solvers[name] = Solver(name, found, frozenset(takes), truncates, needs_ridge)


def solver_names() -> tuple[str, ...]:
    """The names of all solvers, in alphabetical order."""
    return tuple(sorted(_solvers))


def solver(name: str) -> Solver:
    """The solver of that name; KeyError if there is none."""
    return _solvers[name]
