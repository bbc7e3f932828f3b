"""A tiny language model with a tokenizer of bytes, in a folder; and a text whose next letter can be
learned."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from unsoft.hf.quiet import quiet

TEXT = "the quick brown fox jumps over the lazy dog and runs home. " * 60


def save_model(folder: Path) -> Path:
    """Llama with 2 layers and grouped heads, the same weights every time, large enough that attention
    matters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with quiet():
        LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(folder)


def save_encoder(folder: Path) -> Path:
    """BERT, which looks both ways."""
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with quiet():
        transformers.BertForMaskedLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
