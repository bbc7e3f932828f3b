"""Evaluation on tensors: numbers, shapes, dtypes and derivatives of every kind."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unsoft.formula import evaluate, evaluate_all, parse
from unsoft.mechanisms import formulas

# Torch's own forward-mode decompositions use torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

VALUES = torch.tensor([-50.0, -3.2, -1.0, -0.1, 0.0, 0.3, 1.0, 2.5, 50.0], dtype=torch.float64)
FUNCTIONS = [
    "exp(s)",
    "abs(s)",
    "sign(s)",
    "tanh(s)",
    "sigmoid(s)",
    "relu(s)",
    "erf(s)",
    "max(s, 1)",
    "max(1, s)",
    "min(s, 1)",
    "min(1, s)",
    "max(s, m)",
    "min(s, m)",
    "s**2",
    "s**3",
    "s**5",
    "s**7",
    "s**13",
    "where(s > 0.3, 0.1, s)",
    "where(s < m, 0.1, 0.2)",
    "where(s >= 0.3, 1, 0)",
    "where(s <= 0.3, s, m)",
    "where(s == 1, 7, s)",
    "-s + 2*m - s/3",
]


@pytest.mark.parametrize("text", FUNCTIONS)
def test_values(text, exact):
    expr = parse(text)
    result = evaluate(expr, {"s": VALUES, "m": 0.7})
    expected = [float(exact(expr, {"s": s, "m": 0.7})) for s in VALUES.tolist()]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=4e-15, atol=1e-300)


@pytest.mark.parametrize(
    "text", ["log(s)", "sqrt(s)", "s**-1", "s**-3", "s**0.5", "s**1.7", "2**s", "s**m", "1/s"]
)
def test_values_for_positive_arguments(text, exact):
    expr, s = parse(text), VALUES[VALUES > 0]
    result = evaluate(expr, {"s": s, "m": 0.7})
    expected = [float(exact(expr, {"s": x, "m": 0.7})) for x in s.tolist()]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=4e-15, atol=0)


@pytest.mark.parametrize("op", ["abs", "sign", "relu", "exp", "tanh", "sigmoid", "erf", "sqrt", "log"])
def test_nan_passes_through(op):
    assert evaluate(parse(f"{op}(s)"), {"s": torch.tensor(math.nan)}).isnan()


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("pattern", ["{}(s, 1)", "{}(1, s)", "{}(s, m)", "{}(m, s)"])
def test_nan_passes_through_max_and_min(op, pattern):
    assert evaluate(parse(pattern.format(op)), {"s": torch.tensor(math.nan), "m": torch.tensor(1.0)}).isnan()


def test_shape_is_the_broadcast_of_all_tensors():
    env = {"s": torch.ones(2, 1, 4), "m": torch.ones(3, 1), "n": 5}
    for text in ("s", "m", "n", "2", "s*m", "s*n"):
        assert evaluate(parse(text), env).shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "text", ["2", "s", "s*0.1", "where(s > 0, 0.1, 0.2)", "max(s, 0.1)", "s + j", "0.1*n", "1/3"]
)
def test_dtype_is_that_of_the_tensors(text, dtype):
    result = evaluate(parse(text), {"s": torch.ones(3, dtype=dtype), "j": torch.arange(3), "n": 3})
    assert result.dtype == dtype
    if dtype == torch.float64 and text == "where(s > 0, 0.1, 0.2)":
        assert result.tolist() == [0.1] * 3  # not rounded through float32


def test_several_at_once_equal_one_by_one():
    outputs = {
        "weight": parse("exp(s - m)"),
        "mass": parse("exp(s - m)**2"),
        "peak": parse("s"),
        "one": parse("1"),
    }
    env = {"s": torch.randn(3, 4), "m": torch.randn(3, 1)}
    together = evaluate_all(outputs, env)
    assert list(together) == list(outputs)
    for name, expr in outputs.items():
        assert torch.equal(together[name], evaluate(expr, env))


def test_missing_values_are_named():
    with pytest.raises(ValueError, match="no value for m, n; given are s"):
        evaluate(parse("s*m*n"), {"s": 1.0})


def test_constants_get_no_gradient():
    s, m = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = evaluate(parse("exp(s - m)"), {"s": s, "m": m}, constants=["m"])
    assert torch.autograd.grad(y.sum(), [s, m], allow_unused=True)[1] is None
    assert not evaluate(parse("m"), {"s": s.detach(), "m": m}, constants=["m"]).requires_grad
    _, tangent = torch.func.jvp(
        lambda m: evaluate(parse("exp(s - m)"), {"s": s.detach(), "m": m}, constants=["m"]),
        (m.detach(),),
        (torch.ones(3, dtype=torch.float64),),
    )
    assert torch.equal(tangent, torch.zeros_like(tangent))


SMOOTH = "sign(s)*exp(abs(s) - m) + where(s > 0.5, sqrt(s), 0.25)*tau**3 - erf(s*tau)/sigmoid(m)"


EXPR = parse(SMOOTH, ["s", "m", "tau"])


def _inputs():
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(2, 3), (2, 1), (3,)]]


def _function(s, m, tau):
    return evaluate(EXPR, {"s": s, "m": m, "tau": tau})


def test_gradcheck_in_every_mode():
    torch.autograd.gradcheck(
        _function, _inputs(), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )


@pytest.mark.parametrize("text", ["s + m", "s + m*tau", "m - tau"])
def test_tangents_have_the_shape_of_the_result(text):
    expr, (s, m, tau) = parse(text, ["s", "m", "tau"]), (x.detach() for x in _inputs())
    env = {"s": s, "m": m, "tau": tau} if "s" in expr.symbols else {"m": m, "tau": tau}
    value, tangent = torch.func.jvp(lambda m: evaluate(expr, env | {"m": m}), (m,), (torch.ones_like(m),))
    assert tangent.shape == value.shape == (2, 3)
    assert torch.equal(tangent, (tau if "m*tau" in text else torch.ones(3)).to(tangent).expand(2, 3))


def test_gradgradcheck():
    torch.autograd.gradgradcheck(_function, _inputs())


def test_a_gradient_that_is_zero_everywhere_is_zero_not_missing():
    s = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(evaluate(parse("sign(s)"), {"s": s}).sum(), s)
    assert torch.equal(gradient, torch.zeros(3))


def test_third_derivative():
    s = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y = evaluate(parse("tanh(s)"), {"s": s})
    for _ in range(3):
        (y,) = torch.autograd.grad(y, s, create_graph=True)
    t = math.tanh(0.7)
    assert y.item() == pytest.approx(-2 * (1 - t * t) * (1 - 3 * t * t), rel=1e-13)


def test_vmap_and_its_gradients():
    s, m, tau = (x.detach() for x in _inputs())
    assert torch.equal(torch.func.vmap(_function, (0, 0, None))(s, m, tau), _function(s, m, tau))
    loss = lambda s, m, tau: _function(s, m, tau).sum()  # noqa: E731
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (0, 0, None))(s, m, tau)
    for result, expected in zip(each, torch.func.grad(loss, argnums=(0, 1))(s, m, tau), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", formulas())
def test_gradients_of_every_mechanism(name):
    formula = formulas()[name]
    logits = torch.tensor([[-1.7, 0.4, 2.3], [0.9, -0.2, -3.1]], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(formula.row, [logits], check_forward_ad=True)
    torch.autograd.gradgradcheck(formula.row, [logits])


def test_compiles_without_a_graph_break_and_agrees():
    inputs = _inputs()
    compiled = torch.compile(_function, fullgraph=True, backend="aot_eager")
    expected, result = _function(*inputs), compiled(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(result.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_formulas_load_no_slow_packages():
    code = (
        "import sys, torch; from unsoft.mechanisms import resolve; resolve('cog').row(torch.zeros(3));"
        "print([name for name in ('sympy', 'rich', 'typer', 'torch._dynamo') if name in sys.modules])"
    )
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert done.stdout.strip() == "[]"
