"""Formulas: accepted arguments, errors, and serialisation."""

import copy
import json
import math
import pickle

import pytest
import torch

from unsoft.errors import FormulaError
from unsoft.formula import Formula, evaluate, parse
from unsoft.formula.expr import make, symbol
from unsoft.mechanisms import formulas

SOFTMAX = {"weight": "exp(s - m)", "mass": "exp(s - m)", "peak": "s"}


@pytest.mark.parametrize("name", formulas())
def test_travels_by_key_dictionary_pickle_and_copy(name):
    formula = formulas()[name]
    for other in (
        Formula.from_key(formula.key),
        Formula.from_dict(formula.to_dict()),
        Formula.from_dict(json.loads(json.dumps(formula.to_dict()))),
        pickle.loads(pickle.dumps(formula)),
        copy.deepcopy(formula),
    ):
        assert other == formula and hash(other) == hash(formula)
        assert other.weight is formula.weight
    assert Formula.from_key(formula.key) is Formula.from_key(formula.key)
    assert eval(repr(formula), {"Formula": Formula}) == formula


def test_the_key_ignores_names_and_nothing_else():
    sharp = {"weight": "exp(tau*s - m)", "mass": "exp(tau*s - m)", "peak": "tau*s", "params": {"tau": 2}}
    formula = Formula(**sharp)
    assert Formula(**sharp, name="mine", paper="none", summary="x", title="y") == formula
    assert list(json.loads(formula.key)) == sorted(json.loads(formula.key))
    for change in (
        {"params": {"tau": 3}},
        {"bias": "strength"},
        {"peak": "max(tau*s, 0)"},
        {"mass": "2*exp(tau*s - m)"},
    ):
        assert Formula(**sharp | change) != formula
    assert formula != "exp(s - m)"


def test_a_formula_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        Formula("s").weight = parse("n")
    with pytest.raises(TypeError):
        Formula("tau*s", params={"tau": 1}).params["tau"] = 2


def test_a_parameter_that_occurs_nowhere_is_an_error():
    with pytest.raises(FormulaError, match="'b', 'c' occurs nowhere"):
        Formula("a*s", params={"a": 1, "b": 2, "c": 3})
    assert Formula("s/n", norm="z + b", mass="abs(s)", params={"b": 1}).params == {"b": 1.0}


def test_parts_may_be_text_numbers_or_expressions():
    s, m = symbol("s"), symbol("m")
    weight = make("exp", s - m)
    assert Formula(weight, weight, s) == Formula(**SOFTMAX)
    assert Formula(1).weight is parse("1")
    assert Formula("s", "abs(s)", norm="sqrt").norm is make("sqrt", symbol("z"))
    assert Formula("s", "abs(s)", norm=" sqrt(z) ") == Formula("s", "abs(s)", norm="sqrt")


def test_attributes():
    formula = Formula(
        "tau*s*exp(s - m)", "b*exp(s - m)", "s", "z + n*exp(-m)", params={"tau": 1, "b": 2}, bias="logit"
    )
    assert formula.uses == {"s", "m", "n", "z", "tau", "b"}
    assert list(formula.params.items()) == [("b", 2.0), ("tau", 1.0)]
    assert formula.signed and formula.bias == "logit"
    assert formula.mass_degree == 1.0
    assert Formula("s").bias == "strength"
    assert Formula("exp(s)", normalise="sum").bias == "logit"


