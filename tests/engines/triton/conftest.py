"""What of these folders is read: nothing that needs Triton in the usual run, which leaves such tests out."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = [HERE / "compiled", HERE / "interpreted"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module that is read only to be skipped, for want of Triton, would count as a skipped test."""
    return True if collection_path in FOLDERS and "not gpu_check" in config.option.markexpr else None


# pytest reads every module for its doctests; helpers import Triton when they are read. A test itself is read,
# and skipped with a reason.
if find_spec("triton") is None:
    collect_ignore = [
        str(path.relative_to(HERE))
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ]
