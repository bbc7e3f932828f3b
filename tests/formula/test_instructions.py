"""Instructions: small, shared, in order, and the same every time."""

import pytest

from unsoft.formula import Instruction, derivative, lower, parse
from unsoft.formula.operation import OPERATIONS
from unsoft.mechanisms import formulas


def test_shared_parts_are_computed_once():
    weight = parse("sign(s)*exp(abs(s) - m)")
    instructions, _ = lower(
        {"weight": weight, "mass": parse("exp(abs(s) - m)"), "slope": derivative(weight, "s")}
    )
    assert [i.op for i in instructions].count("exp") == 1
    assert len({(i.op, i.args) for i in instructions}) == len(instructions)


@pytest.mark.parametrize(
    ("exponent", "multiplications"),
    [(2, 1), (3, 2), (4, 2), (5, 3), (7, 4), (8, 3), (16, 4), (64, 6)],
)
def test_integer_powers_are_products(exponent, multiplications):
    instructions, _ = lower({"y": parse(f"s**{exponent}")})
    assert [i.op for i in instructions] == ["mul"] * multiplications
    instructions, _ = lower({"y": parse(f"s**-{exponent}")})
    assert [i.op for i in instructions] == ["mul"] * multiplications + ["div"]
    assert instructions[-1].args[0] == 1.0


def test_powers_share_their_squares():
    instructions, _ = lower({"a": parse("s**4"), "b": parse("s**2"), "c": parse("s**8")})
    assert len(instructions) == 3


def test_constants_are_folded_and_results_may_be_symbols_or_numbers():
    instructions, results = lower({"a": parse("sqrt(2)*log(3)"), "b": parse("s"), "c": parse("s*exp(1/3)")})
    assert results["a"] == pytest.approx(2**0.5 * 1.0986122886681098)
    assert results["b"] == "s"
    assert instructions == [Instruction("_0", "mul", ("s", pytest.approx(1.3956124250860895)))]


@pytest.mark.parametrize("name", formulas())
def test_every_mechanism_is_in_order_and_deterministic(name):
    formula = formulas()[name]
    outputs = {"weight": formula.weight, "slope": derivative(formula.weight, "s")}
    instructions, results = lower(outputs)
    assert lower(outputs) == (instructions, results)
    known = {"s", "m", "n", "i", "j"}
    for target, op, args in instructions:
        assert op in OPERATIONS and op != "pow"
        assert len(args) == OPERATIONS[op].arity
        assert all(isinstance(a, float) or a in known for a in args)
        assert any(isinstance(a, str) for a in args)
        assert target not in known
        known.add(target)
    assert all(operand in known for operand in results.values() if isinstance(operand, str))
