"""Figures of the theory: ``python benchmarks/theory.py [--out FILE.json]``, about ten seconds; needs mpmath.

The error of S in float64 against 30-digit integrals by mpmath, for closed forms and for formulas, and the
time of a curve of 100 points for a formula that has never been seen before, reading it included.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpmath import mp, mpf

from unsoft import Formula, theory
from unsoft.files import write_json
from unsoft.lab.bench.machine import machine
from unsoft.theory.weight import WEIGHTS

BETAS, GAMMAS = (-4.0, -0.5, 0.0, 1.0, 20.0), (0.01, 0.3, 1.0, 3.0)
EXACT: dict[str, Callable] = {
    "exp": mp.exp,
    "identity": lambda s: s,
    "relu": lambda s: max(s, mpf(0)),
    "relu2": lambda s: max(s, mpf(0)) ** 2,
    "cog": lambda s: mp.exp(abs(s)),
    "sinh": mp.sinh,
}
NEW = (
    "tanh(s)*exp(0.{0}*abs(s))",
    "max(s - 0.{0}, 0)**2 - min(s, 0)",
    "where(s > 0.{0}, exp(s), -exp(-s))",
    "s/(1.{0} + s**2)",
)


def exact(f: Callable, beta: float, gamma: float) -> float:
    """S by mpmath, split at s = 0 and all along the range that exp needs."""
    b, g = mpf(beta), mpf(gamma)
    low, high = -12 - 2 * g, 12 + 2 * g
    ends = sorted([low, high, *(x for x in [-b / g, *map(mpf, range(-18, 19))] if low < x < high)])
    one, two = (
        mp.quad(lambda e, p=p: abs(f(b + g * e)) ** p * mp.exp(-e * e / 2), ends, maxdegree=6) for p in (1, 2)
    )
    return float(one / mp.sqrt(two * mp.sqrt(2 * mp.pi))) if two else 0.0  # rarer than exp(-72): 0 in effect


def error_figures() -> list[dict]:
    mp.dps = 30
    figures = []
    for name, f in EXACT.items():
        wanted = {point: exact(f, *point) for point in itertools.product(BETAS, GAMMAS)}
        for kind, mechanism, bar in (
            ("closed form", name, 1e-9),
            ("quadrature", Formula(WEIGHTS[name]), 1e-8),
        ):
            worst = max(
                abs(float(theory.sparsity(mechanism, *point)) - value) for point, value in wanted.items()
            )
            figures.append({"what": f"{name}, {kind}, largest error of S", "measured": worst, "at_most": bar})
    return figures


def time_figures() -> list[dict]:
    """The slowest of five runs, each with formulas made new: nothing can be cached."""
    gammas = torch.linspace(0.1, 30, 100)
    theory.sparsity(Formula("s + 1"), 0.0, gammas)
    slowest = 0.0
    for run, text in itertools.product(range(5), NEW):
        start = time.perf_counter()
        theory.sparsity(Formula(text.format(run + 1)), -0.5, gammas)
        slowest = max(slowest, time.perf_counter() - start)
    what = "100-point curve of a new formula, seconds, slowest"
    return [{"what": what, "measured": slowest, "at_most": 0.5}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = []
    for figure in itertools.chain(error_figures(), time_figures()):
        passed = figure["measured"] <= figure["at_most"]
        line = f"{figure['what']:<60} {figure['measured']:9.2g}  <= {figure['at_most']:<7g}"
        print(line, "pass" if passed else "FAIL", flush=True)
        figures.append(figure | {"passed": passed})
    if arguments.out:
        write_json(arguments.out, {"machine": machine(), "figures": figures})
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
