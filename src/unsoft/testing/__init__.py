"""The contract battery: does a mechanism, ours or yours, keep every promise of unsoft on every engine?"""

from unsoft.testing.battery import check_mechanism
from unsoft.testing.report import Report

__all__ = ["Report", "check_mechanism"]
