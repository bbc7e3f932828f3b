"""Columns of tables, roles and files that inspection, neurons and steering share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import unsoft
from unsoft.checks import one_of
from unsoft.files import write_csv, write_json, write_whole

SCHEMA = 1


@dataclass(frozen=True)
class TableColumn:
    """A measure with its title and an explanation, for tables and pages."""

    name: str
    title: str
    help: str


class Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def role_called(role: R | str, roles: Sequence[R]) -> R:
    """Return a role by its name; raise ValueError if there is none."""
    if not isinstance(role, str):
        return role
    known = {one.name: one for one in roles}
    return known[one_of("ranked", "role", role, known)]


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import torch
    import transformers

    return {module.__name__: module.__version__ for module in (unsoft, torch, transformers)}


def write_files(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write data as JSON, records as CSV, or text, by the ending of each file's name; return the paths."""
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, content)
        elif name.endswith(".csv"):
            write_csv(folder / name, content)
        else:
            write_whole(folder / name, content.encode())
    return [folder / name for name in files]
