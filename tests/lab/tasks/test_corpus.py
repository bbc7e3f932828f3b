"""Byte-pair encoding: any bytes without loss, and the same tokens each time; and the task on bytes."""

import random

import pytest
import tokenizers
import torch

from unsoft.lab.tasks import task
from unsoft.lab.tasks.corpus import train_tokenizer


@pytest.fixture
def content():
    """Words that repeat, and bytes that are no text in any encoding."""
    source = random.Random(0)
    words = [bytes(source.randrange(97, 123) for _ in range(source.randint(2, 7))) for _ in range(50)]
    return bytes(range(256)) * 8 + b" ".join(source.choices(words, k=3000))


def test_tokens_decode_to_the_same_bytes_and_are_the_same_each_time(content):
    lines = content.decode("latin-1").splitlines(keepends=True)
    made = train_tokenizer(lines, 300)
    ids = [token for line in made.encode_batch_fast(lines) for token in line.ids]
    again = tokenizers.Tokenizer.from_str(made.to_str())
    assert again.decode(ids).encode("latin-1") == content and max(ids) < 300 == made.get_vocab_size()
    noise = 8 * 256  # bytes that hardly ever make a word
    assert len(ids) - noise < 0.7 * (len(content) - noise)
    assert train_tokenizer(lines, 300).to_str() == made.to_str()
    with pytest.raises(ValueError, match="'vocabulary' must be at most that, not 4096"):
        train_tokenizer(lines, 4096)


def test_the_known_solution_of_a_text_is_a_distribution_over_bytes(content, tmp_path):
    (tmp_path / "words.bin").write_bytes(content)
    made = task("text", path=str(tmp_path / "words.bin"), length=20)
    inputs, labels = made.sample(4)
    assert made.score(torch.zeros(*labels.shape, made.outputs), labels) == pytest.approx(8) == made.chance
    assert torch.allclose(made.solve(inputs).exp().sum(-1), torch.ones(labels.shape), atol=1e-4)
    assert made.known() < 0.8 * made.chance and made.files() == {}
