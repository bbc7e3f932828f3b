"""Runs a measurement in a fresh process, which is the only place where start-up and peak memory can be
seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import unsoft

_TIMEOUT_SECONDS = 600


class ProbeError(RuntimeError):
    """The fresh process failed; the message is its last line of complaint."""


def run_probe(*command: str, **environment: str) -> dict[str, Any]:
    """The JSON object that ``python <command>`` prints, with this very package on its path."""
    source = str(Path(unsoft.__file__).parents[1])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ProbeError(complaint[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found
