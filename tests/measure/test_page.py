"""docs/measures.md matches the docstrings and contains every measure."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from unsoft import measure

DOCS = Path(__file__).parents[2] / "docs"
NEW_MEASURE = '''"""Lopsidedness. The first half of the keys against the second."""

from unsoft.measure.rows import measure_rows


def lopsidedness(weights, mask=None):
    """Share of the mass on the first half of the keys.

        sum of |a| over j < S/2 / sum |a|

    Answers: does the row look back?

    Range: 0 to 1. Rows without mass: 0.

    >>> lopsidedness(torch.tensor([0.75, -0.25]))
    tensor(0.7500)
    """
    return measure_rows(lambda rows: rows.per_mass(rows.relative[..., :1].sum(-1)), weights, mask)
'''


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("measures_page", DOCS / "generate/measures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(script):
    assert (DOCS / "measures.md").read_text() == script.page(), "run: make docs"


def test_every_measure_is_on_the_page(script):
    functions = {name for name in measure.__all__ if inspect.isfunction(getattr(measure, name))}
    assert {item.name for group in script.groups() for item in group.entries} == functions


def test_a_new_measure_needs_one_file_and_one_import(script, monkeypatch):
    module = ModuleType("unsoft.measure.lopsided")
    exec(NEW_MEASURE, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(measure, "lopsidedness", module.lopsidedness, raising=False)
    monkeypatch.setattr(measure, "__all__", [*measure.__all__, "lopsidedness"])
    assert measure.lopsidedness(torch.tensor([[3.0, -1.0]])).tolist() == [0.75]
    assert "### lopsidedness" in script.page() and "## Lopsidedness" in script.page()


def test_docstrings_must_have_every_part(script):
    def incomplete():
        """A summary.

            a formula

        >>> 1
        1
        """

    with pytest.raises(ValueError, match="incomplete: its docstring has no Range, Answers"):
        script.entry(incomplete)


def test_all_is_complete_and_sorted():
    assert measure.__all__ == sorted(measure.__all__)
    public = {
        name for name, x in vars(measure).items() if not name.startswith("_") and not inspect.ismodule(x)
    }
    assert set(measure.__all__) == public
