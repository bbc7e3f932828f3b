"""Every mechanism, modifier and form of magnitude at the sizes and in the states of the grid.

Every run tests a sample that contains each width, dtype, mask ... once for each mechanism. The longest
lengths are tested for two of them. An eighth of modified mechanisms and forms of magnitude, a sixth of
formulas and a fifth of the other mechanisms is tested at all. They are drawn from a seed that pytest prints
(UNSOFT_TEST_SEED sets another). `make test-slow` runs a sample of all, and every pair for eight of them.
"""

import os
import random

import pytest

import unsoft
from unsoft.mechanisms import formulas
from unsoft.modules.spec import MechanismSpec

SEED = int(os.environ.get("UNSOFT_TEST_SEED", "0"))
OWN = {
    "decay": unsoft.Formula(  # positions, parameters, a peak and an offset with parameters
        weight="exp(tau*s - decay*abs(i - j) - m)",
        mass="exp(tau*s - decay*abs(i - j) - m)",
        peak="max(tau*s - decay*abs(i - j), sink)",
        offset_mass="exp(sink - m)",
        params={"tau": 1.5, "decay": 0.01, "sink": 0.0},
    ),
    "absolute positions": unsoft.Formula("sigmoid(s)*exp(-0.001*i)/(1 + j)"),
    "learned power": unsoft.Formula("sign(s)*abs(s)**p/n", params={"p": 1.5}),
}
FAMILIES = [name for name, spec in unsoft.mechanisms().items() if isinstance(spec, MechanismSpec)]
MODIFIED = [
    "logn+softmax",
    "logn+softpick",
    "logn+relu",
    "logn(64)+cog",
    "sink+softmax",
    "sink+logn+sinh",
    "sink+l2",
    "logn+gpam",
    "logn+differential",
    "gated+softmax",
    "gated+logn+gpam",
    "gated+linear-relu",
    "gated+differential2",
    "gau+softmax",
    "performer(32)",
    "cosformer(1100)",
    "retention(0.9)",
    "polynomial(2)",
    "density+cog",
    "density+linear-relu",
    "density+gpam",
    "density+differential2",
]
FORMS = {
    f"{base} {where} {causal}": (base, {"where": where, "causal": causal})
    for base, where, causal in [
        ("magnitude", "values", "arrival"),
        ("magnitude", "values", "prefix"),
        ("magnitude", "values", "streaming"),
        ("magnitude", "mass", "auto"),
        ("magnitude", "mass", "arrival"),
        ("magnitude", "mass", "prefix"),
        ("magnitude", "mass", "streaming"),
        ("magnitude+cog", "mass", "prefix"),
        ("magnitude+softpick", "mass", "arrival"),
        ("magnitude+linear-relu", "mass", "arrival"),
        ("magnitude+linear-relu", "values", "prefix"),
        ("magnitude+retention", "values", "arrival"),
        ("magnitude+gpam", "mass", "arrival"),
        ("magnitude+differential", "values", "arrival"),
        ("magnitude+differential2", "mass", "prefix"),
        ("magnitude+gated+softmax", "values", "arrival"),
    ]
} | {
    "magnitude cholesky": ("magnitude", {"solver": "cholesky"}),
    "magnitude cg 20": ("magnitude", {"iterations": 20, "eps": 100.0}),  # past convergence
    "magnitude lowrank": ("magnitude", {"solver": "lowrank"}),
}
ALL = {name: (OWN.get(name, name), {}) for name in [*formulas(), *OWN, *FAMILIES, *MODIFIED]} | FORMS
BRIEF = {*FORMS, *MODIFIED, "linear-taylor2"}
"""Expensive ones (gates: the cube of the length, linear-taylor2: the fourth power of the width), and those
made of mechanisms that are tested at all lengths."""
COMPOSED = sorted({*FORMS, *MODIFIED})
ALIKE = sorted(ALL.keys() & formulas().keys())
"""Formulas: one kernel runs them all."""
LATER = {
    *(set(COMPOSED) - set(random.Random(SEED).sample(COMPOSED, len(COMPOSED) // 8))),
    *(set(ALIKE) - set(random.Random(SEED).sample(ALIKE, len(ALIKE) // 6))),
    *(set(FAMILIES) - set(random.Random(SEED).sample(FAMILIES, len(FAMILIES) // 5))),
}
"""Most compositions, formulas and families, which this run leaves to the slow tests. The contract tests
(tests/test_contract.py) cover every mechanism at fewer sizes."""
LONG = random.Random(SEED).sample(sorted(ALL.keys() - BRIEF - LATER), 2)
"""Those that are tested at the longest lengths in this run."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LATER else ()) for name in ALL]
)
def test_a_sample(name):
    mechanism, options = ALL[name]
    unsoft.testing.check_mechanism(
        mechanism, options=options, seed=SEED, only="sizes", quick=name not in LONG
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", random.Random(SEED).sample(sorted(ALL), 8))
def test_every_pair(name):
    """Minutes each. `make test-slow` takes the date as seed, so that nightly runs cover all within weeks."""
    mechanism, options = ALL[name]
    unsoft.testing.check_mechanism(mechanism, options=options, seed=SEED, only="sizes", thorough=True)
