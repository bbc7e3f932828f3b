"""The wheel contains the C++ sources and the typing marker, and every dependency is pinned."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest

import unsoft

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_FOLDER = ROOT / "src/unsoft/engines/native/kernel"
KERNEL = sorted(str(path.relative_to(_FOLDER)) for path in _FOLDER.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with the wheel and the source archive, built as pip builds them."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    return folder


def test_wheel_holds_the_kernel_and_the_typing_marker(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"unsoft/engines/native/kernel/{file}" for file in KERNEL} <= names
    assert "unsoft/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/")) or name.endswith(".pyc")]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_archive_can_be_built_and_tested(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/unsoft/engines/native/kernel/{file}" for file in KERNEL} <= names
    assert {
        "README.md",
        "LICENSE",
        "constraints.txt",
        "tests/test_package.py",
        "docs/mechanisms.md",
        "docs/site/conf.py",
        "examples/01_attention.py",
        "Makefile",
        ".ci/run",
    } <= names


def test_wheel_has_the_version_of_the_module(built):
    assert [wheel.name.split("-")[1] for wheel in built.glob("*.whl")] == [unsoft.__version__]


SMOKE = """
import importlib.util, torch, unsoft
q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
exact = unsoft.attention(q.double(), k.double(), v.double(), "cog", is_causal=True, engine="dense")
ours = unsoft.attention(q, k, v, "cog", is_causal=True)
assert torch.allclose(ours.double(), exact, atol=1e-5)
ours.sum().backward()
assert unsoft.testing.check_mechanism("softpick", quick=True, only=["edges", "decoding"]).ok
more = ("transformers", "altair", "sklearn", "ray", "mypy", "sphinx")
extra = [name for name in more if importlib.util.find_spec(name)]
assert not extra, f"the core pulls {extra}"
print(unsoft.__version__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_installs_into_an_empty_environment(built, kind, tmp_path):
    """Some minutes: torch is installed, too."""
    (package,) = built.glob(kind)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pins = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", pins, package], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert run([python, "-W", "error", "-c", SMOKE]).stdout.split() == [unsoft.__version__]
    assert "softpick" in run([tmp_path / "venv/bin/unsoft", "list"]).stdout


def test_every_direct_dependency_is_pinned():
    wanted = [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    weights = re.search(r"^WEIGHTS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} | set(weights) == set(pins)


def test_no_registry_address_is_written_down():
    names = ("pyproject.toml", "constraints.txt", "Makefile", "README.md", ".ci/run", "CONTRIBUTING.md")
    for file in (*(ROOT / name for name in names), *(ROOT / ".github" / "workflows").glob("*.yml")):
        assert not re.search(r"index-url|find-links|://[^\s)]*(pypi|simple|whl)", file.read_text()), file
