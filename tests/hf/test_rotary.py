"""Mechanisms that compare keys see them without rotary positions."""

import pytest
import torch
import transformers
from transformers import DynamicCache

import unsoft
from unsoft.hf.cache import MechanismCache
from unsoft.mechanisms.density import Density
from unsoft.mechanisms.magnitude import Magnitude

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
DENSE = {
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,
}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama3": ("Llama", {"rope_parameters": SCALED | LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),  # cos and sin times 1.14
    "neox": ("GPTNeoX", {}),  # a quarter of each key is rotated
    "phi": ("Phi", {}),
    "cohere": ("Cohere", {}),  # neighbours are a pair
    "glm": ("Glm", {"head_dim": 16, "num_key_value_heads": 2}),  # half of the neighbours
    "nanochat": ("NanoChat", {}),  # turns the other way
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1]}),  # the first layer gets angles and does not rotate
    "llama4": (
        "Llama4",
        {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_key_value_heads": 2},
    ),  # complex angles
    "deepseek": ("DeepseekV3", LATENT | DENSE | {"num_key_value_heads": 4}),  # the last part of each key
    "window": ("Mistral", {"sliding_window": 100, "num_key_value_heads": 2}),
}
CLONES = torch.tensor([[1, 7] + [5] * 50])


def model_of(family, name, dtype=torch.float32, **options):
    torch.manual_seed(0)
    kind, more = FAMILIES[family]
    kind = getattr(transformers, f"{kind}ForCausalLM")
    config = transformers.Llama4TextConfig if family == "llama4" else kind.config_class
    return unsoft.hf.swap(kind(config(**SIZE | more)).eval().to(dtype), name, init="paper", **options)


def clones_in_first_layer(model):
    """What 50 clones at neighbouring positions count as, in the last row of the first layer."""
    attention = model.unsoft_places[0][2]
    attention.scaling = 0.0  # equal logits: weights show the factors of keys alone
    for part in model.modules():
        if isinstance(part, Density):
            part.set_density(p=0.99, t=8.0)
        elif isinstance(part, Magnitude):
            part.set_key_gate(beta=30.0, gamma=-21.0, t=8.0)
    with torch.no_grad():
        weights = model(CLONES, output_attentions=True, use_cache=False).attentions[0]
    row = weights[0, :, -1].double()
    return float((row[:, 2:].sum(-1) / row[:, 1]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_clones_at_neighbouring_positions_count_as_without_positions(family):
    assert 1.03 < clones_in_first_layer(model_of(family, "density")) < 1.06  # 50^0.01 = 1.04
    assert clones_in_first_layer(model_of(family, "magnitude")) == pytest.approx(1, rel=0.03)


def test_rotation_is_undone_in_bfloat16():
    assert clones_in_first_layer(model_of("yarn", "density", torch.bfloat16)) == pytest.approx(1.04, rel=0.02)


@pytest.mark.parametrize("name", ["density", "magnitude"])
@pytest.mark.parametrize("family", ["yarn", "neox", "deepseek"])
@torch.no_grad()
def test_cached_tokens_are_compared_without_positions(family, name):
    model = model_of(family, name)
    ids = torch.randint(3, 12, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding shifts the positions of one text
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    caches = [DynamicCache(config=model.config)]
    caches += [] if family == "deepseek" else [MechanismCache(model)]
    for cache in caches:
        parts, seen = [], 0
        for piece in ids.split([30, 1, 8, 1], dim=1):
            seen += piece.shape[1]
            parts.append(model(piece, attention_mask=mask[:, :seen], past_key_values=cache).logits)
        off = (torch.cat(parts, dim=1) - expected).abs()[mask.bool()]
        assert off.max() <= 2e-5 * expected.abs().max()
    cached, whole = (
        model.generate(ids[:1], max_new_tokens=5, use_cache=use, do_sample=False) for use in (True, False)
    )
    assert torch.equal(cached, whole)


def test_a_cropped_cache_forgets_the_angles():
    model, cache = model_of("llama", "density"), DynamicCache()
    with torch.no_grad():
        model(CLONES[:, :9], past_key_values=cache)
        cache.crop(-5)
        cropped = model(CLONES[:, 4:9], past_key_values=cache).logits
        assert torch.allclose(cropped, model(CLONES[:, :9], use_cache=False).logits[:, 4:], atol=1e-5)


@pytest.mark.parametrize("name", ["density", "magnitude"])
def test_gradients_pass_through_the_inverse_rotation(name):
    model = model_of("neox", name, torch.float64)  # Llama's norms are in float32
    ids = torch.tensor([[1, 7, 5, 5, 9, 5, 7, 11]])
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss():
        return model(ids, use_cache=False).logits.sin().sum()

    def moved(step):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            result = float(loss())
            weight.sub_(direction, alpha=step)
        return result

    loss().backward()
    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert float((weight.grad * direction).sum()) == pytest.approx(slope, rel=1e-6)


def test_rotations_that_cannot_be_undone_are_named():
    torch.manual_seed(0)
    moshi = transformers.MoshiForCausalLM(transformers.MoshiConfig(**SIZE))
    with pytest.raises(ValueError, match="MoshiAttention cannot be undone: it computes the angles itself"):
        unsoft.hf.swap(moshi, "density")
    assert not hasattr(moshi.model.layers[0].self_attn, "unsoft"), "the model is unchanged"
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = SIZE | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": layers, "head_dim": 16}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "global_head_dim": 16}
    shared = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, num_key_value_heads=2))
    with pytest.raises(ValueError, match="Gemma4TextAttention cannot .* keys are those of another layer"):
        unsoft.hf.swap(shared, "density")(CLONES)
    config = transformers.HunYuanDenseV1Config(**SIZE, head_dim=16, num_key_value_heads=2)
    late = transformers.HunYuanDenseV1ForCausalLM(config)
    torch.nn.init.normal_(late.model.layers[0].self_attn.key_layernorm.weight)  # after the rotation
    unsoft.hf.swap(late, "magnitude")
    with pytest.raises(
        ValueError, match="HunYuanDenseV1Attention cannot be undone: some keys are .* changed"
    ):
        late(CLONES)
