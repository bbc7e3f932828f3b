"""``unsoft neurons``: the tables, the files, and wrong arguments."""

import csv
import json

import pytest
from transformers import BertTokenizer

from tests.lab.interpret.inspection.tiny import tiny

LETTERS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny language model with a tokenizer of its own, as a user would have it on disk."""
    path = tmp_path_factory.mktemp("model")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    tiny("llama").save_pretrained(path)
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(LETTERS[(k * k + 3 * k) % 37] for k in range(400)))
    return path


def test_tables_and_files(run_here, folder, text, tmp_path):
    out = tmp_path / "new" / "folder"
    done = run_here("neurons", str(folder), "--text", str(text), "--out", str(out), "--length", "40")
    assert done.returncode == 0, done.stderr
    assert "24 neurons of layer 1 (of 2)" in done.stdout
    assert " entropy neurons: writes where" in done.stdout and " frequency neurons: moves" in done.stdout
    assert "entropy-neurons: not testable here" in done.stdout and "\x1b" not in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "induction.csv",
        "neurons.csv",
        "neurons.html",
        "neurons.json",
        "verdicts.json",
    ]
    kept = json.loads((out / "neurons.json").read_text())
    assert kept["schema"] == 1 and kept["model"] == str(folder) and len(kept["neurons"]) == 24
    record = json.loads((out / "verdicts.json").read_text())
    assert record["kind"] == "neurons"
    assert record["command"].startswith(f"unsoft neurons {folder} --text {text}")
    assert [verdict["claim"] for verdict in record["verdicts"]] == ["entropy-neurons", "frequency-neurons"]
    rows = list(csv.DictReader((out / "neurons.csv").read_text().splitlines()))
    assert len(rows) == 24 and float(rows[3]["rho"]) == pytest.approx(kept["neurons"][3]["rho"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "/does/not/exist"], "/does/not/exist"),
        (["--out", "/proc/version/figures"], "--out"),
        (["--tokens", "0"], "--tokens"),
        (["--null", "40"], "'null'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_one_line(run_here, folder, text, tmp_path, arguments, words):
    given = arguments if "--text" in arguments else ["--text", str(text), *arguments]
    extra = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    done = run_here("neurons", str(folder), *given, *extra)
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("unsoft: ")]
    assert len(lines) == 1 and words in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe\x00", "UTF-8"), (b" \n", "empty"), (b"w1 w2", "too short")]
)
def test_a_text_that_is_none(run_here, folder, tmp_path, content, words):
    path = tmp_path / "text"
    path.write_bytes(content)
    done = run_here("neurons", str(folder), "--text", str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and words in done.stderr and not (tmp_path / "out").exists()


def test_a_model_without_what_is_needed(run_here, text, tmp_path, capsys):
    tiny("bert").save_pretrained(tmp_path / "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    capsys.readouterr()
    done = run_here("neurons", str(tmp_path / "bert"), "--text", str(text))
    assert done.returncode == 2 and "it lacks a list of blocks" in done.stderr
