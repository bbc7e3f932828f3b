"""Watching changes nothing, and leaves nothing behind."""

import copy

import pytest
import torch
from transformers import AttentionInterface

from tests.lab.interpret.inspection.tiny import BUILD, TEXT, reading, tiny
from unsoft.lab.interpret.inspection import inspect
from unsoft.lab.interpret.inspection.observe import observe


class Counting:
    def __init__(self):
        self.calls, self.streams = [], []

    def attention(self, call):
        self.calls.append((call.number, call.name))

    def stream(self, stack, depth, states):
        self.streams.append((stack, depth, states.clone()))


def outputs(model, inputs):
    return [x for x in model(**inputs, output_hidden_states=True).values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", BUILD)
def test_outputs_are_bit_equal(name):
    model, inputs = tiny(name), reading(name, "right")
    with torch.no_grad():
        before = outputs(model, inputs)
        visitor = Counting()
        with observe(model, visitor.attention):
            during = outputs(model, inputs)
        inspect(model, inputs)
        after = outputs(model, inputs)
    assert visitor.calls, "nothing was seen"
    for one, two, three in zip(before, during, after, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_calls_are_numbered_anew_in_every_pass(implementation):
    model = tiny("llama")
    model.set_attn_implementation(implementation)
    visitor = Counting()
    with torch.no_grad(), observe(model, visitor.attention):
        model(**reading("llama"))
        model.model(**reading("llama"))
    assert visitor.calls == [(0, "model.layers.0.self_attn"), (1, "model.layers.1.self_attn")] * 2


def test_streams_are_the_hidden_states():
    model, inputs = tiny("llama"), reading("llama")
    visitor = Counting()
    blocks = {f"model.layers.{k}": layer for k, layer in enumerate(model.model.layers)}
    with torch.no_grad(), observe(model, visitor.attention, blocks, visitor.stream):
        states = model(**inputs, output_hidden_states=True).hidden_states
    assert [(stack, depth) for stack, depth, _ in visitor.streams] == [("model.layers", k) for k in range(3)]
    assert torch.equal(visitor.streams[0][2], states[0]) and torch.equal(visitor.streams[1][2], states[1])
    assert torch.equal(model.model.norm(visitor.streams[2][2]), states[2]), (
        "the last is seen before the final norm"
    )


def test_nothing_is_left_behind():
    model = tiny("gpt2")
    model.train()
    model.transformer.h[0].attn.eval()
    before, original = copy.deepcopy(model.state_dict()), AttentionInterface.get_interface
    inspect(model, reading("gpt2"))
    assert AttentionInterface.get_interface is original
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training and not model.transformer.h[0].attn.training
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_nothing_is_left_behind_by_a_failure():
    model, original = tiny("llama"), AttentionInterface.get_interface
    with pytest.raises(IndexError):
        inspect(model, torch.full((1, 4), 10_000))
    assert AttentionInterface.get_interface is original
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_models_are_not_seen():
    model, other = tiny("llama"), tiny("bert")
    visitor = Counting()
    with torch.no_grad(), observe(model, visitor.attention):
        other(**reading("bert"))
    assert visitor.calls == []


@pytest.mark.parametrize("name", TEXT)
def test_inputs_are_not_changed(name):
    inputs = reading(name, "left")
    kept = {key: x.clone() for key, x in inputs.items()}
    inspect(tiny(name), inputs)
    assert all(torch.equal(x, inputs[key]) for key, x in kept.items())