@pytest.mark.parametrize(
    ("arguments", "degree"),
    [
        (SOFTMAX, 1.0),
        (SOFTMAX | {"mass": "exp(2*(s - m))", "norm": "sqrt"}, 2.0),
        (SOFTMAX | {"mass": "exp((s - m)/2)", "norm": "z**2"}, 0.5),
        (SOFTMAX | {"mass": "exp(3*(s - m))", "norm": "z**(1/3)"}, 3.0),
        (SOFTMAX | {"norm": "z + exp(-m)"}, 1.0),
        ({"weight": "s", "mass": "s**2", "norm": "sqrt"}, 2.0),
        ({"weight": "s", "mass": "s**2", "norm": "1 + z"}, 1.0),
        ({"weight": "s"}, 1.0),
    ],
)
def test_mass_degree(arguments, degree):
    assert Formula(**arguments).mass_degree == degree


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SOFTMAX | {"weight": "exp(s)"}, "weight: the row peak m does not cancel"),
        (SOFTMAX | {"mass": "exp(s)"}, "mass: the row peak m does not cancel"),
        (SOFTMAX | {"mass": "exp(2*(s - m))"}, "norm: the row peak m does not cancel"),
        (SOFTMAX | {"mass": "exp(s - m) + 1"}, "mass: the row peak"),
        (SOFTMAX | {"norm": "z + 1"}, "norm: the row peak"),
        (SOFTMAX | {"norm": "sqrt"}, "norm: the row peak"),
        (SOFTMAX | {"offset_mass": "1"}, "offset_mass: the row peak m does not cancel"),
        (SOFTMAX | {"offset_mass": "exp(-2*m)", "peak": "max(s, 0)"}, "offset_mass: the row peak"),
        (SOFTMAX | {"weight": "where(s > 5.5, 1, exp(s - m))"}, "weight: the row peak"),
        ({"weight": "exp(s - m)", "peak": "s"}, "peak: a peak needs a mass"),
        ({"weight": "s", "mass": "abs(s)", "peak": "s"}, "the row peak m does not cancel"),
        (SOFTMAX | {"offset_mass": "exp(-m)"}, "offset_mass: exp\\(-m\\) overflows .* max\\(s, 0\\)"),
        (SOFTMAX | {"peak": "s/2"}, "overflows"),
        (SOFTMAX | {"weight": "exp(-s - m)", "mass": "exp(-s - m)"}, "overflows"),
        ({"weight": "exp(s - m)"}, "exists only if peak= is given"),
        (SOFTMAX | {"peak": "s + m"}, "not in the peak itself"),
        (SOFTMAX | {"norm": "s"}, "belong to a whole row"),
        (SOFTMAX | {"offset_mass": "exp(j - m)"}, "belong to a whole row"),
        (SOFTMAX | {"weight": "z"}, "exists only in norm"),
        ({"weight": "s", "norm": "sqrt"}, "no mass is given"),
        ({"weight": "s", "offset_mass": "1"}, "no mass is given"),
        ({"weight": "tau*s"}, "weight: unknown name 'tau'"),
        ({"weight": "s", "params": {"s": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"exp": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"_tau": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"lambda": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"double": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"τ": 1}}, "cannot be the name of a parameter"),
        ({"weight": "s", "params": {"tau": math.nan}}, "must be a finite number"),
        ({"weight": "s", "params": {"tau": "1"}}, "must be a finite number"),
        ({"weight": "s", "params": {"tau": True}}, "must be a finite number"),
        ({"weight": ""}, "weight: the formula is empty"),
    ],
)
def test_errors_have_a_reason(arguments, message):
    with pytest.raises(FormulaError, match=message):
        Formula(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": None}, "needs at least a weight"),
        ({"weight": [1]}, "weight: expected formula text"),
        ({"weight": True}, "weight: expected formula text"),
        ({"weight": "s", "mass": b"s"}, "mass: expected formula text"),
        ({"weight": "s", "params": [("tau", 1)]}, "params: expected a mapping"),
    ],
)
def test_wrong_types_raise(arguments, message):
    with pytest.raises(TypeError, match=message):
        Formula(**arguments)


def test_invalid_bias_raises():
    with pytest.raises(ValueError, match="bias: expected 'logit', 'strength' or None, not 'log'"):
        Formula("s", bias="log")


def test_expressions_pass_the_same_limits_as_text():
    with pytest.raises(FormulaError, match="too large"):
        Formula(symbol("s") ** 1000)


