"""Fields in transformers models: the hidden state reaches the gate, caches keep what it made,
saving keeps the gate."""

import copy
import math

import pytest
import torch
from torch.nn.functional import logsigmoid

import unsoft

NEW = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def fox(model):
    """A swapped model whose gates depend on the hidden state."""
    unsoft.hf.swap(model, "fox", init="paper")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.normal_(std=0.5)
    return model


@torch.no_grad()
def test_the_gate_sees_the_hidden_state_of_the_layer(tiny, words):
    model = fox(tiny("llama"))
    attention = model.model.layers[0].self_attn
    seen = {}
    keep = attention.register_forward_pre_hook(
        lambda _, args, options: seen.update(hidden=args[0] if args else options["hidden_states"]),
        with_kwargs=True,
    )
    inputs = {}
    mechanism = attention.unsoft.mechanism
    watch = mechanism.register_forward_pre_hook(
        lambda _, args, options: inputs.update(q=args[0], k=args[1], v=args[2]), with_kwargs=True
    )
    out = {}
    listen = mechanism.register_forward_hook(lambda *given: out.update(actual=given[-1]))
    model(words)
    for handle in (keep, watch, listen):
        handle.remove()
    gate = mechanism.source.gate
    assert gate.weight.shape[0] == model.config.hidden_size
    c = logsigmoid(seen["hidden"] @ gate.weight + gate.constant[:, 0]).mT.cumsum(-1)
    k, v = (inputs[name].repeat_interleave(2, dim=1) for name in "kv")
    logits = inputs["q"] @ k.mT / math.sqrt(8) + c[..., None] - c[..., None, :]
    weights = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(
        -1
    )
    torch.testing.assert_close(out["actual"], weights @ v, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_generate_with_its_cache_and_without(tiny, words):
    model = fox(tiny("llama"))
    assert torch.equal(model.generate(words, **NEW), model.generate(words, **NEW, use_cache=False))
    past = model(words[:, :4], past_key_values=unsoft.hf.MechanismCache(model)).past_key_values
    rest = model(words[:, 4:], past_key_values=past).logits
    torch.testing.assert_close(rest, model(words).logits[:, 4:], rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError, match="keeps a number of every token, which this cache does not; use generate"
    ):
        plain = model(words[:, :4], use_cache=True).past_key_values
        model(words[:, 4:], past_key_values=plain)


@torch.no_grad()
def test_saved_loaded_copied_and_swapped_again(tiny, words, tmp_path):
    model = fox(tiny("llama"))
    expected = model(words).logits
    assert torch.equal(copy.deepcopy(model)(words).logits, expected)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(unsoft.hf.load(tmp_path)(words).logits, expected, rtol=1e-5, atol=1e-5)
    again = unsoft.hf.swap(model, "softmax")(words).logits  # the hook hands nothing over any more
    assert not torch.equal(again, expected)


def test_gradients_reach_the_gate(tiny, words):
    model = fox(tiny("gpt2")).train()
    model(words, labels=words).loss.backward()
    gates = [p.grad for name, p in model.named_parameters() if "source.gate" in name]
    assert len(gates) == 4 and all(grad is not None and grad.abs().max() > 0 for grad in gates)


def test_an_attention_that_keeps_its_hidden_state_is_refused(tiny):
    model = tiny("llama")

    def forward(self, hidden_states, attention_mask=None):
        raise AssertionError("never called")

    attention = model.model.layers[1].self_attn
    attention.forward = forward.__get__(attention)
    with pytest.raises(
        ValueError, match="computes something from the hidden state, and LlamaAttention does not"
    ):
        unsoft.hf.swap(model, "fox")
    unsoft.hf.swap(model, "rbf")


def test_a_formula_that_needs_fields_from_a_caller_is_refused(tiny):
    formula = unsoft.Formula("exp(s + g_j - m)", "exp(s + g_j - m)", "s + g_j", fields={"g": "key"})
    with pytest.raises(ValueError, match="a model cannot give .* its fields, .* register the formula"):
        unsoft.hf.swap(tiny("llama"), formula)
