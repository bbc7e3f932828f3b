"""The command, in a process of its own as a user runs it, or in this one,
which saves importing torch again."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

import unsoft
from tests.conftest import HANG
from unsoft.cli import main
from unsoft.cli.app import application

SCRIPT = Path(sys.executable).parent / "unsoft"


def every_command(command=None, words=()):
    """The words and the command, of all of them and of their groups."""
    command = command or get_command(application())
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A compiler cache of its own, not there yet."""
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command() -> list[str]:
    """The console script where it is installed, else the module behind it."""
    return [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "unsoft.cli"]


@pytest.fixture
def environment(cache) -> dict[str, str]:
    """This very source, whatever is installed."""
    return os.environ | {"PYTHONPATH": str(Path(unsoft.__file__).parents[1])}


@pytest.fixture
def run(command, environment):
    """Runs the command in a process of its own."""

    def run(*arguments: str, **variables: str) -> Done:
        env = environment | variables
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=env, timeout=HANG)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_here(cache, monkeypatch, capsys):
    """Runs the same function as the console script in this process."""

    def run_here(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["unsoft", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return Done(stopped.value.code, *capsys.readouterr())

    return run_here
