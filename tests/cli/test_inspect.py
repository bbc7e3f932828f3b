"""``unsoft inspect``: the summary, the files, and wrong arguments."""

import csv
import json

import pytest
from transformers import BertTokenizer

from tests.lab.interpret.inspection.tiny import tiny
from unsoft.cli.commands.inspect import first_sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of its own, as a user would have it on disk."""
    path = tmp_path_factory.mktemp("model")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "dog",
        "sat",
        "on",
        "mat",
        ".",
        "a",
        "red",
        "not",
    ]
    (path / "vocab.txt").write_text("\n".join(words))
    tiny("bert").save_pretrained(path)
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat. The dog sat on the red mat. " * 4)
    return path


def test_summary_and_files(run_here, folder, text, tmp_path):
    out = tmp_path / "new" / "folder"
    done = run_here(
        "inspect", str(folder), "--text", str(text), "--out", str(out), "--length", "16", "--sequences", "3"
    )
    assert done.returncode == 0, done.stderr
    assert "8 heads in 2 layers, 48 tokens in 3 sequences" in done.stdout
    assert (
        "sink heads: " in done.stdout
        and "hijacked heads: " in done.stdout
        and "deleting heads: " in done.stdout
    )
    assert "the residual stream" in done.stdout and "\x1b" not in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "depths.csv",
        "heads.csv",
        "inspection.html",
        "inspection.json",
    ]
    kept = json.loads((out / "inspection.json").read_text())
    assert kept["model"] == str(folder) and len(kept["heads"]) == 8
    assert len(list(csv.DictReader((out / "heads.csv").read_text().splitlines()))) == 8
    page = (out / "inspection.html").read_text()
    assert "The cat sat on the mat." in page and "Content-Security-Policy" in page


def test_ranked_heads_are_printed_strongest_first(run_here, folder, text):
    done = run_here("inspect", str(folder), "--text", str(text), "--length", "16")
    part = done.stdout.partition("deleting heads: ")[2].partition("the residual stream")[0]
    amounts = [
        float(line.split()[2]) for line in part.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert len(amounts) > 1 and amounts == sorted(amounts, reverse=True)


def test_without_text_there_is_a_page_of_our_own(run_here, folder):
    done = run_here("inspect", str(folder), "--length", "64", "--sequences", "2")
    assert done.returncode == 0 and "128 tokens in 2 sequences" in done.stdout


def test_ones_own_sentences(run_here, folder, text, tmp_path):
    run_here(
        "inspect",
        str(folder),
        "--text",
        str(text),
        "--out",
        str(tmp_path),
        "--sentence",
        "a <b>red</b> cat",
        "--sentence",
        "a dog",
    )
    page = (tmp_path / "inspection.html").read_text()
    assert "a &lt;b&gt;red&lt;/b&gt; cat" in page and '<option value="1">a dog</option>' in page


def test_sentences_of_a_text():
    assert first_sentences(
        "One. Two words here now! Is this the next one? And this is a third. Not this one.", 2
    ) == [
        "Two words here now!",
        "Is this the next one?",
    ]
    assert first_sentences("word") == ["word"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--text", "/does/not/exist"], 2, "/does/not/exist"),
        (["--out", "/proc/version/figures"], 2, "--out"),
        (["--length", "1"], 2, "--length"),
        (["--sequences", "0"], 2, "--sequences"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_one_line(run_here, folder, arguments, code, words):
    done = run_here("inspect", str(folder), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("unsoft: ")
    assert words in done.stderr


@pytest.mark.parametrize(("content", "words"), [(b"\xff\xfe\x00", "UTF-8"), (b" \n", "empty")])
def test_a_text_that_is_none(run_here, folder, tmp_path, content, words):
    path = tmp_path / "text"
    path.write_bytes(content)
    done = run_here("inspect", str(folder), "--text", str(path))
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_model_without_words(run_here, tmp_path, capsys):
    tiny("vit").save_pretrained(tmp_path)
    capsys.readouterr()  # what saving said
    done = run_here("inspect", str(tmp_path))
    assert done.returncode == 2 and "no tokenizer" in done.stderr and len(done.stderr.splitlines()) == 1
