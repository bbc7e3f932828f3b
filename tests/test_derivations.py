"""docs/derivations.md, step by step: symbolically where sympy can, by quadrature or solving otherwise."""

import re
from pathlib import Path

import mpmath
import pytest
import sympy
import torch
from sympy import Rational, erf, exp, oo, pi, sqrt, symbols

from unsoft import theory
from unsoft.magnitude import weighting

DOCS = Path(__file__).parents[1] / "docs"
beta, x, c = symbols("beta x c", real=True)
r = symbols("r", real=True)
gamma = symbols("gamma", positive=True)
phi, Phi = exp(-(r**2) / 2) / sqrt(2 * pi), (1 + erf(r / sqrt(2))) / 2
POINTS = [(0.7, 0.5), (-1.3, 0.9), (2.0, 1.7), (-0.2, 3.0)]
"""Values of beta and gamma."""


def mean(function, b, g):
    """E function(s) for s ~ N(b, g^2), by quadrature that is split where functions have corners."""
    corner = [-b / g] if abs(b / g) < 10 else []
    return mpmath.quad(lambda e: function(b + g * e) * mpmath.npdf(e), [-12, *corner, 12])


def same(value, expected, digits=10):
    assert abs(mpmath.mpf(value) - expected) <= 10**-digits * max(1, abs(expected))


def test_both_languages_have_the_same_steps_and_formulas():
    english, chinese = ((DOCS / name).read_text() for name in ("derivations.md", "derivations.zh-CN.md"))
    steps = [re.findall(r"\*\*([A-Z]\d)\.\*\*", text) for text in (english, chinese)]
    assert steps[0] == steps[1] and len(steps[0]) > 25
    blocks = [re.findall(r"\$\$.*?\$\$", text, re.S) for text in (english, chinese)]
    assert blocks[0] == blocks[1]


def test_e_exponential_weights():
    density = exp(-(x**2) / 2) / sqrt(2 * pi)
    assert sympy.simplify(c * x - x**2 / 2 - (c**2 / 2 - (x - c) ** 2 / 2)) == 0
    assert sympy.simplify(sympy.integrate(exp(c * x) * density, (x, -oo, oo)) - exp(c**2 / 2)) == 0
    first, second = exp(beta + gamma**2 / 2), exp(2 * beta + 2 * gamma**2)
    assert sympy.simplify(first / sqrt(second) - exp(-(gamma**2) / 2)) == 0
    for b, g in POINTS:
        same(mean(mpmath.exp, b, g), first.subs({beta: b, gamma: g}).evalf(30))


def test_r_rectified_moments_follow_their_recurrence():
    moments = [Phi, r * Phi + phi]
    for k in range(1, 4):
        moments.append(sympy.expand(r * moments[k] + k * moments[k - 1]))
    expected = [
        (r**2 + 1) * Phi + r * phi,
        (r**3 + 3 * r) * Phi + (r**2 + 2) * phi,
        (r**4 + 6 * r**2 + 3) * Phi + (r**3 + 5 * r) * phi,
    ]
    assert all(sympy.simplify(a - b) == 0 for a, b in zip(moments[2:], expected, strict=True))
    for value in (-1.5, 0.3):
        for k, moment in enumerate(moments):
            same(mean(lambda s, k=k: s**k * (s > 0), value, 1.0), moment.subs(r, value).evalf(30))


def test_r_relu2_is_the_formula_that_su_prints():
    printed = (
        exp(-(beta**2) / (2 * gamma**2))
        * (
            sqrt(2) * beta * gamma
            + sqrt(pi)
            * exp(beta**2 / (2 * gamma**2))
            * (beta**2 + gamma**2)
            * (erf(beta / sqrt(2) / gamma) + 1)
        )
        / pi ** Rational(1, 4)
        / sqrt(
            2 * sqrt(2) * beta * gamma * exp(-(beta**2) / (2 * gamma**2)) * (beta**2 + 5 * gamma**2)
            + 2
            * sqrt(pi)
            * (beta**4 + 6 * beta**2 * gamma**2 + 3 * gamma**4)
            * (erf(beta / sqrt(2) / gamma) + 1)
        )
    )
    ours = ((r**2 + 1) * Phi + r * phi) / sqrt((r**4 + 6 * r**2 + 3) * Phi + (r**3 + 5 * r) * phi)
    for b, g in POINTS:
        same(printed.subs({beta: b, gamma: g}).evalf(40), ours.subs(r, sympy.Float(b, 40) / g).evalf(40), 14)
    assert sympy.simplify(ours.subs(r, 0) - 1 / sqrt(6)) == 0
    far = [float(theory.sparsity("relu2", -b, 1.0)) for b in (8.0, 12.0)]
    for b, value in zip((8.0, 12.0), far, strict=True):
        assert value == pytest.approx(float(mpmath.sqrt(mpmath.npdf(b) / (6 * b))), rel=6 / b)


