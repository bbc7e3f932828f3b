"""Text in tokens of several bytes: without loss, the same each time, and scored in bits per byte."""

import math
import random

import pytest
import tokenizers
import torch

from unsoft.lab.tasks import task
from unsoft.lab.tasks.corpus import corpus, encode


@pytest.fixture
def path(tmp_path):
    """Words that repeat, and bytes that are no text in any encoding."""
    source = random.Random(0)
    words = [bytes(source.randrange(97, 123) for _ in range(source.randint(2, 7))) for _ in range(50)]
    content = bytes(range(256)) * 8 + b" ".join(source.choices(words, k=3000))
    file = tmp_path / "words.bin"
    file.write_bytes(content)
    return str(file)


def test_nothing_is_lost_and_tokens_are_those_of_the_training_text(path):
    encoded = encode(path, 300)
    tokenizer = tokenizers.Tokenizer.from_str(encoded.tokenizer)
    train, validation, test = corpus(path, validation=True)
    for ids, content in zip(encoded[:3], (train, validation, test), strict=True):
        assert tokenizer.decode(ids.tolist()).encode("latin-1") == bytes(content.tolist())
    assert tokenizer.get_vocab_size() == 300 and encoded.train.max() < 300
    assert encoded.bytes_per_token == len(test) / len(encoded.test)
    noise = 8 * 256  # bytes that hardly ever make a word
    assert len(encoded.train) - noise < 0.7 * (len(train) - noise)
    # Only the training text is used: with other held-out texts of the same length the tokens are the same.
    changed = path + ".changed"
    with open(changed, "wb") as file:
        file.write(bytes(train.tolist()) + b"q" * (len(validation) + len(test)))
    assert encode(changed, 300).tokenizer == encoded.tokenizer


def test_the_same_text_gives_the_same_tokens(path):
    first = encode(path, 300)
    encode.cache_clear()
    again = encode(path, 300)
    assert again is not first and again.tokenizer == first.tokenizer
    assert torch.equal(again.train, first.train)


def test_the_score_is_in_bits_per_byte(path):
    """Tokens that cost b bits each, where a token has B bytes, cost b / B bits a byte."""
    made = task("text", path=path, level="bpe", vocabulary=300, length=20)
    inputs, labels = made.sample(4)
    flat = torch.zeros(*labels.shape, made.outputs)
    each = encode(path, 300).bytes_per_token
    assert made.score(flat, labels) == pytest.approx(math.log2(300) / each, rel=1e-6)
    assert made.chance == pytest.approx(math.log2(300) / each)
    assert each > 1.2 and task("text", path=path).chance == 8
    likely = made.solve(inputs)
    assert torch.allclose(likely.exp().sum(-1), torch.ones(labels.shape), atol=1e-4)
    assert made.known() < 0.8 * made.chance


def test_what_belongs_to_a_run_is_its_tokenizer(path):
    made = task("text", path=path, level="bpe", vocabulary=300)
    assert made.files() == {"tokenizer.json": encode(path, 300).tokenizer}
    assert task("text", path=path).files() == {}


@pytest.mark.parametrize(
    ("knobs", "problem"),
    [
        ({"level": "words"}, "must be 'bytes' or 'bpe', not 'words'"),
        ({"vocabulary": 255}, "at least 256"),
        ({"vocabulary": 5000}, "at most 4096"),
        ({"level": "bpe", "vocabulary": 4096}, "'vocabulary' must be at most that, not 4096"),
        ({"level": "bpe", "vocabulary": 300, "length": 10**6}, "tokens of the training text"),
    ],
)
def test_knobs_that_do_not_fit_are_named(path, knobs, problem):
    with pytest.raises(ValueError, match=problem):
        task("text", path=path, **knobs)
