"""Expression trees: shared nodes, harmless simplification only, and text that reads back to the same tree."""

import copy
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsoft.errors import FormulaError
from unsoft.formula import Expr, parse
from unsoft.formula.expr import make, number, postorder, symbol
from unsoft.formula.operation import COMPARISONS, OPERATIONS

s, m = symbol("s"), symbol("m")


def test_equal_expressions_are_the_same_object():
    assert make("exp", s - m) is make("exp", s - m)
    assert number(2) is number(2.0)
    assert number(0.0) is number(-0.0)
    assert s + m is not m + s  # never reordered


def test_nodes_survive_copying_and_pickling_as_themselves():
    expr = parse("where(s > 0, exp(s - m), 0.1)")
    assert copy.deepcopy(expr) is expr
    assert pickle.loads(pickle.dumps(expr)) is expr


def test_nodes_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        s.name = "t"


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (s + 0, "s"),
        (0 + s, "s"),
        (s - 0, "s"),
        (0 - s, "-s"),
        (s * 1, "s"),
        (1 * s, "s"),
        (s / 1, "s"),
        (s**1, "s"),
        (s**0, "1"),
        (make("neg", -s), "s"),
        (number(2) * 3, "6"),
        (number(1) / 4, "0.25"),
        (make("where", make("lt", number(1), number(2)), s, m), "s"),
        (make("where", s < 0, m, m), "m"),
        # Not harmless, so not done:
        (s * 0, "s*0"),  # hides a NaN
        (0 * s, "0*s"),
        (s - s, "s - s"),  # hides a NaN
        (number(1) / 3, "1/3"),  # would round
        (number(0.1) + 0.2, "0.1 + 0.2"),  # would round
        (make("exp", make("log", symbol("n")) - s), "exp(log(n) - s)"),  # n*exp(-s) overflows
    ],
)
def test_only_harmless_simplification(expr, text):
    assert str(expr) == text


def test_constants_know_their_value():
    assert (number(1) / 3).constant == 1 / 3
    assert make("sqrt", number(2)).constant == 2**0.5
    assert (s * 2).constant is None
    with pytest.raises(FormulaError, match="not a finite real number"):
        make("log", number(0))


@pytest.mark.parametrize("bad", [True, "s", None, 1j])
def test_operators_reject_other_types(bad):
    with pytest.raises(TypeError):
        s + bad


def test_comparisons_are_not_numbers_nor_truth_values():
    with pytest.raises(FormulaError, match=r"write where\(s > 0, 1, 0\)"):
        (s > 0) * s
    with pytest.raises(FormulaError, match="must be a comparison"):
        make("where", s, 1, 0)
    with pytest.raises(TypeError, match="depends on its symbols"):
        bool(s > 0)


def test_make_checks_the_operation():
    with pytest.raises(FormulaError):
        make("exp", s, s)
    with pytest.raises(FormulaError):
        make("gamma", s)


def test_operands_come_before_operations_at_any_depth():
    expr = s
    for _ in range(5_000):
        expr = make("tanh", expr)
    order = postorder(expr)
    assert len(order) == 5_001
    assert order[0] is s
    assert order[-1] is expr


def test_building_in_threads_gives_one_node():
    made = []
    work = lambda: made.extend(make("exp", s * k) for k in range(2, 300))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 298


numbers = st.one_of(
    st.integers(-20, 20), st.floats(-1e6, 1e6, allow_subnormal=False), st.sampled_from([1e-30, 1e22, 0.1])
)
atoms = st.one_of(numbers.map(number), st.sampled_from("smnij").map(symbol))


def _safely(op: str, args: list[Expr]) -> Expr:
    try:
        return make(op, *args)
    except FormulaError:  # a constant without a value, such as log(0)
        return args[-1]


def _grow(children: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    operations = st.sampled_from(sorted(set(OPERATIONS) - set(COMPARISONS) - {"where", "pow"}))
    plain = operations.flatmap(
        lambda op: st.tuples(
            st.just(op), st.lists(children, min_size=OPERATIONS[op].arity, max_size=OPERATIONS[op].arity)
        )
    )
    powers = st.tuples(children, st.integers(-9, 9) | st.sampled_from([0.5, -1.5])).map(
        lambda p: ("pow", [p[0], number(p[1])])
    )
    choices = st.tuples(st.sampled_from(COMPARISONS), children, children, children, children).map(
        lambda c: ("where", [_safely(c[0], list(c[1:3])), c[3], c[4]])
    )
    return st.one_of(plain, powers, choices).map(lambda built: _safely(*built))


@settings(max_examples=200, deadline=None)
@given(st.recursive(atoms, _grow, max_leaves=25))
def test_text_parses_back_to_the_same_expression(expr):
    assert parse(str(expr)) is expr
