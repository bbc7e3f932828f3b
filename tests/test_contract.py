"""The contract battery on every mechanism: one test for each (mechanism, theme)."""

import pytest
import torch

import unsoft
from unsoft.mechanisms import formulas
from unsoft.testing.battery import THEMES

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


@pytest.fixture(autouse=True)
def one_thread():
    """Many small calls: a second thread would only wait, and the other core has tests of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("mechanism", [*formulas(), *OWN])
def test_contract(mechanism, theme):
    unsoft.testing.check_mechanism(OWN.get(mechanism, mechanism), only=theme)
