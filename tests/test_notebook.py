"""What notebooks and editors show: names, formulas, tables and curves."""

import json
import sys
import types
from typing import get_args

import pytest

import unsoft
from unsoft.formula.display import CURVE_LOGITS, curve, other_logits, svg_plot, text_plot
from unsoft.lab.interpret.inspection.result import Inspection
from unsoft.modules.names import MechanismName

HEADS = [{"layer": 0, "head": h, "sink_share": h / 4} for h in range(2)]
INSPECTION = Inspection("tiny<1>", 1, 8, HEADS, [], [], [])


def test_editors_complete_every_mechanism_and_no_imports():
    assert list(get_args(MechanismName)) == list(unsoft.mechanisms()), "update unsoft/modules/names.py"
    public = [name for name in dir(unsoft) if not name.startswith("_")]
    assert public == sorted(unsoft.__all__)


def test_a_formula_shows_its_mathematics_and_its_curve():
    cog = unsoft.mechanisms()["cog"]
    assert cog._repr_latex_() == rf"$\displaystyle {cog.latex()}$"
    shown = cog._repr_html_()
    assert "<svg" in shown and "<strong>cog</strong>" in shown
    hostile = unsoft.Formula("where(s < 0, 0, s)/n", name="<b>")._repr_html_()
    assert "<b>" not in hostile and "&lt;b&gt;" in hostile and "s &lt; 0" in hostile
    rbf = unsoft.Formula("exp(2*s - k2)", normalise="sum")  # its weight depends on more than the logit
    assert "<svg" not in rbf._repr_html_() and "k2" in rbf._repr_html_()
    chart = json.loads(cog.plot(unsoft.mechanisms()["softmax"]).to_json())
    assert {row["mechanism"] for row in chart["data"]["values"]} == {"cog", "softmax"}


def test_a_curve_is_the_weight_of_one_key_among_others():
    values = curve(unsoft.mechanisms()["softmax"].row)
    total = other_logits().exp().sum().item()
    for s, weight in zip(CURVE_LOGITS, values, strict=True):
        exp = 2.718281828459045**s
        assert weight == pytest.approx(exp / (exp + total), rel=1e-12)
    lines = text_plot(values, columns=20, lines=5).splitlines()
    assert len(lines) == 6 and lines[0].startswith(f"{max(values):>6.3g}") and lines[-1].endswith("6  logit")
    assert svg_plot(values, "a").count(",") == len(values)


def test_tables_need_pandas_and_say_so(monkeypatch):
    assert json.loads(INSPECTION.plot().to_json())["encoding"]["color"]["field"] == "sink_share"
    with pytest.raises(ValueError, match="must be 'sink_share', not 'sink'"):
        INSPECTION.plot("sink")
    tables = [unsoft.mechanisms(), unsoft.Formula("s/n"), INSPECTION]
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in tables:
        with pytest.raises(ImportError, match="pip install pandas"):
            table.to_pandas()
    # A stand-in: pandas is optional, so the tests do without it.
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    assert tables[0].to_pandas() == unsoft.mechanisms().rows()
    assert tables[1].to_pandas()[0].keys() == {"logit", "weight"} and tables[2].to_pandas() == HEADS
    assert "<td>cog</td>" in tables[0]._repr_html_() and "tiny&lt;1&gt;" in INSPECTION._repr_html_()
