"""What CI runs at the end: a Triton that cannot be had is no failure, a failed test is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "gpu-small"


@pytest.mark.parametrize(
    ("pip", "tests", "code", "says"),
    [
        ("exit 0", "exit 0", 0, "gpu-small: passed"),
        ("exit 0", "exit 1", 1, ""),
        ("exit 0", '[ "${TRITON_INTERPRET:-0}" = 1 ]', 1, ""),
        ("exit 0", '[ "${TRITON_INTERPRET:-0}" = 0 ]', 1, ""),
        (
            "echo first; echo 'ERROR: no network' >&2; exit 1",
            "exit 1",
            0,
            "gpu-small: skipped, Triton could not be installed: ERROR: no network",
        ),
    ],
    ids=["both pass", "both fail", "compiled fails", "interpreted fails", "no Triton"],
)
def test_small_gpu_tests(tmp_path, pip, tests, code, says):
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, body in (("pip", pip), ("pytest", tests)):
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    found = subprocess.run([tmp_path / ".ci" / "gpu-small"], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (code, says)
