"""An operation is one record: what is added in one place works in every engine and printer."""

import json
import math
import shutil
import subprocess

import mpmath
import pytest
import sympy
import torch

import unsoft
from tests.conftest import HANG
from tests.formula.sympy_form import to_sympy
from unsoft import Formula, theory
from unsoft.formula import derivative, evaluate, parse
from unsoft.formula.expr import make
from unsoft.formula.javascript import operations_source
from unsoft.formula.operation import FUNCTIONS, OPERATIONS, Operation, add, lanewise, remove
from unsoft.formula.printing import latex
from unsoft.formula.sympy_bridge import from_sympy
from unsoft.lab.report import page
from unsoft.testing import check_mechanism
from unsoft.testing.rounding import with_error
from unsoft.theory.weight import signed_log

SYMPY_HAS_NO = ("expm1", "expdiff", "log1p", "sigmoid", "relu", "softplus")  # they become what they mean
SORTED_BY_SYMPY = ("max", "min")


@pytest.fixture
def asinh():
    """The smallest record that everything needs; the rest is derived."""
    add(
        Operation(
            name="asinh",
            arity=1,
            fold=math.asinh,
            slope=lambda node, a, da: da / make("sqrt", 1 + a * a),
            torch=torch.asinh,
            cpp_definition=lanewise("vasinh", "std::asinh"),
        )
    )
    yield
    remove("asinh")


LOGITS = torch.tensor([-30.0, -1.5, -1e-9, 0.0, 0.25, 1.0, 40.0], dtype=torch.float64)


def test_a_new_operation_works_everywhere(asinh):
    formula = Formula("asinh(tau*s)/n", params={"tau": 2.0})
    with mpmath.workdps(30):
        exact = [float(mpmath.asinh(2 * mpmath.mpf(x))) for x in LOGITS.tolist()]
        slopes = [float(2 / mpmath.sqrt(1 + 4 * mpmath.mpf(x) ** 2)) for x in LOGITS.tolist()]
    # expressions and derivatives
    assert str(parse("asinh(s) + asinh(2)")) == "asinh(s) + asinh(2)"
    assert parse("asinh(2)").constant == math.asinh(2)
    assert evaluate(derivative(parse("asinh(2*s)"), "s"), {"s": LOGITS}).tolist() == pytest.approx(
        slopes, rel=1e-14
    )
    # engines, values and gradients, in float32 too
    check_mechanism(formula, quick=True)
    row = [x / len(exact) for x in exact]
    q, k = LOGITS.view(1, 1, 1, 7), torch.eye(7, dtype=torch.float64).view(1, 1, 7, 7)
    for engine in ("dense", "tiled", "native"):
        out = unsoft.attention(q, k, k, formula, scale=1.0, engine=engine)
        assert out.flatten().tolist() == pytest.approx(row, rel=1e-14)
    # printers
    scope = {}
    exec(formula.torch_source(), scope)
    assert scope["weights"](LOGITS).tolist() == pytest.approx(row, rel=1e-14)
    assert latex(parse("asinh(s)/n")) == r"\frac{\operatorname{asinh}(s)}{n}"
    assert from_sympy(sympy.asinh(sympy.Symbol("s"))) == parse("asinh(s)")
    for result in _run_javascript(formula, "asinh(2*s)/n"):
        assert result == pytest.approx(row, rel=1e-13)
    # theory and battery
    sparsity = float(theory.sparsity(formula, 0.0, 1.0))
    assert 0.79 < sparsity < 1 and sparsity == pytest.approx(
        theory.empirical_sparsity(formula, 0.0, 1.0, 4096, rows=64).mean, abs=0.01
    )
    value, error = with_error(parse("asinh(s)"), {"s": LOGITS}, {"s": LOGITS.abs()})
    assert (error >= value.abs()).all()


def _run_javascript(formula, text):
    """Weights by the printed function, and by the page that reads the formula from what is typed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    reader = (page.HERE / "formula.js").read_text()
    row = json.dumps(LOGITS.tolist())
    printed, typed = formula.javascript_source(), f"unsoftFormula.read({json.dumps(text)})"
    script = (
        f"{operations_source()}{reader}\nconsole.log(JSON.stringify([({printed})({row}), {typed}({row})]))"
    )
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, check=True, timeout=HANG)
    return json.loads(done.stdout)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="there is an operation 'exp' already"):
        add(OPERATIONS["exp"])


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"where"}))
def test_every_function_is_itself_in_sympy_and_in_the_theory(name):
    args = ", ".join(["s", "n", "2"][: FUNCTIONS[name]])
    expr = parse(f"{name}({args})")
    symbols = {sympy.Symbol("s", real=True): sympy.Rational(7, 10), sympy.Symbol("n", positive=True): 3}
    value = float(to_sympy(expr).subs(symbols))
    s = torch.tensor(0.7, dtype=torch.float64)
    assert value == pytest.approx(evaluate(expr, {"s": s, "n": 3.0}).item(), rel=1e-14)
    plain, sign, log = signed_log(expr, {"s": s, "n": 3.0})
    assert (plain.item(), (sign * log.exp()).item()) == pytest.approx((value, value), rel=1e-14)
    if name not in (*SYMPY_HAS_NO, *SORTED_BY_SYMPY):
        assert from_sympy(to_sympy(expr)) == expr


@pytest.mark.parametrize("name", ["exp", "expm1", "sinh", "cosh", "softplus", "sigmoid"])
def test_logarithms_take_over_where_floats_end(name):
    exact = (
        getattr(mpmath, name, None)
        or {
            "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
            "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
        }[name]
    )
    for x in (-2000.0, -650.0, -3.0, 3.0, 650.0, 2000.0):
        with mpmath.workdps(1000):
            true = exact(mpmath.mpf(x))
            sign, log = float(mpmath.sign(true)), float(mpmath.log(abs(true)))
        result = signed_log(parse(f"{name}(s)"), {"s": torch.tensor(x, dtype=torch.float64)})
        assert (result.sign.item(), result.log.item()) == pytest.approx((sign, log), rel=1e-14, abs=1e-14)
