"""Finding mechanisms by name."""

import sys

import pytest
import torch

from unsoft.formula import Formula
from unsoft.mechanisms import formulas, mechanisms, register, resolve
from unsoft.mechanisms.core import registry


@pytest.fixture
def own_registry(monkeypatch):
    """A copy that a test may fill."""
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_made", dict(registry._made))
    return registry


def test_a_name_gives_always_the_same_formula():
    assert resolve("cog") is resolve("cog")
    assert resolve("cog") is mechanisms()["cog"]
    assert resolve("polynomial") is mechanisms()["polynomial"]
    assert (
        resolve("polynomial")
        == resolve("polynomial()")
        == resolve(" polynomial( 3 ) ")
        == resolve("polynomial(3.0)")
    )
    assert resolve("polynomial(2)") != resolve("polynomial")


def test_a_formula_is_its_own_answer():
    formula = Formula("s")
    assert resolve(formula) is formula


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cogg",
            "mechanism: unknown name 'cogg'; did you mean 'cog'\\? \\(known: cog, cosformer, .*, tanh\\)",
        ),
        ("Softmax", "did you mean 'softmax'"),
        ("soft-max", "did you mean 'softmax'"),
        ("polynomal(3)", "did you mean 'polynomial'"),
        ("sofpick", "did you mean 'softpick'"),
        ("", "unknown name ''"),
        ("zzzzzz", "unknown name 'zzzzzz' \\(known: "),
        ("cog(2)", "cog takes no number in brackets"),
        ("polynomial(0)", "whole number from 1 to 64, not 0"),
        ("polynomial(65)", "whole number from 1 to 64"),
        ("polynomial(2.5)", "whole number from 1 to 64, not 2.5"),
        ("polynomial(1e999)", "whole number from 1 to 64"),
        ("polynomial(1e)", "'1e' in 'polynomial\\(1e\\)' is not a number"),
        ("polynomial(3,4)", "unknown name"),
        ("polynomial(__import__('os'))", "unknown name"),
        ("polynomial(3", "unknown name"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


@pytest.mark.parametrize("mechanism", [None, 3, b"cog", ["cog"], torch.exp])
def test_wrong_types(mechanism):
    with pytest.raises(TypeError, match="mechanism: expected a name or a Formula, not"):
        resolve(mechanism)


def test_register(own_registry):
    formula = Formula("s**2")
    register("square", formula)
    register("scaled", lambda k=2: Formula(f"{k}*s"))
    assert resolve("square") is formula
    assert str(resolve("scaled").weight) == "2*s"
    assert str(resolve("scaled(0.5)").weight) == "0.5*s"
    assert "square" in mechanisms()
    assert "scaled(k)" in str(mechanisms())


@pytest.mark.parametrize("name", ["cog", "polynomial"])
def test_a_name_is_given_once(own_registry, name):
    with pytest.raises(ValueError, match=f"a mechanism called '{name}' exists already"):
        register(name, Formula("s"))


@pytest.mark.parametrize("name", ["", "Cog", "my mechanism", "2nd", "a(b)", None])
def test_bad_names(own_registry, name):
    with pytest.raises(ValueError, match="name: expected"):
        register(name, Formula("s"))


def test_bad_mechanisms(own_registry):
    with pytest.raises(TypeError, match="mechanism: expected a Formula or a function"):
        register("text", "exp(s)")


def test_adding_a_file_is_enough(own_registry, monkeypatch, tmp_path):
    (tmp_path / "brandnew.py").write_text(
        "from unsoft.formula import Formula\n"
        "from unsoft.mechanisms.core.registry import builtin\n"
        "builtin('brandnew', Formula('abs(s)/n'))\n"
    )
    package = sys.modules["unsoft.mechanisms"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(own_registry, "_discovered", [])
    assert "brandnew" in mechanisms()
    assert str(resolve("brandnew").weight) == "abs(s)/n"
    del sys.modules["unsoft.mechanisms.brandnew"]
    delattr(package, "brandnew")


def test_the_catalogue_is_a_mapping_and_a_table():
    found = mechanisms()
    assert list(found) == sorted(found) and len(found) == 26
    assert len(formulas()) == 13 and all(isinstance(formula, Formula) for formula in formulas().values())
    with pytest.raises(KeyError):
        found["nothing"]
    assert found.get("polynomial(2)") is None  # only names are keys
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert len(lines) == 27
    assert lines[0].split("  ")[0] == "name"
    column = lines[0].index("row sum")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    assert next(line for line in lines if line.startswith("cog")).split("  ", 1)[1].split() == (
        ["yes", "in", "[-1,", "1]", "1", "no", "no", "no"]
    )


def test_compiled_code_may_ask_for_a_name():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def weights(s):
        return resolve("relu2").row(s)

    assert weights(torch.tensor([2.0, -1.0])).tolist() == [2.0, 0.0]