@pytest.mark.parametrize(
    "text", ["where(s > 0, s, 0)", "where(s <= 0, 1, 2)", "1/n", "relu(s)", "max(s, 0)", "sign(s)"]
)
def test_a_nan_logit_gives_a_nan_weight_and_mass(text):
    formula = Formula(text, mass=text)
    env = {"s": torch.tensor([math.nan, 1.0], dtype=torch.float64), "n": 2.0}
    for part in (formula.safe_weight, formula.safe_mass):
        assert evaluate(part, env).isnan().tolist() == [True, False]
    assert formula.weight is parse(text)
    assert torch.equal(evaluate(formula.safe_weight, env)[1:], evaluate(formula.weight, env)[1:])


def test_row():
    logits = torch.tensor([[0.0, math.log(3)], [5.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(
        Formula(**SOFTMAX).row(logits), torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    )
    assert Formula("tau*j + i", params={"tau": 2}).row(torch.zeros(3)).tolist() == [2.0, 4.0, 6.0]
    assert Formula("tau*j + i", params={"tau": 2}).row(torch.zeros(3), tau=1, i=0).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="beta is neither a parameter"):
        Formula("s").row(torch.zeros(3), beta=1)


def test_a_row_of_mass_zero_has_weights_zero_and_finite_gradients():
    logits = torch.zeros(3, requires_grad=True)
    weights = formulas()["softpick"].row(logits)
    assert weights.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(weights.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize(
    ("weight", "mass", "message"),
    [
        ("exp(s)", "exp(s)", 'overflows at the logit 100000.* peak="s"'),
        ("exp(s/100)", "exp(s/100)", 'overflows .* peak="s/100"'),
        ("exp(s) - exp(-s)", "exp(s) + exp(-s)", 'overflows .* peak="max\\(s, -s\\)"'),
        ("2**s", "2**s", r'overflows .* peak="s\*log\(2\)"'),
        ("exp(-s**2)", "exp(-s**2)", r'vanishes at the logit 100000.* peak="-s\*\*2"'),
        ("s*exp(abs(s))", "abs(s)*exp(abs(s))", 'overflows .* peak="abs'),
    ],
)
def test_exponentials_without_a_peak_raise(weight, mass, message):
    with pytest.raises(FormulaError, match=message):
        Formula(weight, mass)


@pytest.mark.parametrize(
    ("weight", "mass"),
    [
        ("s**4", "s**4"),
        ("s**64", "s**64"),
        ("max(s, 0)", "max(s, 0)"),
        ("sigmoid(s)", "sigmoid(s)"),
        ("exp(s)", "1"),
        ("exp(-abs(s))", "exp(-abs(s)) + 1"),
        ("abs(s)*exp(-abs(i - j))", "abs(s)*exp(-abs(i - j))"),
    ],
)
def test_no_peak_is_required_where_none_could_help(weight, mass):
    assert Formula(weight, mass).peak is None


def test_a_weight_that_fades_far_away_is_not_taken_for_a_wrong_peak():
    fading = "exp(s - (i - j)**2 - m)"
    assert str(Formula(fading, fading, "s - (i - j)**2").properties.row_sum) == "1"


def test_a_changed_logit_takes_the_mask_last():
    base = Formula("exp(s - m)", "exp(s - m)", "max(s, 0)", offset_mass="exp(-m)")
    changed = base.with_logit(2 * symbol("s"))
    assert changed.bias == "2*s" and Formula.from_dict(changed.to_dict()) == changed
    assert Formula("s*exp(s - m)", "abs(s)*exp(s - m)", "s").with_logit(2 * symbol("s")).bias == "strength"
    with pytest.raises(FormulaError, match="there is another in s\\*exp"):
        Formula("s*exp(-2*s**2)", bias="s**2")
    with pytest.raises(FormulaError, match="has no s"):
        Formula("tanh(2*s)", bias="2*n")
