"""The notebooks of the documentation are stored without outputs, and every cell runs."""

import json
from pathlib import Path

import pytest

from unsoft.modules import registry

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_they_are_stored_without_outputs():
    assert {notebook.stem for notebook in NOTEBOOKS} == {"measure", "own", "use"}
    for notebook in NOTEBOOKS:
        cells = code_cells(notebook)
        assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells), notebook.name
        assert all(len(cell["source"]) <= 20 for cell in cells), "cells are short"


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_cells_run_in_order(notebook, monkeypatch, capsys, tmp_path):
    registry.discover()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # one of them registers a name
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook)):
        exec(compile("".join(cell["source"]), f"{notebook.name}[{number}]", "exec"), namespace)
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "a notebook leaves nothing behind"
