"""One formula in four languages: every printed text, run by its own language,
gives the numbers of evaluate."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import HANG
from unsoft.engines.native import codegen
from unsoft.formula import Formula, derivative, evaluate, parse
from unsoft.formula.cpp import literal, operation
from unsoft.formula.expr import symbol
from unsoft.formula.formula import Facts
from unsoft.formula.javascript import arrow
from unsoft.formula.printing import latex, torch_expression
from unsoft.mechanisms import formulas

ROWS = [[-2.5, 0.0, 0.7, 3.2], [-1e4, 1e4, 12.0], [-30.0, -31.5], [0.4]]
OWN = {
    "everything": Formula(
        "sqrt(abs(s))*erf(s/tau) + where(s >= 1, min(s, 3), relu(-s)) + max(s, j, i)/n + (s + 7)**-2 +"
        " sigmoid(s)*tanh(s)",
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
    "erf(s)",
    "erf(s*1e-9)",
    "erf(3*s)",
    "sigmoid(40*s)",
    "tanh(40*s)",
    "s**13",
    "max(s, 0.5)",
    "min(s, m)",
    "sign(s)",
    "where(s < m, 1, 0)",
    "where(s <= m, 1, 0)",
    "where(s > m, 1, 0)",
    "where(s >= m, 1, 0)",
    "where(s == m, 1, 0)",
    "where(s != m, 1, 0)",
    "where(s < m, 0.1, 1/3)",
    "log(0.5)*s",
    "s - log(0.5)/3 + 1/3",
    "exp(-abs(s))",
    "relu(s)",
    "abs(s)**0.7",
    "log(1 + s*s)",
    "-(s - m) - (-2)",
    "sqrt(s*s)",
    "0.1 + s*1e-300",
    "123456789.123456789*s",
    "s/(3*m)/7",
    "s - (m - 1) - (s + m)*(-3)",
    "2**s",
    "-s**2",
    "(-s)**3",
    "expm1(s*1e-9)",
    "expdiff(s*1e-9, 0, m)",
    "log1p(s*s)",
    "softplus(s)",
    "softplus(40*s)",
    "softplus(-40*s)",
    "sin(s)",
    "cos(3*s)",
    "sinh(s)",
    "cosh(s)",
    "sinh(s*1e-9)",
]
LOGITS = [-2.75, -1.0, -0.3, 0.0, 0.25, 0.7, 1.0, 2.2, 2.6, 4.0]


def _expected(text: str) -> torch.Tensor:
    return evaluate(parse(text), {"s": torch.tensor(LOGITS, dtype=torch.float64), "m": 0.7})


# -- torch: executing our own output in a test is the point; the library never does it
# ---------------------------------


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
    result = eval(torch_expression(parse(text)), scope) + 0 * scope["s"]
    torch.testing.assert_close(result, _expected(text), rtol=1e-14, atol=1e-300)


# -- JavaScript
# --------------------------------------------------------------------------------------------------------


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
        input=(
            f'"use strict"; console.log(JSON.stringify({{rows: {{{",".join(rows)}}},'
            f" values: {{{','.join(values)}}}}}))"
        ),
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FORMULAS)
def test_javascript_source(name, javascript):
    for row, result in zip(ROWS, javascript["rows"][name], strict=True):
        expected = FORMULAS[name].row(torch.tensor(row, dtype=torch.float64))
        torch.testing.assert_close(
            torch.tensor(result, dtype=torch.float64), expected, rtol=1e-13, atol=1e-300
        )


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_javascript_arrow(text, javascript):
    result = torch.tensor(javascript["values"][text], dtype=torch.float64)
    torch.testing.assert_close(result, _expected(text), rtol=1e-14, atol=1e-300)


def test_javascript_takes_parameters_and_position():
    source = Formula("s*tau + i", params={"tau": 2.5}).javascript_source()
    assert source.startswith("(logits, {i = logits.length - 1, tau = 2.5} = {}) => {")


# -- C++

KERNEL = Path(codegen.__file__).parent / "kernel"
POINT = {"s": -0.8, "m": 1.3, "n": 5.0, "i": 4.0, "j": 2.0, "z": 2.7, "tau": 1.5}
PRINT = """
static void print(V x) { std::printf("%.17g\\n", double(x[0])); }
template <class F> void show() {
    const real tau = 1.5;
    const V m = splat(1.3), n = splat(5), i = splat(4), j = splat(2), z = splat(2.7), s = splat(-0.8);
    const auto row = F::row(m, n, i, nullptr, &tau);
    V weight, mass, dweight, dmass;
    const typename F::Key key = {j, {}};
    F::slope(s, row, key, V{}, weight, dweight, mass, dmass);
    if (F::has_peak) print(F::peak(s, row, key, V{}));
    print(weight), print(dweight);
    if (F::has_mass) print(mass), print(dmass);
    if (F::has_mass) print(F::offset(m, n, i, nullptr, &tau)), print(F::norm(z, m, n, i, nullptr, &tau));
}
template <class F> void show_at(real logit) {
    V weight, mass;
    const auto row = F::row(splat(0.7), splat(1), V{}, nullptr, nullptr);
    F::value(splat(logit), row, typename F::Key{}, V{}, weight, mass);
    print(weight);
}
"""


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    """Compiles what the native engine compiles, without its loops,
    into one program and reads what it prints."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    spaces, prints = [], []
    for position, formula in enumerate(FORMULAS.values()):
        spaces.append(_struct(f"f{position}", formula))
        prints.append(f"show<f{position}::Formula>();")
    for position, text in enumerate(EXPRESSIONS):
        # m is the expression's own: the mass makes it a legal formula, and is not looked at
        formula = Formula(text, "1", facts=Facts(signed=True)) if "m" not in text else _with_m(text)
        spaces.append(_struct(f"e{position}", formula))
        prints += [f"show_at<e{position}::Formula>({literal(s)});" for s in LOGITS]
    folder = tmp_path_factory.mktemp("cpp")
    source = ["#include <cstdio>", '#include "simd.h"', PRINT, *spaces, "int main() {", *prints, "}"]
    (folder / "all.cpp").write_text("\n".join(source))
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-DUNSOFT_REAL=double",
        f"-I{KERNEL}",
        "all.cpp",
        "-o",
        "all",
    ]
    subprocess.run(command, cwd=folder, check=True)
    output = subprocess.run([folder / "all"], capture_output=True, text=True, check=True).stdout
    return iter([float(line) for line in output.split()])


