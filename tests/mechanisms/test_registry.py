"""Finding mechanisms by name."""

import sys

import pytest
import torch

import unsoft
from docs.generate.mechanisms import mechanism_page
from unsoft.formula import Formula
from unsoft.lab.compare.candidate import candidates_of
from unsoft.mechanisms import formulas, mechanisms, register, resolve, unregister
from unsoft.modules import plugins, registry
from unsoft.testing.definitions import definition_of


@pytest.fixture
def own_registry(monkeypatch):
    """A copy that a test may fill."""
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_resolved", dict(registry._resolved))
    monkeypatch.setattr(plugins, "_homes", dict(plugins._homes))
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
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
            "mechanism: unknown name 'cogg'; did you mean 'cog'\\?$",
        ),
        ("Softmax", "did you mean 'softmax'"),
        ("soft-max", "did you mean 'softmax'"),
        ("polynomal(3)", "did you mean 'polynomial'"),
        ("sofpick", "did you mean 'softpick'"),
        ("", "unknown name ''"),
        ("nosuch", "unknown name 'nosuch'; unsoft.mechanisms\\(\\) lists them"),
        ("zzzzzz", "unknown name 'zzzzzz'; unsoft.mechanisms\\(\\) lists them"),
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


@pytest.mark.parametrize("name", ["", "Cog", "my mechanism", "2nd", "a(b)", None, "a" * 65])
def test_bad_names(own_registry, name):
    with pytest.raises(ValueError, match="name: expected"):
        register(name, Formula("s"))


def test_the_longest_name(own_registry):
    register("a" * 64, Formula("s"))
    assert resolve("a" * 64).weight == Formula("s").weight


def test_bad_mechanisms(own_registry):
    with pytest.raises(TypeError, match="mechanism: expected a Formula, a function"):
        register("text", "exp(s)")
    with pytest.raises(TypeError, match=r"must be a subclass of unsoft\.nn\.Mechanism"):
        register("plain", torch.nn.Linear)
    with pytest.raises(TypeError, match="unknown promise 'rowsum'"):
        register("mine", Nearest, rowsum="1")
    with pytest.raises(TypeError, match="are for classes"):
        register("mine", Formula("s"), row_sum="free")


class Nearest(unsoft.nn.WrittenOut):
    """All weight on the key with the largest logit, times a learned number per head."""

    def __init__(self, layer_spec, power: float = 1.0):
        super().__init__(layer_spec)
        self.size = torch.nn.Parameter(torch.full((layer_spec.heads, 1, 1), float(power)))

    def weights(self, logits, visible):
        best = (
            logits.masked_fill(~visible, -torch.inf).argmax(-1, keepdim=True)
            if logits.shape[-1]
            else logits.long()
        )
        return torch.zeros_like(logits).scatter(-1, best, 1.0) * self.size


def test_a_module_of_your_own_works_by_name_everywhere(own_registry):
    register("nearest", Nearest, argument="power", signed=False, sparse=True, continuous=False)
    assert mechanisms()["nearest"].summary.startswith("All weight on the key")
    assert "nearest(power)" in str(mechanisms())
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    out, weights = unsoft.attention(q, k, v, "nearest(0.5)", is_causal=True, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.full((2, 4, 9), 0.5))
    torch.testing.assert_close(out, weights @ v)
    assert not unsoft.testing.check_mechanism("nearest", only=["decoding", "causality", "masking"]).failures
    layer = unsoft.nn.MultiheadAttention(16, 2, mechanism="gated+nearest", batch_first=True)
    assert layer(*(torch.randn(1, 5, 16) for _ in range(3)))[0].shape == (1, 5, 16)
    with pytest.raises(ValueError, match="writes its weights out"):
        unsoft.attention(q, k, v, "nearest", engine="native")
    unregister("nearest")
    with pytest.raises(ValueError, match="unknown name"):
        resolve("nearest(0.5)")
    with pytest.raises(ValueError, match="was not given by"):
        unregister("cog")


def test_promises_of_a_module_are_held_against_its_weights(own_registry):
    register("nearest", Nearest, argument="power", signed=False, sparse=False, row_sum="in [0, 0.5]")
    with pytest.raises(unsoft.errors.MechanismError, match="promises"):
        unsoft.testing.check_mechanism("nearest", only="promises")


def test_a_saved_model_says_which_module_to_import(own_registry, tmp_path):
    transformers = pytest.importorskip("transformers")
    register("nearest", Nearest, argument="power", signed=False, sparse=True, continuous=False)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = unsoft.hf.swap(transformers.LlamaForCausalLM(config).eval(), "gated+nearest(2)")
    model.save_pretrained(tmp_path)
    ids = torch.arange(4)[None]
    torch.testing.assert_close(unsoft.hf.load(tmp_path)(ids).logits, model(ids).logits)
    unregister("nearest")
    with pytest.raises(
        ValueError, match=f"'nearest' is not registered; the module '{__name__}'.*import it first"
    ):
        unsoft.hf.load(tmp_path)


class Entry:
    """What importlib.metadata gives for an entry point."""

    def __init__(self, name, load):
        self.name, self.value, self.module, self.load = name, f"package:{name}", "package", load


