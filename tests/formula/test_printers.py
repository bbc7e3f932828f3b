"""One formula in four languages: every printed text, run by its own language, gives the numbers of evaluate."""

import json
import shutil
import subprocess

import pytest
import torch

from tests.conftest import HANG
from unsoft.formula import Formula, derivative, evaluate, parse
from unsoft.formula.cpp import function, literal, operation
from unsoft.formula.javascript import arrow
from unsoft.formula.latex import latex
from unsoft.formula.torch_code import torch_expression
from unsoft.mechanisms import formulas

ROWS = [[-2.5, 0.0, 0.7, 3.2], [-1e4, 1e4, 12.0], [-30.0, -31.5], [0.4]]
OWN = {
    "everything": Formula(
        "sqrt(abs(s))*erf(s/tau) + where(s >= 1, min(s, 3), relu(-s)) + max(s, j, i)/n + (s + 7)**-2 + sigmoid(s)*tanh(s)",
        params={"tau": 1.5},
    ),
    "roots": Formula(
        "sign(s)*abs(s)**0.3", "abs(s)**1.1", norm="1 + z**0.9/log(1 + n)", offset_mass="1/(1 + i)"
    ),
    "uniform": Formula("1/n"),
    "flat": Formula("2", mass="1"),
    "negative": Formula("-s*-2 - (-s - -1.5e-7)"),
}
FORMULAS = {**formulas(), **OWN}
EXPRESSIONS = [
    "erf(s)", "erf(s*1e-9)", "erf(3*s)", "sigmoid(40*s)", "tanh(40*s)", "s**13", "max(s, 0.5)", "min(s, m)", "sign(s)",
    "where(s < m, 1, 0)", "where(s <= m, 1, 0)", "where(s > m, 1, 0)", "where(s >= m, 1, 0)", "where(s == m, 1, 0)",
    "where(s != m, 1, 0)", "where(s < m, 0.1, 1/3)", "log(0.5)*s", "s - log(0.5)/3 + 1/3", "exp(-abs(s))", "relu(s)", "abs(s)**0.7", "log(1 + s*s)", "-(s - m) - (-2)", "sqrt(s*s)",
    "0.1 + s*1e-300", "123456789.123456789*s", "s/(3*m)/7", "s - (m - 1) - (s + m)*(-3)", "2**s", "-s**2", "(-s)**3",
]  # fmt: skip
LOGITS = [-2.75, -1.0, -0.3, 0.0, 0.25, 0.7, 1.0, 2.2, 2.6, 4.0]


def _expected(text: str) -> torch.Tensor:
    return evaluate(parse(text), {"s": torch.tensor(LOGITS, dtype=torch.float64), "m": 0.7})


# -- torch: executing our own output in a test is the point; the library never does it ---------------------------------


@pytest.mark.parametrize("name", FORMULAS)
def test_torch_source(name):
    scope = {}
    exec(FORMULAS[name].torch_source(), scope)
    for row in ROWS:
        logits = torch.tensor([row, row], dtype=torch.float64)
        torch.testing.assert_close(
            scope["weights"](logits), FORMULAS[name].row(logits), rtol=1e-14, atol=1e-300
        )


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_torch_expression(text):
    scope = {
        "torch": torch,
        "s": torch.tensor(LOGITS, dtype=torch.float64),
        "m": torch.tensor(0.7, dtype=torch.float64),
    }
    found = eval(torch_expression(parse(text)), scope) + 0 * scope["s"]
    torch.testing.assert_close(found, _expected(text), rtol=1e-14, atol=1e-300)


# -- JavaScript --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def javascript():
    """Runs one node process for all texts."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    rows = [
        f"{json.dumps(name)}: {json.dumps(ROWS)}.map((row) => ({f.javascript_source()})(row))"
        for name, f in FORMULAS.items()
    ]
    values = [
        f"{json.dumps(text)}: {json.dumps(LOGITS)}.map((s) => ({arrow(parse(text), ['s', 'm'])})(s, 0.7))"
        for text in EXPRESSIONS
    ]
    done = subprocess.run(
        [node, "-"],
        input=f'"use strict"; console.log(JSON.stringify({{rows: {{{",".join(rows)}}}, values: {{{",".join(values)}}}}}))',
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FORMULAS)
def test_javascript_source(name, javascript):
    for row, found in zip(ROWS, javascript["rows"][name], strict=True):
        expected = FORMULAS[name].row(torch.tensor(row, dtype=torch.float64))
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), expected, rtol=1e-13, atol=1e-300
        )


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_javascript_arrow(text, javascript):
    found = torch.tensor(javascript["values"][text], dtype=torch.float64)
    torch.testing.assert_close(found, _expected(text), rtol=1e-14, atol=1e-300)


def test_javascript_takes_parameters_and_position():
    source = Formula("s*tau + i", params={"tau": 2.5}).javascript_source()
    assert source.startswith("(logits, {i = logits.length - 1, tau = 2.5} = {}) => {")


# -- C++ ---------------------------------------------------------------------------------------------------------------

SHIM = """
#include <cmath>
#include <cstdio>
typedef double real;
static real vexp(real x) { return std::exp(x); }
static real vexpm1(real x) { return std::expm1(x); }
static real vlog(real x) { return std::log(x); }
static real vsqrt(real x) { return std::sqrt(x); }
static real vabs(real x) { return std::fabs(x); }
static real vsign(real x) { return (x > 0) - (x < 0); }
static real vmax(real a, real b) { return a > b ? a : b; }
static real vmin(real a, real b) { return a < b ? a : b; }
static real vtanh(real x) { return std::tanh(x); }
static real vsigmoid(real x) { return 1 / (1 + std::exp(-x)); }
static real vrelu(real x) { return x > 0 ? x : 0; }
static real verf(real x) { return std::erf(x); }
static real vpow(real a, real b) { return std::pow(a, b); }
static real vselect(bool c, real a, real b) { return c ? a : b; }
"""
POINT = {"s": -0.8, "m": 1.3, "n": 5.0, "i": 4.0, "j": 2.0, "z": 2.7, "tau": 1.5}


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    """Compiles all formulas and expressions into one program and reads what it prints."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    spaces, prints = [], []
    for place, formula in enumerate(FORMULAS.values()):
        spaces.append(f"namespace f{place} {{\n{formula.cpp_source()}}}")
        for name in _cpp_parts(formula):
            inputs = ", ".join(literal(POINT[symbol]) for symbol in _cpp_inputs(formula, name))
            prints.append(f'std::printf("%.17g\\n", f{place}::{name}({inputs}));')
    for place, text in enumerate(EXPRESSIONS):
        spaces.append(function(f"e{place}", {"y": parse(text)}, ["s", "m"]))
        prints += [f'std::printf("%.17g\\n", e{place}({literal(s)}, {literal(0.7)}));' for s in LOGITS]
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "all.cpp").write_text("\n".join([SHIM, *spaces, "int main() {", *prints, "}"]))
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", "-Wno-unused-function", "all.cpp", "-o", "all"],
        cwd=folder,
        check=True,
    )
    output = subprocess.run([folder / "all"], capture_output=True, text=True, check=True).stdout
    return iter([float(line) for line in output.split()])


