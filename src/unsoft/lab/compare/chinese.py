"""Texts of the comparison page in Chinese; a text that is missing here stays English."""

from __future__ import annotations

import json
from pathlib import Path

CHINESE: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""English texts to Chinese ones; :func:`unsoft.lab.report.page.translator` explains "#", "{name}" and "~"."""
