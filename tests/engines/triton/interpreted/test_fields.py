"""Fields of queries and keys in the strict interpreter, against attention written out in plain torch."""

import pytest

from tests.engines import test_fields as fields

pytestmark = pytest.mark.gpu_check
SMALL = {
    "plain": ({"length": 20, "keys": 24}, None, False),
    "causal": ({"length": 20, "keys": 20}, None, True),
    "fields of key heads": ({"length": 20, "keys": 20, "field_heads": fields.HK}, None, True),
    "few queries": ({"length": 3, "keys": 70}, None, "lower_right"),
    "one query, fields of key heads": ({"length": 1, "keys": 70, "field_heads": fields.HK}, None, False),
    "bool mask": ({"length": 20, "keys": 20}, "bool", False),
    "float mask": ({"length": 20, "keys": 20}, "float", True),
}


@pytest.mark.parametrize("case", SMALL)
def test_output_and_gradients(case, monkeypatch):
    monkeypatch.setattr(fields, "CASES", SMALL)
    fields.test_output_and_gradients("triton", case)


def test_a_field_that_is_not_finite():
    fields.test_a_field_that_is_not_finite_makes_the_rows_that_see_it_nan("triton")
