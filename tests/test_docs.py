"""Pages and pictures made from the library are those that the library makes today."""

import importlib.util
import json
import re
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import torch

import unsoft
from unsoft.cli.mechanism_page import mechanism_page
from unsoft.mechanisms import formulas
from unsoft.tasks import registry

DOCS = Path(__file__).parents[1] / "docs"


def picture_script():
    spec = importlib.util.spec_from_file_location("picture", DOCS / "picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mechanism_page_is_up_to_date():
    assert (DOCS / "mechanisms.md").read_text() == mechanism_page(), "run: make docs"


def test_picture_is_up_to_date():
    script = picture_script()
    drawn = script.picture(script.measured_ratios(script.RECORD))
    assert script.PICTURE.read_text() == drawn, "run: make docs"


def test_picture_shows_every_mechanism():
    names = [
        text.text
        for text in xml.etree.ElementTree.parse(DOCS / "mechanisms.svg").iter()
        if text.get("class") == "name"
    ]
    assert names == list(formulas()), "run: make docs"


def test_picture_plots_what_the_formula_says():
    script = picture_script()
    weights = script.moving_weights(unsoft.mechanisms()["cog"])
    others = torch.tensor(script.OTHERS, dtype=torch.float64).abs().exp().sum()
    size = script.LOGITS.abs().exp()
    assert torch.allclose(weights, script.LOGITS.sign() * size / (size + others))


def test_picture_reads_the_benchmark_record(tmp_path):
    record = tmp_path / "results.json"
    row = {"group": "main", "engine": "native", "mode": "training", "mechanism": "cog", "ratio": 0.5}
    rows = [row, row | {"ratio": 2.0}, row | {"engine": "tiled"}, row | {"mechanism": "relu", "ratio": None}]
    record.write_text(json.dumps({"timings": rows}))
    assert picture_script().measured_ratios(record) == {"cog": 1.0}
    assert "1.00x" in picture_script().picture({"cog": 1.0})
    assert picture_script().measured_ratios(tmp_path / "none.json") == {}


def test_training_page_lists_every_task_and_runs(monkeypatch):
    page = (DOCS / "training.md").read_text()
    listed = page.partition("<!-- tasks -->\n")[2].partition("<!-- end -->")[0]
    assert listed == "".join(f"| {name} | {kind.tells} |\n" for name, kind in unsoft.tasks.tasks().items())
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # the page registers a task
    for number, source in enumerate(page.split("```python\n")[1:]):
        module = types.ModuleType(f"training_page_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
        exec(compile(source.partition("```")[0], "training.md", "exec"), module.__dict__)


ARCHITECTURE = (DOCS / "architecture.md").read_text()
SOURCE = Path(unsoft.__file__).parent


def source_of(place: str) -> Path:
    return SOURCE / "engines" / "native" / place if place.startswith("kernel/") else SOURCE / place


def test_architecture_names_files_that_are_there():
    places = set(re.findall(r"`([\w/]+(?:\.py|\.h|/))`", ARCHITECTURE))
    assert len(places) > 25
    assert not [place for place in places if not source_of(place).exists()]


def test_architecture_names_functions_that_are_there():
    pairs = re.findall(r"`([\w.]+)` (?:in|\()\s*`([\w/]+\.(?:py|h))`", " ".join(ARCHITECTURE.split()))
    assert len(pairs) > 20
    for name, place in pairs:
        text = source_of(place).read_text()
        assert re.search(rf"\b(?:def|class|static bool) {name.split('.')[0]}\b", text), (
            f"{name} is not in {place}"
        )


def test_architecture_shows_every_room():
    rooms = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix in ("", ".py") and not path.name.startswith("__")
    }
    drawn = ARCHITECTURE.partition("```mermaid")[2].partition("```")[0]
    assert not [room for room in rooms - {"errors", "files"} if not re.search(rf"\b{room}\b", drawn)]


def test_walks_of_architecture_run():
    tensor, token, number = (part.partition("```")[0] for part in ARCHITECTURE.split("```python\n")[1:])
    compile(number, "architecture.md", "exec")  # measures for a minute
    for walk in (tensor, token):
        exec(compile(walk, "architecture.md", "exec"), {"__name__": "walk"})
