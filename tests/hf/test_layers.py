"""Which layer gets which mechanism."""

import json

import pytest

import unsoft
from unsoft.hf.recipe import Recipe

SHARP = unsoft.Formula(weight="exp(2*s - m)", mass="exp(2*s - m)", peak="2*s")


def labels(model) -> list[str]:
    return [layer.self_attn.unsoft.label for layer in model.model.layers]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["cog"] * 4),
        ({"layers": 1}, ["softmax", "cog", "softmax", "softmax"]),
        ({"layers": [0, "2-"]}, ["cog", "softmax", "cog", "cog"]),
        ({"layers": [-1]}, ["softmax", "softmax", "softmax", "cog"]),
        ({"layers": {0: "softmax", "1-2": "relu2"}}, ["softmax", "relu2", "relu2", "cog"]),
        ({"layers": {"0-": "relu2", 3: "softmax"}}, ["relu2", "relu2", "relu2", "softmax"]),
        ({"keep_first_last": True}, ["softmax", "cog", "cog", "softmax"]),
        ({"keep_first_last": True, "layers": {0: "relu2"}}, ["softmax", "cog", "cog", "softmax"]),
    ],
)
def test_layers(tiny, arguments, expected):
    assert labels(unsoft.hf.swap(tiny("llama", num_hidden_layers=4), "cog", **arguments)) == expected


def test_a_second_swap_replaces_the_first(tiny):
    model = unsoft.hf.swap(tiny("llama"), "gated+cog", layers=[0])
    assert labels(unsoft.hf.swap(model, "softmax", layers={1: "relu2"})) == ["softmax", "relu2"]
    assert not [name for name, _ in model.named_parameters() if "unsoft" in name]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": [4]}, ValueError, "4 is not among the 2 layers 0-1"),
        ({"layers": ["last"]}, ValueError, "expected a number, '4-7' or '8-'"),
        ({"layers": {0: 3}}, TypeError, "a mechanism is a name or a Formula, not int"),
        ({"layers": 0.5}, TypeError, "'layers' must be numbers"),
        ({"init": "closed"}, ValueError, "'init' must be one of open, paper, not 'closed'"),
        ({"where": {1, 2}}, TypeError, "plain data"),
    ],
)
def test_wrong_arguments_are_named(tiny, arguments, error, message):
    with pytest.raises(error, match=message):
        unsoft.hf.swap(tiny("llama"), "magnitude+softmax", **arguments)


def test_a_recipe_survives_json():
    recipe = Recipe(SHARP, {0: "softmax", "-1": SHARP}, True, "paper", {"where": "mass"})
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert [again.mechanism_of(layer, 3) for layer in range(3)] == [
        recipe.mechanism_of(layer, 3) for layer in range(3)
    ]
    assert (again.mechanism, again.init, again.options) == (SHARP, "paper", {"where": "mass"})


def test_options_reach_the_mechanism_and_kept_layers_have_none(tiny):
    model = unsoft.hf.swap(tiny("llama"), "magnitude+softmax", layers=[1], where="mass", eps=0.5)
    assert labels(model) == ["softmax", "magnitude+softmax"]
    gate = model.model.layers[1].self_attn.unsoft.mechanism
    assert (gate.where, gate.eps) == ("mass", 0.5)


def test_an_open_start_stays_close_to_the_model_and_a_published_one_does_not(tiny, words):
    own = tiny("llama")(words).logits
    for name in ("magnitude+softmax", "gpam", "differential2", "sink+softmax"):
        distance = {
            init: (unsoft.hf.swap(tiny("llama"), name, init=init)(words).logits - own).abs().mean().item()
            for init in ("open", "paper")
        }
        assert distance["open"] < distance["paper"] / 4, (name, distance)