def _cpp_parts(formula):
    names = ("peak", "weight", "mass", "offset_mass", "norm")
    parts = {name: getattr(formula, name) for name in names if getattr(formula, name) is not None}
    return parts | {
        f"{name}_slope": derivative(parts[name], "s") for name in ("weight", "mass") if name in parts
    }


def _cpp_inputs(formula, name):
    used = getattr(formula, name.removesuffix("_slope")).symbols
    return [symbol for symbol in ("s", "z", "m", "n", "i", "j", "tau") if symbol in used]


def test_cpp(cpp):
    for formula in FORMULAS.values():
        for name, expr in _cpp_parts(formula).items():
            expected = evaluate(
                expr, {symbol: torch.tensor(x, dtype=torch.float64) for symbol, x in POINT.items()}
            )
            assert next(cpp) == pytest.approx(expected.item(), rel=1e-14, abs=1e-300), (formula, name)
    for text in EXPRESSIONS:
        for expected in _expected(text).tolist():
            assert next(cpp) == pytest.approx(expected, rel=1e-14, abs=1e-300), text
    assert next(cpp, None) is None


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-300, 1.7976931348623157e308, -2.5, 3, 2**60, 5e-324])
def test_cpp_literals_are_exact(number):
    text = literal(number)
    assert text.startswith("real(") and text.endswith(")")
    assert float(text[5:-1]) == number
    assert set(text[5:-1]) & set(".e")  # never an integer literal


def test_cpp_operations():
    assert operation("neg", ["a"]) == "-a"
    assert operation("le", ["a", "b"]) == "a <= b"
    assert operation("where", ["c", "a", "b"]) == "vselect(c, a, b)"
    assert operation("sigmoid", ["a"]) == "vsigmoid(a)"
    assert "real& a, real& b" in function("both", {"a": parse("s"), "b": parse("2*s")}, ["s"])


# -- LaTeX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abs(s)/n", r"\frac{\left|s\right|}{n}"),
        ("sign(s)", r"\operatorname{sign}(s)"),
        ("max(s, 0)**2", r"{\max(s, 0)}^{2}"),
        ("(s + 1)*(s - 1)", r"\left(s + 1\right)\, \left(s - 1\right)"),
        ("s - (m - n)", r"s - \left(m - n\right)"),
        ("s*(-2)", r"s\, \left(-2\right)"),
        ("(s/m)**2", r"{\left(\frac{s}{m}\right)}^{2}"),
        ("exp(s)**2", r"{\left(e^{s}\right)}^{2}"),
        ("sqrt(n)*1e-6", r"\sqrt{n}\, 1 \cdot 10^{-6}"),
        ("where(s >= 0, s, 0)", r"\begin{cases} s & s \ge 0 \\ 0 & \text{otherwise} \end{cases}"),
        (
            "2*where(s >= 0, s, 0)",
            r"2\, \left(\begin{cases} s & s \ge 0 \\ 0 & \text{otherwise} \end{cases}\right)",
        ),
        ("tau*s + beta_2*long", r"\tau\, s + \beta_{2}\, \mathit{long}"),
    ],
)
def test_latex(text, expected):
    assert latex(parse(text, ["s", "m", "n", "tau", "beta_2", "long"])) == expected


@pytest.mark.parametrize("name", FORMULAS)
def test_latex_is_balanced(name):
    text = FORMULAS[name].latex()
    assert text.count("{") == text.count("}")
    assert text.count(r"\left") == text.count(r"\right")
    assert text.startswith("a_{ij} = ")


def test_latex_of_whole_formulas():
    assert (
        formulas()["softmax"].latex() == r"a_{ij} = \frac{e^{s - m}}{\sum_j e^{s - m}}, \qquad m = \max_j s"
    )
    assert formulas()["relu"].latex() == r"a_{ij} = \frac{\max(s, 0)}{n}"
    assert "1 + " in OWN["roots"].latex() and r"\left(\sum_j" in OWN["roots"].latex()
