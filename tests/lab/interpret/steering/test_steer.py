"""Steering, against the same model with the direction built into its weights, and token by token."""

import copy

import pytest
import torch
from torch import nn

from unsoft.lab.interpret.steering import steering
from unsoft.lab.interpret.steering.directions import blocks, modules_at
from unsoft.lab.interpret.steering.fit import watching

STACKS = {"llama": 2, "gpt2": 2, "gpt_neox": 2, "opt": 2, "gemma2": 2, "qwen3": 2}


def built_in(model, directions, strength):
    """A copy of a Llama whose down projections have the direction as their bias: nothing is hooked."""
    copied = copy.deepcopy(model)
    for layer, vector in directions.vectors.items():
        mlp = copied.model.layers[layer].mlp
        biased = nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features)
        biased.weight, biased.bias = mlp.down_proj.weight, nn.Parameter(strength * vector)
        mlp.down_proj = biased
    return copied


def after_block(model, words):
    """What leaves block 1, with whatever was hooked before."""
    seen = []
    with watching(model, "block", [1], lambda layer, states: seen.append(states)):
        model(words)
    return seen[0]


@pytest.mark.parametrize("site", ["block", "mlp"])
@torch.no_grad()
def test_adding_is_what_a_bias_of_the_mlp_does(tiny, words, directions, site):
    model = tiny("llama")
    result = directions(model, site=site)
    expected = built_in(model, result, -1.5)(words).logits
    with steering(model, result, -1.5):
        steered = model(words).logits
    assert torch.allclose(steered, expected, atol=1e-5)
    assert not torch.allclose(steered, model(words).logits, atol=0.1)


@pytest.mark.parametrize("name", STACKS)
@torch.no_grad()
def test_every_architecture_is_steered_and_restored_bit_for_bit(tiny, words, directions, name):
    model = tiny(name)
    assert len(blocks(model)) == STACKS[name]
    before = model(words).logits
    written = model.generate(words, max_new_tokens=5, do_sample=False)
    plain = after_block(model, words)
    for site in ("block", "mlp"):
        result = directions(model, layers=[1], site=site)
        with steering(model, result, 2.0):
            assert not torch.equal(model(words).logits, before)
            steered = after_block(model, words)
        if site == "block":
            assert torch.allclose(steered, plain + 2 * result.vectors[1], atol=1e-5)
    assert torch.equal(model(words).logits, before)
    assert torch.equal(model.generate(words, max_new_tokens=5, do_sample=False), written)


def test_an_error_inside_leaves_nothing_behind(tiny, words, directions):
    model = tiny("llama")
    before = model(words).logits
    with pytest.raises(KeyError), steering(model, directions(model), 3.0):
        raise KeyError
    assert torch.equal(model(words).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("positions", ["all", "prompt", "generated", [0, -1], [2, 10]])
@torch.no_grad()
def test_positions_while_generating_are_those_of_the_whole_text(tiny, words, directions, positions):
    """With a cache the model sees a token at a time; a plain loop over the whole text is the truth."""
    model, prompt = tiny("llama"), words.shape[1]
    result = directions(model)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with steering(model, result, 1.5, positions=positions):
        written = model.generate(words, **options)
    text = words
    for _ in range(5):
        count = text.shape[1]
        named = {"all": range(count), "prompt": range(prompt), "generated": range(prompt - 1, count)}
        meant = (
            named[positions]
            if isinstance(positions, str)
            else [n % prompt if n < 0 else n for n in positions]
        )
        with steering(model, result, 1.5, positions=[n for n in meant if n < count]):
            logits = model(text, use_cache=False).logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, text)
    assert not torch.equal(written, model.generate(words, **options))


@torch.no_grad()
def test_keeping_the_norm_only_turns(tiny, words, directions):
    model = tiny("llama")
    result = directions(model, layers=[1])
    plain = after_block(model, words)
    with steering(model, result, 2.0, keep_norm=True):
        turned = after_block(model, words)
    assert torch.allclose(turned.norm(dim=-1), plain.norm(dim=-1), rtol=1e-5)
    cosine = torch.cosine_similarity(turned, plain + 2 * result.vectors[1], dim=-1)
    assert torch.allclose(cosine, torch.ones_like(cosine), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"strength": float("nan")}, ValueError, "'strength' must be a finite number, not nan"),
        ({"strength": float("inf")}, ValueError, "'strength' must be a finite number, not inf"),
        ({"strength": "much"}, TypeError, "'strength' must be a number"),
        ({"positions": "last"}, ValueError, "'positions' must be one of all, prompt, generated"),
        ({"positions": []}, ValueError, "'positions' must be"),
        ({"positions": [1.5]}, TypeError, "'positions' must be whole numbers"),
    ],
)
def test_bad_arguments(tiny, directions, options, kind, message):
    model = tiny("llama")
    with pytest.raises(kind, match=message), steering(model, directions(model, layers=[1]), **options):
        raise AssertionError("not reached")


def test_a_direction_of_another_model_is_refused(tiny, directions):
    one, two = tiny("llama"), tiny("llama")
    with torch.no_grad():
        two.model.layers[0].mlp.down_proj.weight += 1e-3
    with (
        pytest.raises(ValueError, match="found in another model, or in this one with other weights"),
        steering(two, directions(one)),
    ):
        raise AssertionError("not reached")


def test_a_model_without_the_parts_is_refused(tiny, directions):
    vision = tiny("vit")
    with pytest.raises(TypeError, match="must be a transformers model, not Linear"):
        blocks(nn.Linear(2, 2))
    model = tiny("llama")
    for block in model.model.layers:
        block.perceptron = block.mlp
        del block.mlp
    with pytest.raises(
        ValueError, match="layer 0 .* has no MLP called mlp, .* it has self_attn, .*perceptron"
    ):
        modules_at(model, "mlp")
    assert len(blocks(vision)) == 2  # it has blocks, and no text to be steered with
