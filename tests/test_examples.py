"""Every script of examples/ runs, is numbered without gaps, and fits on a page."""

import runpy
from pathlib import Path

import pytest

from unsoft.modules import registry

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_runs_and_says_what_it_found(script, monkeypatch, capsys, tmp_path):
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # one of them registers a name
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_they_are_numbered_and_short():
    assert [int(script.name[:2]) for script in SCRIPTS] == list(range(1, len(SCRIPTS) + 1))
    assert len(SCRIPTS) >= 8
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) < 60, script.name
        assert text.startswith('"""') and f"python examples/{script.name}" in text, script.name
