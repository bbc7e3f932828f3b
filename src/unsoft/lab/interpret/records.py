"""Columns of tables, and files, that inspection, neurons and steering share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsoft.files import write_csv, write_json, write_whole

SCHEMA = 1


@dataclass(frozen=True)
class TableColumn:
    """A measure with its title and an explanation, for tables and pages."""

    name: str
    title: str
    help: str


def write_files(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write data as JSON, records as CSV, or text, by the ending of each file's name; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, content)
        elif name.endswith(".csv"):
            write_csv(folder / name, content)
        else:
            write_whole(folder / name, content.encode())
    return [folder / name for name in files]
