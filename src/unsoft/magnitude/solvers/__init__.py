"""Solvers of (Z + eps) w = b: every file of this folder that registers one (registry.py says how) is found by
itself.

contract.py   what a solver is given and gives back        registry.py   solvers by name
cg.py         conjugate gradients                          pcg.py        the same, preconditioned
cholesky.py   exact                                        lowrank.py    a few points stand for all

implicit.py   the gradient of a solution                   conjugate.py  the steps of conjugate gradients
truncated.py  some steps, and their gradient               pivoted.py    the points that explain the others
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
