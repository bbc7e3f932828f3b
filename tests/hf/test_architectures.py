"""Every architecture keeps its own behaviour under swapped softmax,
and those that cannot are refused by name."""

import pytest
import torch
import transformers

import unsoft
from unsoft.hf.architecture import attention_modules

ARCHITECTURES = ["llama", "gpt2", "gpt_neox", "mistral", "qwen3", "gemma2", "opt", "bert", "vit", "clip"]
CASES = [
    (name, side)
    for name in ARCHITECTURES
    for side in (None, "left", "right")
    if side is None or name != "vit"
]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_swapped_softmax_gives_the_models_own_eager_numbers(tiny, numbers, name, side):
    model = tiny(name)
    own = numbers(name, model, side)
    swapped = numbers(name, unsoft.hf.swap(model, "softmax"), side)
    assert own.std() > 0.1
    assert (swapped - own).abs().max() <= 1e-5
    # The comparison can fail: another mechanism gives other numbers.
    assert (numbers(name, unsoft.hf.swap(model, "cog"), side) - own).abs().max() > 0.1


def test_towers_are_counted_each_for_itself(tiny):
    places = [
        (attention.name.split(".")[0], attention.layer_spec.layer, attention.layer_spec.layers)
        for attention in attention_modules(tiny("clip"))
    ]
    assert places == [
        ("text_model", 0, 2),
        ("text_model", 1, 2),
        ("vision_model", 0, 2),
        ("vision_model", 1, 2),
    ]


def test_sizes_are_those_of_the_model(tiny):
    layer_spec = attention_modules(tiny("llama"))[1].layer_spec
    assert (layer_spec.heads, layer_spec.head_dim, layer_spec.layer, layer_spec.layers) == (4, 8, 1, 2)


def small(kind: str, **settings: object) -> transformers.PreTrainedModel:
    kind = getattr(transformers, kind)
    return kind(kind.config_class(**settings))


def test_attention_sinks_are_refused_by_name():
    model = small(
        "GptOssForCausalLM",
        vocab_size=9,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    with pytest.raises(
        ValueError,
        match=r"GptOssForCausalLM cannot be swapped faithfully: GptOssAttention has attention sinks",
    ):
        unsoft.hf.swap(model, "cog")
    assert model.config._attn_implementation != "unsoft"


def test_position_bias_is_refused_by_name():
    model = small(
        "T5ForConditionalGeneration", vocab_size=9, d_model=16, d_kv=8, d_ff=8, num_layers=1, num_heads=2
    )
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration .* T5Attention adds a position bias"):
        unsoft.hf.swap(model, "softmax")


def test_attention_outside_the_interface_is_refused_by_name():
    model = small("BloomForCausalLM", vocab_size=9, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(
        ValueError, match="BloomForCausalLM cannot be swapped: its attention does not go through"
    ):
        unsoft.hf.swap(model, "softmax")


def test_a_cap_on_logits_needs_logits(tiny):
    with pytest.raises(
        ValueError, match="Gemma2Attention caps its logits at 1, and 'linear-elu1' has no logits"
    ):
        unsoft.hf.swap(tiny("gemma2"), "linear-elu1")


@pytest.mark.parametrize(("heads", "shared"), [(3, 3), (4, 1)])
def test_heads_that_come_in_pairs_need_an_even_number(tiny, heads, shared):
    model = tiny("llama", hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=shared)
    with pytest.raises(ValueError, match="differential.* even"):
        unsoft.hf.swap(model, "differential")


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="'model' must be a transformers model, not Linear"):
        unsoft.hf.swap(torch.nn.Linear(2, 2), "cog")


def test_an_error_leaves_the_model_as_it_was(tiny, words):
    model = tiny("llama")
    before = model(words).logits
    with pytest.raises(ValueError, match="unknown name"):
        unsoft.hf.swap(model, "softmax", layers={1: "kog"})
    assert torch.equal(model(words).logits, before)
    assert not [name for name in model.state_dict() if "unsoft" in name]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(model.model.layers[1].self_attn, name, None)
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.self_attn' has no parameters"):
        unsoft.hf.swap(model, "cog")
    assert not [name for name in model.state_dict() if "unsoft" in name]


def test_another_attention_implementation_would_drop_the_mechanism(tiny):
    model = unsoft.hf.swap(tiny("llama"), "cog")
    with pytest.raises(ValueError, match="would drop the mechanisms"):
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert"])
def test_weights_are_those_of_the_mechanism(tiny, words, name):
    """Rows of softmax sum to 1; rows of softmax1 to less: exp(s) over 1 + the sum."""
    model = unsoft.hf.swap(tiny(name), "softmax", layers={1: "softmax1"})
    first, second = model(words, output_attentions=True).attentions
    assert first.shape == (2, 4, 9, 9)
    assert torch.allclose(first.sum(-1), torch.ones(2, 4, 9), atol=1e-5)
    assert bool((second.sum(-1) < 1).all())


@pytest.mark.parametrize("kind", ["LayoutLMModel", "MarkupLMModel", "AlignTextModel", "ClapTextModel"])
def test_encoders_that_do_not_say_so_look_both_ways(kind, words):
    """Their attention has no ``is_causal``; what surrounds it makes no causal mask."""
    torch.manual_seed(0)
    model = small(
        kind,
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
        max_position_embeddings=64,
    ).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own, swapped = model(words)[0], unsoft.hf.swap(model, "softmax")(words)[0]
    assert (swapped - own).abs().max() <= 1e-5
    assert {attention.causal for attention in attention_modules(model)} == {False}
