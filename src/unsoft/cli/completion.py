"""Names for shell completion, read from files because importing torch on every Tab is too slow."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

_LAB = Path(__file__).parent.parent / "lab"
_TASK = re.compile(r'^    name: ClassVar\[str\] = "(.+)"$', re.MULTILINE)
_CLAIM = re.compile(r"^def _(\w+)\(results: Results\) -> Finding", re.MULTILINE)


def complete_mechanism(incomplete: str) -> list[str]:
    """Return names of mechanisms; modifiers before them are kept."""
    before, plus, start = incomplete.rpartition("+")
    files = pkgutil.iter_modules([str(_LAB.parent / "mechanisms")])
    names = (file.name.replace("_", "-") for file in files if not file.ispkg)
    return [before + plus + name for name in names if name.startswith(start)]


def complete_task(incomplete: str) -> list[str]:
    """Return names of tasks; of several with commas between them, the last is completed."""
    before, comma, start = incomplete.rpartition(",")
    return [before + comma + name for name in _starting(_in_files("tasks", _TASK), start)]


def complete_section(incomplete: str) -> list[str]:
    """Return names of sections of the comparison, and "claims"."""
    files = pkgutil.iter_modules([str(_LAB / "compare" / "sections")])
    return _starting([*(file.name for file in files), "claims"], incomplete)


def complete_claim(incomplete: str) -> list[str]:
    """Return names of claims: those that sections check, and those that studies decide."""
    checked = [name.replace("_", "-") for name in _in_files("compare/sections", _CLAIM)]
    return _starting([*checked, *(f"trained-{name}" for name in _studies())], incomplete)


def complete_study_or_task(incomplete: str) -> list[str]:
    """Return names of built-in studies and of tasks."""
    return sorted({*_starting(_studies(), incomplete), *complete_task(incomplete)})


def complete_model(incomplete: str) -> list[str]:
    """Return the models that have a short name."""
    return _starting(["minilm", "smollm2"], incomplete)


def _studies() -> list[str]:
    return [path.stem for path in (_LAB / "study" / "claims").glob("*.toml")]


def _in_files(folder: str, pattern: re.Pattern[str]) -> list[str]:
    return [name for path in (_LAB / folder).glob("*.py") for name in pattern.findall(path.read_text())]


def _starting(names: list[str], start: str) -> list[str]:
    return sorted(name for name in names if name.startswith(start))
