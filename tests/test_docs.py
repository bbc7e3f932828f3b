"""Pages and pictures made from the library are those that the library makes today."""

import importlib
import json
import re
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

import unsoft
from docs.generate import converting, evidence, mechanisms, picture
from unsoft.mechanisms import formulas

DOCS = Path(__file__).parents[1] / "docs"


def test_mechanism_page_is_up_to_date():
    assert (DOCS / "mechanisms.md").read_text() == mechanisms.mechanism_page(), "run: make docs"


def test_picture_is_up_to_date():
    script = picture
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
    script = picture
    weights = script.moving_weights(unsoft.mechanisms()["cog"])
    others = torch.tensor(script.OTHERS, dtype=torch.float64).abs().exp().sum()
    size = script.LOGITS.abs().exp()
    assert torch.allclose(weights, script.LOGITS.sign() * size / (size + others))


def test_picture_shows_training_times_of_the_scoreboard(tmp_path):
    record = tmp_path / "choose.json"
    board = [
        {"mechanism": "cog", "cells": {"training": {"value": 0.5}}},
        {"mechanism": "relu", "cells": {"training": {"value": None}}},
        {"mechanism": "sinh", "cells": {}},
    ]
    record.write_text(json.dumps({"scoreboard": board}))
    assert picture.measured_ratios(record) == {"cog": 0.5}
    assert "0.50x" in picture.picture({"cog": 0.5})


def test_page_of_tasks_lists_every_task():
    page = (DOCS / "tasks.md").read_text()
    listed = page.partition("<!-- tasks -->\n")[2].partition("<!-- end -->")[0]
    assert listed == "".join(
        f"| {name} | {kind.tells} |\n" for name, kind in unsoft.lab.tasks.tasks().items()
    )


@pytest.mark.parametrize("name", ["tasks.md", "training.md", "repulsion.md"])
def test_pages_about_training_run(monkeypatch, name):
    page = (DOCS / name).read_text()
    registry = importlib.import_module("unsoft.lab.tasks.task")
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # the page registers a task
    for number, source in enumerate(page.split("```python\n")[1:]):
        module = types.ModuleType(f"training_page_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
        exec(compile(source.partition("```")[0], name, "exec"), module.__dict__)


def test_evidence_page_shows_its_record():
    assert evidence.page() == (DOCS / "evidence.md").read_text(), "run: python docs/generate/evidence.py"


def test_converting_page_shows_its_record():
    script = converting
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run: python docs/generate/converting.py"


def test_converting_page_says_what_is_in_the_record():
    script = converting
    spec = {"batch": 2, "tokens": 10, "held_out": 100, "fit_tokens": 70, "match_steps": 3, "tune_steps": 2}
    found = {
        "spec": spec,
        "perplexity": {"original": 10.0, "swapped": 5000.0, "fitted": 60.0, "matched": 40.0, "tuned": 20.0},
        "layer_errors": {"swapped": [1.0, 3.0], "fitted": [0.5, 0.7], "matched": [0.5, 0.5]},
        "cpu_seconds": {"fit": 12.0, "match": 30.0, "tune": 20.0},
    }
    close = found | {
        "perplexity": {"original": 10.0, "swapped": 10.0, "tuned": 9.0},
        "layer_errors": {"swapped": []},
    }
    made = script.block({"cog": found, "softmax": close, "sigmoid": close})
    assert "70 tokens of fitting, 60 of matching and 40 of tuning" in made
    assert "| cog | 10 | 5,000 | 60 | 40 | 20 | 2 | 0.6 | 0.5 | 12 | 30 | 20 |" in made
    assert "| softmax | 10 | 10 | - | - | 9 | - | - | - | 12 | 30 | 20 |" in made
    words = " ".join(made.split())
    assert "softmax tuned on the same text, ends at 9." in words
    assert "sigmoid 9 (0.9 times), cog 20 (2 times). Not run yet: magnitude+softmax, linear-relu" in words
    lines = script.curve({"cog 20": found, "cog 60": found}).splitlines()
    rows = ["| cog | 0 | 0.2 | 60 | 6 |", "| cog | 20 | 1.03 | 20 | 2 |", "| cog | 60 | 1.03 | 20 | 2 |"]
    assert lines[-5:-2] == rows and "Not run yet: cog 200, cog 400, sigmoid 20" in lines[-1]


def test_chinese_theory_has_the_same_code_and_numbers():
    pages = [(DOCS / name).read_text() for name in ("theory.md", "theory.zh-CN.md")]
    for pattern in (r"(?s)```python\n.*?```", r"(?m)^    \S.*", r"\d+\.\d+|\de-?\d+", r"`theory\.\w+`"):
        english, chinese = (sorted(re.findall(pattern, page)) for page in pages)
        assert english == chinese != []


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
    assert not [
        room
        for room in rooms - {"cache_dir", "checks", "errors", "files", "signals", "tracing"}
        if not re.search(rf"\b{room}\b", drawn)
    ]


def test_walks_of_architecture_run():
    tensor, token, number = (part.partition("```")[0] for part in ARCHITECTURE.split("```python\n")[1:])
    compile(number, "architecture.md", "exec")  # measures for a minute
    for walk in (tensor, token):
        exec(compile(walk, "architecture.md", "exec"), {"__name__": "walk"})
