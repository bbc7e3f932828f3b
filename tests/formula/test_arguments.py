"""Fields in the text of a formula: declaration, use and errors."""

import json
import pickle
import re
import shutil
import subprocess

import pytest
import torch

from unsoft.errors import FormulaError
from unsoft.formula import Formula
from unsoft.formula.arguments import Symbols
from unsoft.formula.expr import symbol

FADING = Formula(
    "exp(s + c_i - c_j - m)", "exp(s + c_i - c_j - m)", "s + c_i - c_j", fields={"c": "query+key"}
)
GATED = Formula(
    "g_j*tanh(s)", "1 + k2", norm="z*(1 + t_i**2)", offset_mass="q2", fields={"t": "query", "g": "key"}
)


def test_symbols_are_those_that_occur():
    assert FADING.symbols == Symbols(("c_i",), ("c_j",))
    assert GATED.symbols == Symbols(("t_i", "q2"), ("g_j", "k2"))
    assert Formula("tanh(s)").symbols == Symbols()


def test_fields_are_part_of_what_a_formula_is():
    assert Formula.from_dict(FADING.to_dict()) == FADING
    assert Formula.from_key(FADING.key) == FADING
    assert pickle.loads(pickle.dumps(GATED)) == GATED
    assert Formula("exp(s - m)", "exp(s - m)", "s") != FADING
    assert "fields" not in json.loads(Formula("k2*s").key)  # squared lengths need no declaration


def test_a_changed_formula_keeps_its_fields():
    sharper = FADING.with_logit(2 * symbol("s"))
    assert sharper.fields == FADING.fields
    assert str(sharper.weight) == "exp(2*s + c_i - c_j - m)"
    assert sharper.bias == "2*s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": "c_j*s", "fields": {"c": "query+key"}}, "c_i occurs nowhere"),
        ({"weight": "c_k*s", "fields": {"c": "key"}}, "unknown name 'c_k'"),
        ({"weight": "c*s", "fields": {"c": "key"}}, "the field c of key is written c_j"),
        ({"weight": "c_i*s", "fields": {"c": "key"}}, "the field c of key is written c_j"),
        ({"weight": "c_j*s", "fields": {"c": "both"}}, "one of 'query', 'key', 'query+key', not 'both'"),
        ({"weight": "c_j*s", "fields": {"c c": "key"}}, "'c c' cannot be the name of a field"),
        ({"weight": "c_j*s", "fields": {"c": "key"}, "params": {"c_j": 1.0}}, "c_j is a parameter already"),
        ({"weight": "s", "params": {"k2": 1.0}}, "'k2' cannot be the name of a parameter"),
        ({"weight": "s", "mass": "c_j", "norm": "z*c_j", "fields": {"c": "key"}}, "belong to a whole row"),
        ({"weight": "s", "mass": "k2", "norm": "z*k2"}, "belong to a whole row"),
        (
            {"weight": "exp(s + c_j - m)", "mass": "exp(s + c_j - m)", "peak": "s", "fields": {"c": "key"}},
            "c_j = 1000, whose peak m",
        ),
    ],
)
def test_errors_explain_the_mistake(arguments, message):
    with pytest.raises(FormulaError, match=re.escape(message)):
        Formula(**arguments)


def test_fields_must_be_a_mapping():
    with pytest.raises(TypeError, match="fields: expected a mapping"):
        Formula("c_j*s", fields=["c"])


def test_a_field_of_either_sign_makes_a_formula_signed():
    assert Formula("c_j*exp(s - m)", "exp(s - m)", "s", fields={"c": "key"}).signed
    assert not Formula("k2*exp(s - m)", "exp(s - m)", "s").signed
    assert not FADING.signed and str(FADING.properties.row_sum) == "1"


def test_a_row_by_hand():
    logits, c = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([-0.1, -0.4, -2.0])
    expected = (logits - 2.0 - c).softmax(-1)
    torch.testing.assert_close(FADING.row(logits, c_i=-2.0, c_j=c), expected)
    with pytest.raises(ValueError, match="no value for the field c_i, c_j"):
        FADING.row(logits)
    with pytest.raises(ValueError, match="d_j is neither a parameter or field"):
        FADING.row(logits, d_j=c)


def test_printed_torch_code_gives_the_same_weights():
    names: dict = {}
    exec(FADING.torch_source(), names)  # our own text
    logits, c = torch.randn(4, 3), torch.randn(3)
    result = names["weights"](logits, torch.tensor(0.3), c)
    torch.testing.assert_close(result, FADING.row(logits, c_i=0.3, c_j=c))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_printed_javascript_gives_the_same_weights():
    program = f"const f = {FADING.javascript_source()};"
    program += "console.log(JSON.stringify(f([0, 1, 0.5], {c_i: -2, c_j: [-0.1, -0.4, -2]})));"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    expected = FADING.row(torch.tensor([0.0, 1.0, 0.5]), c_i=-2.0, c_j=torch.tensor([-0.1, -0.4, -2.0]))
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), expected)


def test_latex_writes_indices():
    assert r"c_{i} - c_{j}" in FADING.latex() or r"c_{i}" in FADING.latex()
