"""Properties of formulas made for the purpose; those of the built-ins are in tests/mechanisms."""

import pytest

from unsoft.formula import Formula

EXP = {"weight": "exp(s - m)", "mass": "exp(s - m)", "peak": "s"}


@pytest.mark.parametrize(
    ("arguments", "row_sum", "l1"),
    [
        (EXP | {"weight": "2*exp(s - m)"}, "2", "2"),
        (EXP | {"weight": "-exp(s - m)"}, "-1", "1"),
        (EXP | {"weight": "tanh(s)*exp(s - m)"}, "in [-1, 1]", "<= 1"),
        (EXP | {"weight": "sigmoid(s)*exp(s - m)"}, "<= 1", "<= 1"),
        (EXP | {"weight": "s*exp(s - m)"}, "free", "free"),
        (EXP | {"norm": "2*z"}, "free", "free"),
        (
            EXP | {"weight": "sign(s)*exp(s - m)", "mass": "exp(3*(s - m))", "norm": "z**(1/3)"},
            None,
            "in [1, n^0.6667]",
        ),
        ({"weight": "1/n"}, "1", "1"),
        ({"weight": "s", "mass": "abs(s)"}, "in [-1, 1]", "1"),
        ({"weight": "s", "mass": "abs(s)", "offset_mass": "1"}, "in (-1, 1)", "< 1"),
        ({"weight": "max(s, 0)", "mass": "max(s, 0)"}, "<= 1", "<= 1"),
        ({"weight": "exp(-s*s)/n"}, "<= 1", "<= 1"),
        ({"weight": "s*s"}, "free", "free"),
        ({"weight": "sigmoid(s)"}, "free", "free"),
    ],
)
def test_sums(arguments, row_sum, l1):
    properties = Formula(**arguments).properties
    assert row_sum is None or str(properties.row_sum) == row_sum
    assert str(properties.l1) == l1


@pytest.mark.parametrize(
    ("weight", "continuous"),
    [
        ("sign(s)", False),
        ("where(s > 1.7, s, 0)", False),
        ("where(s > 1.7, s - 1.7, 0)", True),
        ("1/s", False),
        ("tanh(1e5*s)", True),
        ("abs(s)", True),
        ("exp(-s*s)", True),
    ],
)
def test_continuity(weight, continuous):
    assert Formula(weight).properties.continuous is continuous


@pytest.mark.parametrize(
    ("weight", "sparse"),
    [
        ("relu(s - 2)", True),
        ("where(abs(s) < 1, 0, s)", True),
        ("exp(-s*s)", False),
        ("s**3", False),
        ("sign(s)", False),
        ("max(s, -5) + 5", True),
    ],
)
def test_sparsity(weight, sparse):
    assert Formula(weight).properties.sparse is sparse


@pytest.mark.parametrize(
    ("arguments", "signed"),
    [
        ({"weight": "tau*exp(-s*s)", "params": {"tau": 1}}, False),
        ({"weight": "tau*exp(-s*s)", "params": {"tau": -1}}, True),
        ({"weight": "where(s < -9, -1, 1)"}, True),
        ({"weight": "s**2"}, False),
        ({"weight": "s**3"}, True),
        ({"weight": "exp(-s*s)*cosine", "params": {"cosine": 0.5}}, False),
        ({"weight": "s*(i - j)"}, True),
    ],
)
def test_sign(arguments, signed):
    assert Formula(**arguments).signed is signed


def test_length():
    assert Formula("s/n").properties.needs_length
    assert Formula("s", "abs(s)", norm="z + n").properties.needs_length
    assert not Formula("s/2").properties.needs_length


def test_texts_for_tables():
    assert Formula("s/n").properties.texts() == {
        "signed": "yes",
        "row sum": "free",
        "sum |a|": "free",
        "sparse": "no",
        "needs length": "yes",
        "continuous": "yes",
    }


@pytest.mark.parametrize("fading", ["-0.1*(i - j)", "-(i - j)**2", "-0.5*abs(i - j)", "-0.01*j"])
def test_rows_of_one_mass_sum_to_one_wherever_their_keys_are(fading):
    """A position term that weight and mass share cancels in the sum of a row."""
    for weight, peak in ((f"exp(s - m)*exp({fading})", "s"), (f"exp(s + {fading} - m)", f"s + {fading}")):
        assert str(Formula(weight, weight, peak).properties.row_sum) == "1"
    assert str(Formula(f"sigmoid(s)*exp({fading})", f"sigmoid(s)*exp({fading})").properties.row_sum) == "1"


def test_a_window_promises_no_more_than_one():
    window = "where(i - j < 5, exp(s - m), 0)"
    assert str(Formula(window, window, "s").properties.row_sum) == "<= 1"
