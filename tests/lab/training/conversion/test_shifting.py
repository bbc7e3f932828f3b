"""Shifts of logits that softmax does not notice."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unsoft.hf.recipe import Recipe
from unsoft.lab.training.conversion.matching import Pair
from unsoft.lab.training.conversion.shifting import shift_rows

WIDTH = 64


def model_with_a_constant():
    """A random model whose hidden states have a constant channel, as those of trained models nearly do, and
    whose heads do not use the channel that carries the shift."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.view(4, WIDTH // 4, -1)[:, -1] = 0
        norm = layer.input_layernorm
        norm.register_forward_hook(
            lambda module, args, x: torch.cat([torch.ones_like(x[..., :1]), x[..., 1:]], -1)
        )
    return model


def drawn(count, seed):
    return torch.randint(0, 256, (count, 80), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mechanism", ["cog", "softpick"])
def test_a_shifted_formula_is_close_to_softmax_on_other_texts(mechanism):
    pair = Pair(model_with_a_constant(), Recipe(mechanism))
    texts = drawn(4, 1)
    with torch.no_grad():
        before, weights = pair.errors(texts), pair.teacher.model.layers[0].self_attn.k_proj.weight.clone()
        assert shift_rows(pair, drawn(32, 0), 12.0) == 2
        after = pair.errors(texts)
    assert (after < 0.01 * before).all(), (before, after)
    assert torch.equal(pair.teacher.model.layers[0].self_attn.k_proj.weight, weights)


@pytest.mark.parametrize("mechanism", ["relu2", "linear-relu", "magnitude+softmax"])
def test_other_mechanisms_are_left_alone(mechanism):
    pair = Pair(model_with_a_constant(), Recipe(mechanism))
    expected = {name: x.clone() for name, x in pair.student.state_dict().items()}
    assert shift_rows(pair, drawn(4, 0), 12.0) == 0
    assert all(torch.equal(x, expected[name]) for name, x in pair.student.state_dict().items())
