"""Trained models: what is known of their heads is found."""

from pathlib import Path

import pytest
import torch

from unsoft.hf.models import load_model
from unsoft.lab.interpret import inspection
from unsoft.lab.interpret.inspection import inspect
from unsoft.lab.interpret.inspection.observe import observe

pytestmark = pytest.mark.pretrained
TEXT = (Path(inspection.__file__).parent / "sample.txt").read_text()


@pytest.fixture(scope="module", params=["minilm", pytest.param("smollm2", marks=pytest.mark.slow)])
def case(request):
    return request.param, *load_model(request.param)


def test_outputs_are_bit_equal(case):
    _, model, tokenizer = case
    inputs = tokenizer([TEXT[:200]], return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs)[0]
        with observe(model, lambda call: None):
            during = model(**inputs)[0]
    assert torch.equal(before, during)


def test_sinks_and_depth(case):
    """Softmax heads rest on the first token ([CLS] in MiniLM, whatever comes first in SmolLM2);
    states become alike with depth."""
    name, model, tokenizer = case
    report = inspect(model, TEXT, tokenizer=tokenizer, max_length=96, max_sequences=2)
    assert len(report.heads) == {"minilm": 72, "smollm2": 270}[name]
    sinks = report.ranked("sink")
    assert sinks and all(head["sink_mass"] > 0.45 for head in sinks)
    assert max(abs(head["row_sum"] - 1) for head in report.heads) < 1e-4
    assert all(head["negative_share"] == 0 for head in report.heads)
    assert report.depths[0]["recovery"] == 1.0
    assert report.depths[-1]["mean_cosine"] > 2 * report.depths[0]["mean_cosine"]
