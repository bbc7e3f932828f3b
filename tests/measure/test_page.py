"""docs/measures.md says what the docstrings say, and every measure is on it."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from unsoft import measure

DOCS = Path(__file__).parents[2] / "docs"


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


def test_what_a_docstring_must_hold(script):
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