def test_i_identity():
    both = (r * Phi + phi) + (r * Phi + phi).subs(r, -r)
    assert sympy.simplify(both - (r * erf(r / sqrt(2)) + 2 * phi)) == 0
    closed = (
        sqrt(2 / pi) * gamma * exp(-(beta**2) / (2 * gamma**2)) + beta * erf(beta / gamma / sqrt(2))
    ) / sqrt(beta**2 + gamma**2)
    assert sympy.simplify(closed - closed.subs(beta, -beta)) == 0
    assert sympy.simplify(closed.subs(beta, 0) - sqrt(2 / pi)) == 0
    for b, g in POINTS:
        same(mean(abs, b, g) / mpmath.hypot(b, g), closed.subs({beta: b, gamma: g}).evalf(30))
        assert float(theory.sparsity("identity", b, g)) >= float(sqrt(2 / pi)) - 1e-12


def test_c_signed_exponentials():
    for b, g in POINTS:
        ratio = mpmath.mpf(b) / g
        for a in (1, 2):
            right = mean(lambda s, a=a: mpmath.exp(a * s) * (s > 0), b, g)
            same(right, mpmath.exp(a * b + a**2 * g**2 / 2) * mpmath.ncdf(a * g + ratio), 8)
        size, ratio = abs(b), abs(ratio)

        def part(a, size=size, ratio=ratio, g=g):
            return mpmath.ncdf(a * g + ratio) + mpmath.exp(-2 * a * size) * mpmath.ncdf(a * g - ratio)

        same(mpmath.exp(-(g**2) / 2) * part(1) / mpmath.sqrt(part(2)), float(theory.sparsity("cog", b, g)), 9)
    s = symbols("s", real=True)
    assert sympy.simplify((sympy.sinh(s) ** 2 - (sympy.cosh(2 * s) - 1) / 2).rewrite(exp)) == 0
    wide = float(theory.sparsity("cog", 0.0, 6.0)) / float(theory.sparsity("softmax", 0.0, 6.0))
    assert wide == pytest.approx(2**0.5, rel=1e-6)


def test_l_linear_attention():
    torch.manual_seed(0)
    features = torch.rand(200_000, 6, dtype=torch.float64) ** 3 * torch.arange(1.0, 7.0)
    query = torch.rand(6, dtype=torch.float64)
    weights = features @ query
    centre = features.mean(0)
    covariance = (features - centre).T @ (features - centre) / len(features)
    direct = weights.abs().mean() / weights.square().mean().sqrt()
    noise = query @ covariance @ query / (query @ centre) ** 2
    assert torch.allclose(direct, (1 + noise) ** -0.5, rtol=1e-12)  # L2 is exact for any distribution
    assert torch.allclose(direct, theory.linear_sparsity(query, centre, covariance), rtol=1e-12)
    ratio = query.norm() / query.sum()
    own = (1 + (2.0 * ratio) ** 2) ** -0.5
    assert torch.allclose(theory.iid_linear_sparsity(query, 1.0, 2.0), own, rtol=1e-12)
    for size in (1, 5, 64):  # L4
        q = torch.rand(1000, size, dtype=torch.float64) ** 4
        ratios = q.norm(dim=1) / q.sum(1)
        assert ratios.max() <= 1 + 1e-12 and ratios.min() >= size**-0.5 - 1e-12


