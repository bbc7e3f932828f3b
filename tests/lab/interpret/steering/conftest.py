"""A tokenizer of a few words for the tiny models, and directions of a model's own."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from unsoft.lab.interpret.steering import Directions
from unsoft.lab.interpret.steering.directions import fingerprint

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(46))]


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()


def word_tokenizer():
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def directions():
    """Directions of a model at some layers, drawn at random."""

    def directions(model, layers=(0, 1), site="block", seed=0):
        width = model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(seed)
        vectors = {layer: torch.randn(width, generator=generator) for layer in layers}
        return Directions(vectors, site=site, method="mean", model=fingerprint(model))

    return directions
