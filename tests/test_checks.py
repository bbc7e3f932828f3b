"""Checks of arguments: limits are inclusive, bools are not numbers, messages name caller and argument."""

import math

import pytest

from unsoft import checks


@pytest.mark.parametrize("value", [1, 5, 8])
def test_whole_numbers_within_the_limits_pass(value):
    assert checks.whole_number("f", "x", value, 1, 8) == value


@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), (2.0, TypeError), ("3", TypeError), (0, ValueError), (9, ValueError)],
)
def test_other_whole_numbers_raise(value, error):
    with pytest.raises(error, match=r"f: argument 'x' must be a whole number from 1 to 8, not "):
        checks.whole_number("f", "x", value, 1, 8)


@pytest.mark.parametrize("check", [checks.finite, checks.positive])
@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), ("1", TypeError), (None, TypeError), (math.nan, ValueError), (math.inf, ValueError)],
)
def test_numbers_must_be_finite(check, value, error):
    with pytest.raises(error, match="f: argument 'x' must be a"):
        check("f", "x", value)


def test_positive_excludes_zero():
    assert checks.positive("f", "x", 1) == 1.0
    for value in (0, -0.5):
        with pytest.raises(ValueError, match="must be above 0"):
            checks.positive("f", "x", value)


def test_one_of_suggests_a_close_name():
    assert checks.one_of("f", "x", "cog", ["cog", "relu"]) == "cog"
    with pytest.raises(ValueError, match="did you mean 'cog'"):
        checks.one_of("f", "x", "cgo", ["cog", "relu"])
    with pytest.raises(ValueError, match=r"must be 1 or 2, not 3$"):
        checks.one_of("f", "x", 3, [1, 2])
