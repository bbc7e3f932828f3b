"""Fixtures that run the command: in a new process as a user does, or in this one, which is faster."""

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
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory) -> Path:
    """A folder for the compiled kernels of all commands, so that each is compiled once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def shared_cache(compiled_once, monkeypatch) -> None:
    """Never use the cache of the user who runs the tests."""
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(compiled_once))


@pytest.fixture
def cache(shared_cache, tmp_path, monkeypatch) -> Path:
    """A new compiler cache, for tests that look into it or clear it; its folder does not exist yet."""
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command() -> list[str]:
    """The console script where it is installed, else the module behind it."""
    return [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "unsoft.cli"]


@pytest.fixture
def environment(shared_cache) -> dict[str, str]:
    """Variables with which a new process imports this source, whatever is installed."""
    return os.environ | {"PYTHONPATH": str(Path(unsoft.__file__).parents[1])}


@pytest.fixture
def run(command, environment):
    """Run the command in a new process: for tests of the process. Others use ``run_here``."""

    def run(*arguments: str, **variables: str) -> Done:
        env = environment | variables
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=env, timeout=HANG)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_here(shared_cache, monkeypatch, capsys):
    """Run the function behind the console script in this process."""

    def run_here(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["unsoft", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return Done(stopped.value.code, *capsys.readouterr())

    return run_here
