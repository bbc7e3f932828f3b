"""Keep tests that need Triton out of the usual run."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = [HERE / "compiled", HERE / "interpreted"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the folders, since a module that is imported only to be skipped counts as a skipped test."""
    return True if collection_path in FOLDERS and "not gpu_check" in config.option.markexpr else None


# pytest imports every module for its doctests, and helpers import Triton. Test modules are imported and skip
# themselves with a reason.
if find_spec("triton") is None:
    collect_ignore = [
        str(path.relative_to(HERE))
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ]
