"""Layers that are matched to the original's."""

import copy

import pytest
import torch
import transformers

import unsoft
from unsoft.hf.recipe import Recipe
from unsoft.lab.training.conversion.matching import Pair

IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def original(source):
    return unsoft.hf.load_model(source)[0]


def test_errors_are_those_of_plain_transformers_and_the_swapped_copy(original, source):
    """Inputs of each layer from a model that unsoft never touched, eager attention."""
    plain = transformers.LlamaForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    seen = {}
    for number, layer in enumerate(plain.model.layers):
        layer.self_attn.register_forward_hook(
            lambda module, args, options, output, number=number: seen.update({number: (options, output[0])}),
            with_kwargs=True,
        )
    with torch.no_grad():
        plain(IDS, use_cache=False)
    pair = Pair(original, Recipe("relu2", layers=[1]))
    assert pair.changed == ["model.layers.1.self_attn"]
    with torch.no_grad():
        errors = pair.errors(IDS)
        options, theirs = seen[1]
        swapped = unsoft.hf.swap(copy.deepcopy(plain), "relu2").model.layers[1].self_attn
        ours = swapped(options["hidden_states"], options["position_embeddings"], attention_mask=None)[0]
    expected = ((ours - theirs) ** 2).sum() / (theirs**2).sum()
    torch.testing.assert_close(errors, expected[None], rtol=1e-4, atol=0)
    assert expected > 0.01


def test_only_attention_that_differs_gets_gradients(original):
    pair = Pair(original, Recipe("magnitude+softmax", layers=[0]))
    pair.train_only_attention()
    pair.errors(IDS).mean().backward()
    named = dict(pair.student.named_parameters())
    assert {name for name, x in named.items() if x.requires_grad} == {
        name for name in named if name.startswith("model.layers.0.self_attn.")
    }
    assert all(x.grad is not None for x in named.values() if x.requires_grad)
    assert not any(x.grad is not None for x in original.parameters())


def test_both_have_the_same_weights_outside_of_attention(original):
    pair = Pair(original, Recipe("cog"))
    for name, x in original.named_parameters():
        assert (pair.student.get_parameter(name) is x) == ("self_attn" not in name)


def test_softmax_changes_nothing(original):
    assert Pair(original, Recipe("softmax")).changed == []


def test_a_swapped_model_is_matched_to_what_it_is(original):
    """Its own mechanism is the original then."""
    unsoft.hf.swap(original, "cog", layers=[0])
    assert Pair(original, Recipe("cog")).changed == ["model.layers.1.self_attn"]
    assert original.model.layers[0].self_attn.unsoft.label == "cog"


def test_what_a_swapped_model_has_learned_counts_as_a_difference(original):
    """The copy begins anew with the mechanism's own parameters, and a softmax layer stays one."""
    both = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    mass = Recipe("magnitude+softmax", options={"where": "mass"})
    unsoft.hf.swap(original, "magnitude+softmax", where="mass")
    assert Pair(original, mass).changed == both
    unsoft.hf.swap(original, "softmax")
    assert Pair(original, Recipe("magnitude+softmax", layers=[1], options=mass.options)).changed == both[1:]