def test_packages_bring_mechanisms_by_entry_points(own_registry, monkeypatch):
    def broken():
        raise ImportError("no module named 'gone'")

    entries = [
        Entry("square", lambda: Formula("s**2")),
        Entry("gone", broken),
        Entry("nearest", lambda: Nearest),
    ]
    monkeypatch.setattr(own_registry, "_all_files_imported", False)
    monkeypatch.setattr(
        plugins.metadata, "entry_points", lambda group: entries if group == "unsoft.mechanisms" else []
    )
    with pytest.warns(
        unsoft.errors.PluginWarning,
        match="'gone' .* could not be loaded: ImportError: no module named 'gone'",
    ):
        assert {"square", "nearest"} <= set(mechanisms())
    assert plugins.foreign_homes("gated+square") == {"square": "package"}
    assert unsoft.mechanism("nearest", heads=2, head_dim=4).size.shape == (2, 1, 1)


BRANDNEW = """brandnew: a weight that grows with the size of the logit, whatever its sign.

    a_j = |s_j| / n

Strengths: it sees opposed keys. Limitations: it cannot tell them from similar ones.

>>> import torch
>>> BRANDNEW.row(torch.tensor([2.0, -4.0]))
tensor([1., 2.])
"""
FILE = f'''"""{BRANDNEW}"""

from unsoft.formula import Formula
from unsoft.modules.registry import builtin

BRANDNEW = Formula("abs(s)/n", name="brandnew", summary="the size of the logit")


def definition(x):
    return (x.s + x.bias).abs() / x.n


builtin("brandnew", BRANDNEW)
'''
MODULE = '''"""brandnew-module: the mean of the values that a row sees.

    a_ij = 1 / n

Strengths: none. Limitations: it cannot look.
"""

from unsoft.formula.analysis import ONE, Properties
from unsoft.modules.definition import over_sum
from unsoft.modules.registry import family
from unsoft.modules.rows import WrittenOut


class Mean(WrittenOut):
    def weights(self, logits, visible):
        return visible.to(logits.dtype) / visible.sum(-1, keepdim=True).clamp(min=1)


def definition(call, layer):
    return over_sum(call.change(bias=0 * call.bias), 1.0 + 0 * call.logits)


family(
    "brandnew-module",
    Mean,
    summary="the mean",
    properties=Properties(
        signed=False, row_sum=ONE, l1=ONE
    ),
)
'''


@pytest.fixture
def two_files_more(own_registry, monkeypatch, tmp_path):
    """A formula and a module, dropped into the folder."""
    (tmp_path / "brandnew.py").write_text(FILE)
    (tmp_path / "brandnew_module.py").write_text(MODULE)
    package = sys.modules["unsoft.mechanisms"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(own_registry, "_all_files_imported", False)
    yield
    for name in ("brandnew", "brandnew_module"):
        del sys.modules[f"unsoft.mechanisms.{name}"]
        delattr(package, name)


def test_adding_a_file_is_enough(own_registry, two_files_more):
    """It is listed, documented, checked against its definition, and compared,
    with no other edit."""
    assert {"brandnew", "brandnew-module"} <= set(mechanisms())
    assert str(resolve("brandnew").weight) == "abs(s)/n"
    page = mechanism_page()
    assert (
        "## brandnew\n" in page
        and "## brandnew-module\n" in page
        and "The size of" not in page.split("## brandnew")[0]
    )
    assert not resolve("brandnew").properties.signed
    for name in ("brandnew", "brandnew-module"):
        assert definition_of(name) is not None
        report = unsoft.testing.check_mechanism(name, only=["promises", "causality"])
        assert not report.failures and report.rows
        (subject,) = candidates_of([name], [])
        weights = subject.weights(torch.randn(1, 3, 16), torch.randn(1, 5, 16))
        assert weights.shape == (1, 3, 5) and (weights >= 0).all()


def test_the_catalogue_is_a_mapping_and_a_table():
    actual = mechanisms()
    assert list(actual) == sorted(actual) and len(actual) == len(set(actual))
    assert 0 < len(formulas()) < len(actual) and all(
        isinstance(formula, Formula) for formula in formulas().values()
    )
    with pytest.raises(KeyError):
        actual["nothing"]
    assert actual.get("polynomial(2)") is None  # only names are keys
    lines = str(actual).splitlines()
    assert repr(actual) == str(actual)
    assert len(lines) == len(actual) + 1
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


@pytest.mark.parametrize("name", [*unsoft.mechanisms(), "gated+gpam", "magnitude+fox"])
def test_an_option_that_there_is_not_is_named(name):
    with pytest.raises(TypeError, match=r"^mechanism: .* has no option 'nonsense'"):
        unsoft.mechanism(name, heads=4, head_dim=4, nonsense=1)
    unsoft.mechanism(name, heads=4, head_dim=4)


def test_options_that_there_are_stand_beside_one_that_there_is_not():
    with pytest.raises(TypeError, match="'gpam' has no option 'tie'; it has .*, tied$"):
        unsoft.mechanism("gpam", heads=4, head_dim=4, tie=True)
