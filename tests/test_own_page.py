"""docs/own.md, followed word for word: its file, its Python, and (slow) every command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from unsoft.modules import registry

PAGE = (Path(__file__).parents[1] / "docs" / "own.md").read_text()
FILE, *REST = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    (unsoft .*)$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's folder with mine.py in it."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_is_a_mechanism(folder, monkeypatch, capsys):
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    known = {}
    check = next(block for block in REST if "check_mechanism" in block)
    theory = next(block for block in REST if "hijack_share" in block)
    exec(check.replace("quick=True", 'quick=True, engines=["dense"], only="edges"') + theory, known)
    printed = capsys.readouterr().out
    assert "signed=True" in printed and "row_sum='in [-1, 1]'" in printed and "continuous=True" in printed
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_the_page_goes_from_formula_to_training():
    verbs = [command.split()[1] for command in COMMANDS]
    assert verbs == ["try", "theory", "compare", "train", "study"]
    assert any("unsoft.hf.swap" in block for block in REST)


@pytest.mark.slow
@pytest.mark.pretrained
def test_every_command_of_the_page_runs(folder):
    """With few steps of training: the commands are the page's, the results are not."""
    (folder / "all.py").write_text("\n".join(REST))
    subprocess.run([sys.executable, "all.py"], check=True)
    for command in COMMANDS:
        command += {"train": " --steps 3", "study": " --set steps=3"}.get(command.split()[1], "")
        subprocess.run(
            command.replace("unsoft", f"{sys.executable} -m unsoft.cli", 1), shell=True, check=True
        )
    assert (folder / "report" / "index.html").exists() and (folder / "study" / "study.db").exists()


def test_the_section_on_fields_runs(monkeypatch):
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    known = {}
    for block in REST:
        if "fields" in block:
            exec(block, known)
    assert known["out"].shape == (2, 8, 100, 64)
    assert known["layer"](known["q"], known["k"], known["v"]).shape == (2, 8, 100, 64)
