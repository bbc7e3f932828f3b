"""The grammar, and errors for everything else."""

import sys

import pytest

from unsoft.errors import FormulaError
from unsoft.formula import parse
from unsoft.formula.expr import make, number, symbol

s, m, n = symbol("s"), symbol("m"), symbol("n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s", s),
        ("  s\t+\n1 ", s + 1),
        ("1.5e-3*s", number(0.0015) * s),
        (".5*s", number(0.5) * s),
        ("5.*s", number(5) * s),
        ("s - m - n", (s - m) - n),
        ("s / m / n", (s / m) / n),
        ("s*m + n", (s * m) + n),
        ("s + m*n", s + (m * n)),
        ("-s**2", -(s**2)),
        ("s**-2", s ** number(-2)),
        ("s**m**n", s ** (m**n)),
        ("-s*m", (-s) * m),
        ("--s", s),
        ("+s", s),
        ("2**3", number(8)),
        ("max(s, m, n)", make("max", make("max", s, m), n)),
        ("min(s, 0)", make("min", s, 0)),
        ("where(s <= 0, 1, n)", make("where", make("le", s, 0), 1, n)),
        ("where(s != m, s, m)", make("where", make("ne", s, m), s, m)),
        ("sigmoid(relu(erf(tanh(sqrt(log(abs(s)))))))", None),
    ],
)
def test_parses(text, expected):
    parsed = parse(text)
    assert expected is None or parsed is expected
    assert parse(str(parsed)) is parsed


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "empty"),
        ("   ", 3, "empty"),
        ("s.__class__", 1, "attributes do not exist"),
        ("().__class__.__bases__", 2, "attributes do not exist"),
        ("__import__('os')", 11, "text does not exist"),
        ("__import__(s)", 0, "unknown function '__import__'"),
        ("eval(s)", 0, "unknown function 'eval'"),
        ("exq(s)", 0, "did you mean 'exp'"),
        ("sigmiod(s)", 0, "did you mean 'sigmoid'"),
        ("2*tao", 2, "unknown name 'tao'; did you mean 'tau'"),
        ("s + q", 4, "unknown name 'q'"),
        ("lambda s: s", 8, "unexpected ':'"),
        ("lambda", 0, "a formula is an expression"),
        ("'s'", 0, "text does not exist"),
        ('"s"', 0, "text does not exist"),
        ("s^2", 1, "powers are written with \\*\\*"),
        ("s = 1", 2, "equality is written with =="),
        ("s[0]", 1, "only round brackets"),
        ("|s|", 0, "abs\\(s\\)"),
        ("s % 2", 2, "no remainder"),
        ("2s", 1, "an operator is missing"),
        ("s(2)", 0, "s is not a function; a product"),
        ("(s)(m)", 3, "an operator is missing"),
        ("exp", 0, "exp is a function"),
        ("exp(s", 5, "expected '\\)' to close exp\\("),
        ("(s + 1", 6, "expected '\\)' to close the bracket"),
        ("s)", 1, "unexpected '\\)'"),
        ("s +", 3, "found the end"),
        ("* s", 0, "found '\\*'"),
        ("exp()", 4, "found '\\)'"),
        ("exp(s, m)", 0, "exp takes 1 argument"),
        ("max(s)", 0, "max takes at least 2"),
        ("where(s > 0, 1)", 0, "where takes 3 argument"),
        ("where(s, 1, 0)", 7, "must be a comparison"),
        ("where(0 < s < 1, 1, 0)", 12, "no chains"),
        ("s > 0", 2, "only allowed as the condition"),
        ("(s > 0)*s", 3, "only allowed as the condition"),
        ("exp(s > 0)", 6, "only allowed as the condition"),
        ("where(s > 0, s > 1, 0)", 15, "only allowed as the condition"),
        ("s if s > 0 else 0", 2, "write where"),
        ("where(s > 0 and s < 1, 1, 0)", 12, "nest where"),
        ("s, m", 1, "unexpected ','"),
        ("1e999", 0, "not finite"),
        ("1/0", 1, "not a finite real number"),
        ("log(-1)", 0, "not a finite real number"),
        ("exp(1000)*s", 0, "not a finite real number"),
        ("s**65", 1, "exponent 65 is too large"),
        ("s**1000", 1, "exponent 1000 is too large"),
        ("s**-65", 1, "exponent -65 is too large"),
        ("s**(2*500)", 1, "exponent 1000 is too large"),
        ("9**9**9", 1, "exponent 3.8742e\\+08 is too large"),
        ("((9**9)**9)**9", 11, "not a finite real number"),
        ("ѕ + 1", 0, "U\\+0455, CYRILLIC SMALL LETTER DZE"),
        ("s − 1", 2, "U\\+2212, MINUS SIGN.*minus is written -"),
        ("s·m", 1, "a product is written with"),
        ("ReLU(s)", 0, "did you mean 'relu'"),
        ("silu(s)", 0, r"it is written s\*sigmoid\(s\)"),
        ("gamma(s)", 0, "unknown function 'gamma'\\n"),
        ("s*２", 2, "FULLWIDTH DIGIT TWO"),
        ("s + 1\x00", 5, "unexpected '\\\\x00'"),
        ("s; m", 1, "unexpected ';'"),
        ("s # m", 2, "unexpected '#'"),
        ("_s", 0, "unknown name '_s'"),
        ("1_000", 1, "an operator is missing"),
        ("0x10", 1, "an operator is missing"),
        ("1j", 1, "an operator is missing"),
        ("s @ m", 2, "unexpected '@'"),
        ("s // m", 3, "found '/'"),
        ("s := 1", 2, "unexpected ':'"),
    ],
)
def test_errors_point_at_the_problem(text, column, message):
    with pytest.raises(FormulaError, match=message) as caught:
        parse(text, ("s", "m", "n", "i", "j", "tau"), argument="mass")
    problem, shown, caret, allowed = str(caught.value).split("\n")
    assert problem.startswith("mass: ")
    assert len(shown) <= len("    ") + max(len(text), 1)
    assert caret == " " * (4 + column) + "^"
    assert allowed.startswith("allowed: ") and allowed.endswith("the names i j m n s tau")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000 + "s" + ")" * 10_000,
        "(" * 900 + "s" + ")" * 900,
        "-" * 1_999 + "s",
        "exp(" * 400 + "s" + ")" * 400,
        "s**" * 600 + "s",
        "9**" * 600 + "9",
        "s" * 1_000_000,
        "+".join("s" * 1_100),
        "((((9**64)**64)**64)**64)*s",
        "where(" * 300,
        "1" * 1_999 + "e9",
    ],
    ids=lambda text: f"{text[:8]}x{len(text)}",
)
def test_hostile_text_is_rejected_quickly(text):
    """Counted in function calls, not in seconds: 20,000 of them take some milliseconds."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with pytest.raises(FormulaError):
            parse(text)
    finally:
        sys.setprofile(None)
    assert calls < 20_000


def test_the_limits_themselves_are_usable():
    parse("+".join("s" * 900))  # a long sum is a deep tree: nothing here may recurse along it
    parse("(" * 60 + "s" + ")" * 60)
    parse("s**64")
    parse("s**-64")


def test_long_texts_are_cut_around_the_problem():
    with pytest.raises(FormulaError) as caught:
        parse("s + " * 200 + "q" + " + s" * 200)
    _, shown, caret, _ = str(caught.value).split("\n")
    assert len(shown) < 120
    assert shown[caret.index("^")] == "q"


@pytest.mark.parametrize("source", [None, 3, b"s", ["s"]])
def test_only_text_is_parsed(source):
    with pytest.raises(TypeError, match="expected formula text"):
        parse(source)


def test_hints_explain_names_that_are_not_allowed_here():
    with pytest.raises(FormulaError, match="needs a peak"):
        parse("exp(s - m)", ["s"], hints={"m": "needs a peak"})
