"""The test suite for mechanisms on every mechanism: one test for each (mechanism, theme).

Every run tests all formulas with its quick form, and one formula that is drawn from the printed seed with all
cases; `make test-slow` runs all cases for all of them.
"""

import os
import random

import pytest
import torch

import unsoft
from unsoft.mechanisms import formulas
from unsoft.modules.spec import MechanismSpec
from unsoft.testing import family
from unsoft.testing.battery import THEMES

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = {
    "decay": unsoft.Formula(  # positions, parameters, a peak and an offset with parameters
        weight="exp(tau*s - decay*abs(i - j) - m)",
        mass="exp(tau*s - decay*abs(i - j) - m)",
        peak="max(tau*s - decay*abs(i - j), sink)",
        offset_mass="exp(sink - m)",
        params={"tau": 1.5, "decay": 0.1, "sink": 0.0},
    ),
    "threshold": unsoft.Formula(
        "where(s > c, s - c, 0)/n", params={"c": 0.5}
    ),  # a corner away from 0, exact zeros, n
    "signed root": unsoft.Formula(  # signed, a norm with a parameter, mass of degree 2
        "s*exp(b*abs(s) - m)",
        "(s*exp(b*abs(s) - m))**2",
        "b*abs(s)",
        norm="g*sqrt(z)",
        params={"b": 0.5, "g": 1.5},
    ),
}


DRAWN = random.Random(int(os.environ.get("UNSOFT_TEST_SEED", "0"))).sample([*sorted(formulas()), *OWN], 1)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("mechanism", [name for name in (*formulas(), *OWN) if name not in DRAWN])
def test_quick_contract(mechanism, theme):
    unsoft.testing.check_mechanism(OWN.get(mechanism, mechanism), only=theme, quick=True)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "mechanism",
    [*DRAWN, *(pytest.param(x, marks=pytest.mark.slow) for x in (*formulas(), *OWN) if x not in DRAWN)],
)
def test_contract(mechanism, theme):
    unsoft.testing.check_mechanism(OWN.get(mechanism, mechanism), only=theme)


FAMILIES = [name for name, spec in unsoft.mechanisms().items() if isinstance(spec, MechanismSpec)]


@pytest.mark.parametrize(
    "name", [*FAMILIES, "gated+softmax", "gated+logn+gpam", "gated+linear-relu", "performer(32)"]
)
def test_contract_of_modules(name):
    """Their sizes have a test of their own: tests/testing/test_sizes.py."""
    themes = [theme for theme in family.FAMILY_THEMES if theme != "sizes"]
    report = unsoft.testing.check_mechanism(name, only=themes)
    assert len(report.rows) == len(family.PROPERTIES) and all(row.cases or row.skipped for row in report.rows)


def _leaks(out, inputs):
    return out + inputs.value.mean(-2, keepdim=True)


def _scaled(out, inputs):
    return out * (1 + 1e-9)


def _shifted(out, inputs):
    return out.roll(1, dims=-2)


def _zeros(out, inputs):
    return torch.zeros_like(out)


@pytest.mark.parametrize("defect", [_leaks, _scaled, _shifted, _zeros])
def test_a_broken_module_is_rejected(monkeypatch, defect):
    """The fast form is wrong, the written-out weights are right."""
    from unsoft.mechanisms.gpam import Gpam

    right = Gpam.attend

    def wrong(self, inputs):
        result = right(self, inputs)
        return result if inputs.return_weights else defect(result, inputs)

    monkeypatch.setattr(Gpam, "attend", wrong)
    with pytest.raises(unsoft.errors.MechanismError, match="parity: fast form"):
        unsoft.testing.check_mechanism("gpam", only="parity")


def test_options_are_for_modules_and_themes_are_known():
    assert unsoft.testing.check_mechanism("gpam", only="parity", options={"tied": True}).ok
    with pytest.raises(ValueError, match="options: 'cog' is a formula"):
        unsoft.testing.check_mechanism("cog", options={"tied": True})
    with pytest.raises(ValueError, match="unknown theme 'dropout'"):
        unsoft.testing.check_mechanism("gpam", only="dropout")
