"""Windows of text."""

import pytest
import torch

import unsoft
from unsoft.lab.training.conversion.text import TextBatches, Windows, split


@pytest.fixture(scope="module")
def tokenizer(source):
    return unsoft.hf.load_model(source)[1]


def test_windows_are_pieces_of_the_text_without_the_first_token(tokenizer):
    content = "".join(f"{number:05d}," for number in range(300)).encode()
    windows = Windows(content, tokenizer, 20, "training")
    for start in (0, 7, 600):
        text = tokenizer.decode(windows.window(start))
        assert text.encode() == content[start + 1 : start + 21]
    spaced = windows.spaced(5)
    assert spaced.shape == (5, 20)
    places = [content.index(tokenizer.decode(row).encode()) for row in spaced]
    gaps = {after - before for before, after in zip(places, places[1:], strict=False)}
    assert places[0] == 1 and max(gaps) - min(gaps) <= 1 and places[-1] > len(content) - windows.bytes


def test_few_windows_do_not_overlap(tokenizer):
    windows = Windows(b"0123456789" * 20, tokenizer, 30, "held-out")
    assert len(windows.spaced(100)) == 1 + (200 - windows.bytes) // windows.bytes < 100


def test_a_window_may_begin_inside_a_letter(tokenizer):
    windows = Windows("ä".encode() * 100, tokenizer, 10, "training")
    assert windows.window(1).shape == (10,)


def test_batches_come_from_their_number(tokenizer, text):
    train, test = split(str(text), tokenizer, 16)
    whole = text.read_bytes()
    assert train.content + test.content == whole and len(test.content) == len(whole) // 10
    first, again, other, stage, seed = (
        TextBatches(train, stage, 9, 3, seed)[index]["input_ids"]
        for stage, seed, index in (
            ("match", 0, 4),
            ("match", 0, 4),
            ("match", 0, 5),
            ("tune", 0, 4),
            ("match", 1, 4),
        )
    )
    assert first.shape == (3, 16) and torch.equal(first, again)
    assert not any(torch.equal(first, x) for x in (other, stage, seed))


def test_a_text_that_is_too_short_is_named(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("too short " * 20)
    with pytest.raises(ValueError, match=r"the held-out text has 20 tokens, too few for windows of 64"):
        split(str(tmp_path / "short.txt"), tokenizer, 64)


@pytest.mark.parametrize(
    "content", ["Grüße aus Köln, auf Wiedersehen. ".encode("latin-1") * 99, b"\x80\xff" * 999]
)
def test_bytes_that_are_no_text_are_refused(tokenizer, tmp_path, content):
    (tmp_path / "old.txt").write_bytes(content)
    with pytest.raises(ValueError, match="old.txt' is not text in UTF-8: .* bytes are none"):
        split(str(tmp_path / "old.txt"), tokenizer, 8)


def test_a_text_that_is_cut_inside_a_letter_is_text(tokenizer, tmp_path):
    (tmp_path / "new.txt").write_text("Grüße aus Köln. ü" * 999)
    train, test = split(str(tmp_path / "new.txt"), tokenizer, 8)
    assert len(train.content) + len(test.content) == (tmp_path / "new.txt").stat().st_size