def test_d_decay():
    d = symbols("lambda", positive=True)
    for n in (1, 2, 7):
        weights = [d**k for k in range(n)]
        closed = (1 - d**n) / (n * (1 - d)) * (1 + d) / (1 + d**n)
        square = (sum(weights) / n) ** 2 / (sum(w**2 for w in weights) / n)
        assert sympy.simplify(square - closed) == 0
        bound = (1 + d) / ((1 - d) * (1 + d**n)) / n
        assert sympy.simplify(closed / bound - (1 - d**n)) == 0
    assert float(theory.decay_sparsity(7, 0.6)) == pytest.approx(sqrt(closed.subs(d, Rational(3, 5))).evalf())


def test_m_magnitude_of_clones():
    far = torch.tensor([[100.0, 0.0]], dtype=torch.float64)
    for m in (1, 50, 1000):
        points = torch.cat([torch.zeros(m, 2, dtype=torch.float64), far])
        weights = weighting(points, t=1.0, eps=0.1).weights
        assert torch.allclose(weights[:-1], torch.tensor(1 / (m + 0.1), dtype=torch.float64), rtol=1e-9)
        assert torch.allclose(weights[-1], torch.tensor(1 / 1.1, dtype=torch.float64), rtol=1e-9)
    crossing = 20 * float(torch.sigmoid(torch.tensor(5.0 - 5.0)) / torch.sigmoid(torch.tensor(-5.0)))
    for m, unique_wins in ((0.5 * crossing, True), (2 * crossing, False)):  # M3, slope 5, offset -5
        share = theory.magnitude_hijack(m, slope=5.0, offset=-5.0, eps=0.0).share
        assert bool(share > 0.5) == unique_wins
    for n, length in ((3, 8.0), (6, 5.0)):  # M4, orthogonal keys
        keys = length * torch.eye(n, 64, dtype=torch.float64)
        z = torch.exp(torch.tensor(-2 * length**2 / 64, dtype=torch.float64))
        total = weighting(keys, t=1.0, eps=0.1).weights.sum()
        assert torch.allclose(total, n / (1 + 0.1 + (n - 1) * z), rtol=1e-9)
    assert sum(1 / j for j in range(1, 51)) == pytest.approx(4.5, abs=0.01)  # M5


def test_n_density_correction():
    torch.manual_seed(0)
    for m in (2, 50, 1000):
        clones = theory.density_hijack(m, p=0.7, unique=1.0, clone=1.0)
        assert float(clones) == pytest.approx(1 / (1 + m**0.3), rel=1e-12)
    keys = torch.randn(40, 8, dtype=torch.float64)
    similar = torch.exp(-0.5 * torch.cdist(keys, keys).square())
    density = similar.sum(1)
    before = similar[:39, :39].sum(1)
    assert torch.allclose(density[:39], before + similar[:39, 39], rtol=1e-12)  # N2
    others = (similar - torch.eye(40)).max()
    assert density.min() >= 1 and density.max() <= 1 + 39 * others  # N3
    two = torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    assert torch.allclose(torch.linalg.solve(two, torch.ones(2, dtype=torch.float64)), 1 / two.sum(1))  # N4
    step = torch.ones(40, dtype=torch.float64)
    assert torch.allclose(step / (similar @ step), 1 / density)


@pytest.mark.parametrize("kind, order", [("softmax", 3), ("gpam", 3), ("softmax1", 1)])
def test_k_residual_falls_at_its_rate(kind, order):
    """Slope of the new residual over the old one; weights are written out here."""
    torch.manual_seed(1)
    n, width = 12, 6
    common, noise = torch.randn(width, dtype=torch.float64), torch.randn(n, width, dtype=torch.float64)
    first, second = (torch.randn(width, width, dtype=torch.float64) / width for _ in range(2))

    def weights(tokens):
        s = tokens @ first @ tokens.T
        if kind == "softmax1":
            return s.exp() / (1 + s.exp().sum(1, keepdim=True))
        positive = s.softmax(1)
        return (
            positive if kind == "softmax" else 1.3 * positive - 0.3 * (tokens @ second @ tokens.T).softmax(1)
        )

    after = []
    for size in (1e-2, 1e-3):
        tokens = common + size * noise
        mixed = weights(tokens) @ tokens
        after.append((mixed - mixed.mean(0)).norm())
    assert torch.log10(after[0] / after[1]) == pytest.approx(order, abs=0.05)
