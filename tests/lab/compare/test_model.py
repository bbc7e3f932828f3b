"""A model: inspected as it is, each mechanism swapped in, perplexity before and after; nothing stale."""

import math
from dataclasses import asdict

import pytest
import torch
from transformers import BertTokenizer

import unsoft
from tests.lab.interpret.inspection.tiny import tiny
from unsoft.formula import Formula
from unsoft.hf.quiet import quiet
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Results, run
from unsoft.lab.compare.sections import model
from unsoft.lab.compare.sections.model import Model, perplexities
from unsoft.lab.compare.store import AnswerStore
from unsoft.lab.interpret.models import batches

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "of", "and", "to", "in", "is", ".", ","]
SUBJECTS = [
    Candidate("softmax", "softmax"),
    Candidate("cog", "cog"),
    Candidate("mine", Formula("sigmoid(s)/n")),
    Candidate("differential", "differential"),
]


def save(folder, kind="llama", seed=0):
    """A tiny random model with a tokenizer of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    network = tiny(kind)
    torch.manual_seed(seed)
    for parameter in network.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    with quiet():
        network.save_pretrained(folder)
        BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


def table(answers):
    """The part of the page that shows perplexities."""
    subjects = [{"label": s.label, "own": False} for s in SUBJECTS]
    found = [asdict(answer) for answer in answers.values()]
    return perplexities(Results({"subjects": subjects, "answers": found}))


def answers_of(folder, store):
    answers, finished = run(Model(str(folder)).jobs(SUBJECTS), AnswerStore(store))
    assert finished
    return {(a.name, a.mechanism): a for a in answers}


def test_perplexity_is_that_of_the_models_own_loss(folder):
    """Against the loss that transformers computes itself, one sequence at a time."""
    network, tokenizer = unsoft.hf.load_model(folder)
    total, count = 0.0, 0
    for part in batches(model._text(), tokenizer, 1, 256, torch.device("cpu"), 4):
        numbers = part.inputs["input_ids"]
        with torch.no_grad():
            total += float(network(numbers, labels=numbers).loss) * (numbers.shape[1] - 1)
        count += numbers.shape[1] - 1
    (found,) = Model(str(folder))._perplexity()
    assert found["tokens"] == count > 500
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_each_mechanism_is_swapped_in(folder, tmp_path):
    found = answers_of(folder, tmp_path / "store")
    before, softmax, cog, mine = (
        found["perplexity", name].rows[0]["perplexity"] for name in ("", "softmax", "cog", "mine")
    )
    assert softmax == pytest.approx(before, rel=1e-5), "softmax is what the model has"
    network, _ = unsoft.hf.load_model(folder)
    unsoft.hf.swap(network, "cog")
    fresh = Model(str(folder))
    fresh.__dict__["loaded"] = (network, unsoft.hf.load_model(folder)[1])
    assert fresh._perplexity()[0]["perplexity"] == pytest.approx(cog, rel=1e-6), (
        "as if only cog had been swapped in"
    )
    assert len({round(x, 6) for x in (before, cog, mine)}) == 3
    assert found["model", ""].rows[0]["heads"]
    part = table(found)
    after = [row["perplexity after"] for row in part.rows]
    near = [x for x in after if x < 1.1 * before]
    assert len(after) == len(SUBJECTS) and after == sorted(after)
    assert f"{len(near)} of {len(after)} stay within 10% of that" in part.text
    assert f"{before:.4g} as the model is" in part.text and "sample.txt" in part.text and part.in_terminal


def test_a_mechanism_that_does_not_fit_does_not_spoil_the_others(folder, tmp_path, monkeypatch):
    def refuse(network, mechanism):
        if mechanism == "cog":
            raise ValueError("swap: it does not fit")

    monkeypatch.setattr("unsoft.hf.swap", refuse)
    part = table(answers_of(folder, tmp_path / "store"))
    assert "Not swapped: cog: swap: it does not fit." in part.text
    assert len(part.rows) == len(SUBJECTS) - 1


def test_a_changed_folder_is_measured_anew(folder, tmp_path):
    first = answers_of(folder, tmp_path / "store")
    again = answers_of(folder, tmp_path / "store")
    assert all(answer.cached for answer in again.values())
    save(folder, seed=1)
    other = answers_of(folder, tmp_path / "store")
    assert not any(answer.cached for answer in other.values())
    assert other["perplexity", ""].rows != first["perplexity", ""].rows


def test_another_code_of_hf_is_another_question(folder, monkeypatch):
    def questions():
        return [job.question for job in Model(str(folder)).jobs(SUBJECTS)]

    first = questions()
    monkeypatch.setattr(model, "code_digest", lambda *folders: "changed")
    assert all(a != b for a, b in zip(first, questions(), strict=True))


def test_a_model_without_next_tokens_is_inspected_all_the_same(tmp_path):
    found = answers_of(save(tmp_path / "bert", "bert"), tmp_path / "store")
    assert found["model", ""].rows
    part = table(found)
    assert not part.rows and "no perplexity" in part.text
