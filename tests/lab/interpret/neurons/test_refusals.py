"""Unsupported models and wrong inputs, with their error messages."""

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.lab.interpret.inspection.tiny import GROUPED, SIZES, WORDS, tiny
from unsoft.lab.interpret.neurons import scan
from unsoft.lab.interpret.neurons.parts import find_parts, read_norm

IDS = torch.randint(3, WORDS, (3, 24), generator=torch.Generator().manual_seed(3))


def experts():
    return GptOssForCausalLM(GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1))


def post_norm():
    sizes = {
        name: SIZES[name]
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    return OPTForCausalLM(OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=32, do_layer_norm_before=False))


def scaled():
    return GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=3.0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tiny("bert"), "BertModel is not supported: it lacks a list of blocks"),
        (lambda: tiny("vit"), "an unembedding"),
        (lambda: tiny("llama").model, "LlamaModel"),
        (lambda: tiny("gemma2"), "post_feedforward_layernorm is between them"),
        (experts, r"GptOssForCausalLM is not supported: it lacks a plain MLP in every block"),
        (post_norm, "a final norm"),
        (scaled, "GraniteForCausalLM are not its final norm and unembedding alone"),
    ],
)
def test_a_model_that_lacks_something_is_told_what(model, words):
    with pytest.raises(ValueError, match=words):
        scan(model().eval(), IDS)


def test_what_is_no_transformers_model():
    with pytest.raises(TypeError, match="must be a transformers model, not Linear"):
        scan(nn.Linear(2, 2), IDS)


def test_norms_are_told_apart():
    assert read_norm(nn.LayerNorm(8)).centred and not read_norm(nn.RMSNorm(8, eps=1e-6)).centred
    gemma = read_norm(find_parts(tiny("gemma2")).norm)
    assert torch.equal(gemma.gain, torch.ones(32))  # its weight is 0
    with pytest.raises(ValueError, match="GroupNorm is neither"):
        read_norm(nn.GroupNorm(2, 8))


@pytest.mark.parametrize(
    ("text", "options", "kind", "words"),
    [
        (IDS[:, :4], {}, ValueError, "too short: 12 tokens leave 0"),
        (IDS[:1], {}, ValueError, "at least 32 are needed"),
        (IDS.float(), {}, TypeError, "token numbers"),
        (["a"], {}, TypeError, "not list"),
        ("a text", {}, ValueError, "'tokenizer'"),
        (IDS, {"tokens": 0}, ValueError, "'tokens'"),
        (IDS, {"null": 0}, ValueError, "'null'"),
        (IDS, {"null": 32}, ValueError, "'null' must be a whole number from 1 to 31"),
        (IDS, {"counts": torch.ones(3)}, ValueError, f"3 numbers; the vocabulary has {WORDS} words"),
        (IDS, {"counts": torch.zeros(WORDS)}, ValueError, "no direction of frequency"),
        (IDS, {"counts": torch.full((WORDS,), -1.0)}, ValueError, "not negative"),
        (IDS, {"counts": torch.full((WORDS,), torch.nan)}, ValueError, "finite"),
    ],
)
def test_bad_input(text, options, kind, words):
    with pytest.raises(kind, match=words):
        scan(tiny("llama"), text, **options)


def test_the_model_is_as_before(monkeypatch):
    model = tiny("llama").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scan(model, IDS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and not any(
        module._forward_pre_hooks or module._forward_hooks for module in model.modules()
    )
