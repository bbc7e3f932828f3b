"""Fixtures that run the command: in a new process as a user does, or in this one, which is faster."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

import unsoft
from tests.conftest import HANG
from unsoft.cache_dir import cache_directory, make_private_folder
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
def own_cache(tmp_path_factory) -> Path:
    """A cache folder for all commands: never that of the user who runs the tests."""
    return tmp_path_factory.mktemp("cache")


def share_kernels(source: Path, target: Path) -> None:
    """Link or copy compiled kernels, whose names are digests of their sources and contents."""
    make_private_folder(target)
    for file in source.glob("*.so"):
        if (target / file.name).exists():
            continue
        with suppress(FileExistsError):  # another worker was faster
            try:
                os.link(file, target / file.name)
            except OSError:  # on another filesystem
                with tempfile.TemporaryDirectory(dir=target) as folder:
                    os.replace(shutil.copy2(file, folder), target / file.name)


@pytest.fixture(autouse=True)
def shared_cache(own_cache, monkeypatch):
    """Kernels are shared with all other tests, so that each is compiled once."""
    others = cache_directory()
    share_kernels(others, own_cache)
    monkeypatch.setenv("UNSOFT_CACHE_DIR", str(own_cache))
    yield
    share_kernels(own_cache, others)


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
