"""The test suite for mechanisms: :func:`check_mechanism` tests built-in ones and yours on every engine."""

from unsoft.testing.battery import check_mechanism
from unsoft.testing.report import Report

__all__ = ["Report", "check_mechanism"]
