"""The sample that comes with ``unsoft steer check``, on real weights."""

from pathlib import Path

import pytest
import torch

import unsoft
from unsoft.lab.interpret import inspection
from unsoft.lab.interpret import steering as package
from unsoft.lab.interpret.steering import fit, steering
from unsoft.lab.interpret.steering.controls import TextExamples, TextTrial

SAMPLE = Path(package.__file__).parent / "sample"


def lines(name):
    return (SAMPLE / f"{name}.txt").read_text().splitlines()


def test_the_sample_is_whole():
    assert len(lines("positive")) == len(lines("negative")) == len(lines("prompts")) == 24
    assert len(lines("other_positive")) == len(lines("other_negative")) == 12
    assert not set(lines("toward")) & set(lines("away"))


@pytest.mark.slow
@pytest.mark.pretrained
def test_happy_sentences_make_good_words_likelier_and_leave_no_trace():
    model, tokenizer = unsoft.hf.load_model("smollm2")
    words = tokenizer("The food was", return_tensors="pt")
    before = model(**words).logits
    result = fit(model, lines("positive"), lines("negative"), tokenizer)
    unrelated = (Path(inspection.__file__).parent / "sample.txt").read_text()
    names = ("positive", "negative", "prompts", "toward", "away")
    other = (lines("other_positive"), lines("other_negative"))
    examples = TextExamples(*map(lines, names), other=other, unrelated=unrelated)
    trial = TextTrial(model, tokenizer, examples, {})
    change = trial.score(result, 0.1) - trial.score(None, 0.0)
    by_chance = trial.score(result.random(0), 0.1) - trial.score(None, 0.0)
    assert change.mean() > 1 > 4 * by_chance.abs().mean()
    with steering(model, result, 0.1):
        assert not torch.equal(model(**words).logits, before)
    assert torch.equal(model(**words).logits, before)