def _with_m(text):
    return Formula(text, "1", "s", facts=Facts(signed=True))


def _struct(name, formula):
    lines = [line for line in codegen.formula_source(formula).splitlines() if not line.startswith("#include")]
    return f"namespace {name} {{\n" + "\n".join(lines) + "\n}"


def _cpp_values(formula):
    """Numbers that ``show`` prints: peak, weight and its slope, and with a mass also that, its slope,
    offset and norm."""
    weight, mass, zero, z = formula.weight, formula.mass, parse("0"), symbol("z")
    yield from [] if formula.peak is None else [formula.peak]
    yield from (weight, derivative(weight, "s"))
    if mass is not None:
        yield from (mass, derivative(mass, "s"), formula.offset_mass or zero, formula.norm or z)


def test_cpp(cpp):
    env = {symbol: torch.tensor(x, dtype=torch.float64) for symbol, x in POINT.items()}
    for formula in FORMULAS.values():
        for expr in _cpp_values(formula):
            # simd.h has exponentials of its own, good to some roundings
            assert next(cpp) == pytest.approx(evaluate(expr, env).item(), rel=1e-14, abs=1e-300), (
                formula,
                expr,
            )
    for text in EXPRESSIONS:
        for s, expected in zip(LOGITS, _expected(text).tolist(), strict=True):
            assert next(cpp) == pytest.approx(expected, rel=1e-14, abs=1e-300), (text, s)
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


# -- LaTeX


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
