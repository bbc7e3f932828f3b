"""Helpers of these tests import Triton when they are read: without it there is nothing in them to collect."""

from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent

# pytest reads every module for its doctests; a test itself is read, and skipped with a reason.
if find_spec("triton") is None:
    collect_ignore = [
        str(path.relative_to(HERE))
        for folder in ("compiled", "interpreted")
        for path in (HERE / folder).rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ]
