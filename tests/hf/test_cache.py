"""States in a transformers cache."""

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import unsoft
from unsoft.engines.native.step import Step
from unsoft.hf.cache import KeyValueLayer, MechanismCache, StateLayer

STATEFUL = ["linear-elu1", "cosformer", "retention", "magnitude+softmax"]


@pytest.fixture
def model(tiny):
    return lambda name, kind="llama": unsoft.hf.swap(tiny(kind), name, init="paper")


@torch.no_grad()
def in_pieces(model, words, cache) -> torch.Tensor:
    parts = [
        model(piece, past_key_values=cache, use_cache=True).logits
        for piece in words.split([4, 1, 3, 1], dim=1)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", ["cog", "differential", *STATEFUL])
@pytest.mark.parametrize("make", [MechanismCache, lambda model: DynamicCache(config=model.config)])
def test_prompts_chunks_and_tokens_give_the_whole(model, words, name, make):
    layer = model(name)
    assert (in_pieces(layer, words, make(layer)) - layer(words).logits).abs().max() <= 2e-5


def test_a_state_does_not_grow_with_the_text(model, words):
    layer, sizes = model("linear-elu1"), []
    cache = MechanismCache(layer)
    for token in words.split(1, dim=1):
        layer(token, past_key_values=cache)
        sizes.append(cache.layers[0].cache.nbytes)
    assert sizes[0] > 0 and len(set(sizes)) == 1
    assert cache.get_seq_length() == 9


def test_layers_without_a_state_keep_keys_and_values(tiny):
    model = unsoft.hf.swap(tiny("llama"), "magnitude+softmax", layers=[1])
    assert [type(layer).__name__ for layer in MechanismCache(model).layers] == ["KeyValueLayer", "StateLayer"]
    windowed = unsoft.hf.swap(tiny("mistral"), "cog")  # transformers drops the keys that have left the window
    assert not MechanismCache.preferred(windowed)
    assert {type(layer) for layer in MechanismCache(windowed).layers} == {DynamicLayer}


STEPS = ["cog", "gpam", "magnitude+cog", "differential", "differential2"]


@pytest.fixture
def steps(monkeypatch):
    """Number of prepared steps that have run."""
    count, run = [0], Step.run

    def counted(self, *args):
        out = run(self, *args)
        count[0] += out is not None
        return out

    monkeypatch.setattr(Step, "run", counted)
    return count


@pytest.mark.parametrize("name", STEPS)
def test_generation_decodes_by_prepared_steps(model, words, steps, name):
    """One per layer and token after the prompt, and the logits of the general path."""
    layer = model(name, "qwen3")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    out = layer.generate(words, return_dict_in_generate=True, output_logits=True, **options)
    assert steps[0] == 2 * 4
    with torch.no_grad():
        expected = layer(out.sequences, use_cache=False).logits[:, words.shape[1] - 1 : -1]
    assert steps[0] == 2 * 4
    assert (torch.stack(out.logits, 1) - expected).abs().max() <= 2e-5
    past = out.past_key_values
    assert past.get_seq_length() == out.sequences.shape[1] - 1


@pytest.mark.parametrize("name", ["cog", "differential"])
def test_keys_that_a_model_changes_after_the_cache_lose_the_mark(model, words, steps, name, monkeypatch):
    """Then every token gets all keys, as from transformers' own cache."""
    layer, update = model(name), KeyValueLayer.update
    monkeypatch.setattr(KeyValueLayer, "update", lambda *args, **more: [x + 0 for x in update(*args, **more)])
    assert (in_pieces(layer, words, MechanismCache(layer)) - layer(words).logits).abs().max() <= 2e-5
    assert steps[0] == 0


@pytest.mark.parametrize("name", ["cog", "differential"])
def test_a_cropped_cache_of_keys_and_values_goes_on(model, words, name):
    layer = model(name)
    cache, expected = MechanismCache(layer), layer(words).logits
    with torch.no_grad():
        layer(words[:, :6], past_key_values=cache)
        layer(words[:, 6:7], past_key_values=cache)
        layer(words[:, :2].flip(1), past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 6 and cache.layers[0].keys.shape[2] == 6
        assert cache.layers[0].values.shape == cache.layers[0].keys.shape
        parts = [layer(token, past_key_values=cache).logits for token in words[:, 6:].split(1, dim=1)]
    assert (torch.cat(parts, dim=1) - expected[:, 6:]).abs().max() <= 2e-5


def test_a_compiled_step_takes_all_keys(model, words):
    layer, cache = model("cog"), None
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        cache = MechanismCache(layer)
        layer(words[:, :6], past_key_values=cache)
        layer(words[:, 6:7], past_key_values=cache)
        parts = [compiled(token, past_key_values=cache).logits for token in words[:, 7:].split(1, dim=1)]
    assert (torch.cat(parts, dim=1) - layer(words).logits[:, 7:]).abs().max() <= 2e-5


def test_generate_uses_states_by_itself(model, words):
    result = model("retention").generate(
        words, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    assert isinstance(result.past_key_values, MechanismCache)
    assert all(isinstance(layer, StateLayer) for layer in result.past_key_values.layers)


@pytest.mark.parametrize("name", ["softmax", "cog", "gpam"])
def test_static_caches_work_where_keys_and_values_are_all(model, words, name):
    layer = model(name)
    assert (
        in_pieces(layer, words, StaticCache(config=layer.config, max_cache_len=16)) - layer(words).logits
    ).abs().max() <= 2e-5


@pytest.mark.parametrize("name", STATEFUL)
def test_static_caches_are_refused_where_positions_matter(model, words, name):
    layer = model(name)
    with pytest.raises(ValueError, match="a static cache does not tell"):
        layer(words, past_key_values=StaticCache(config=layer.config, max_cache_len=16))


def test_gates_in_a_window_need_their_own_cache(model, words):
    layer = model("magnitude+softmax", "mistral")
    assert (in_pieces(layer, words, MechanismCache(layer)) - layer(words).logits).abs().max() <= 2e-5
    with pytest.raises(ValueError, match=r"need all keys.*unsoft\.hf\.MechanismCache"):
        in_pieces(layer, words, DynamicCache(config=layer.config))


def test_a_state_notices_keys_that_attention_never_took(model, words):
    layer = model("linear-elu1")
    cache = MechanismCache(layer)
    keys = torch.zeros(2, 2, 3, 8)
    cache.update(keys, keys, 0)
    with pytest.raises(RuntimeError, match="3 tokens were handed to this cache, and attention took 0"):
        cache.update(keys, keys, 0)


def test_states_are_picked_repeated_and_reset(model, words):
    layer = model("magnitude+softmax")
    cache = MechanismCache(layer)
    layer(words[:, :5], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    cache.reorder_cache(torch.tensor([1, 0]))
    actual = layer(words.flip(0)[:, 5:], past_key_values=cache).logits
    assert (actual - layer(words).logits.flip(0)[:, 5:]).abs().max() <= 2e-5
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", STATEFUL)
@torch.no_grad()
def test_a_prompt_can_be_used_again_by_copying_its_cache(model, words, name):
    layer = model(name)
    prompt = MechanismCache(layer)
    for piece in words[:, :6].split([4, 1, 1], dim=1):
        layer(piece, past_key_values=prompt)
    other = words.flip(0)[:, 6:]
    layer(other, past_key_values=copy.deepcopy(prompt))
    actual = layer(words[:, 6:], past_key_values=copy.deepcopy(prompt)).logits
    assert torch.equal(layer(words[:, 6:], past_key_values=prompt).logits, actual)
    assert (actual - layer(words).logits[:, 6:]).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["cog", "relu2", "entmax15", "gpam"])
@torch.no_grad()
def test_an_int8_cache_gives_the_same_in_pieces(model, words, name):
    layer = model(name)
    whole = layer(words, past_key_values=MechanismCache(layer, dtype="int8")).logits
    cache = MechanismCache(layer, dtype="int8")
    assert (in_pieces(layer, words, cache) - whole).abs().max() <= 2e-5
    exact = layer(words).logits
    assert 0 < (whole - exact).norm() < 0.05 * exact.norm()
    assert cache.layers[0].cache.tensors[0].dtype == torch.int8
    cache.crop(-2)
    again = layer(words[:, 7:], past_key_values=copy.deepcopy(cache)).logits
    assert (again - whole[:, 7:]).abs().max() <= 2e-5


def test_int8_is_for_layers_of_keys_and_values(model, tiny):
    for name in ("linear-elu1", "magnitude+softmax", "differential"):
        with pytest.raises(ValueError, match="argument 'dtype'"):
            MechanismCache(model(name), dtype="int8")
    for other in (unsoft.hf.swap(tiny("mistral"), "cog"), tiny("llama")):  # sliding windows; not swapped
        with pytest.raises(ValueError, match="argument 'dtype'"):
            MechanismCache(other, dtype="int8")


def test_a_state_cannot_forget(model, words):
    cache = MechanismCache(layer := model("linear-elu1"))
    layer(words, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.crop(-1)
    assert not cache.is_croppable


@pytest.mark.parametrize("name", ["cog", "linear-elu1", "magnitude+softmax"])
def test_latent_attention_keeps_its_own_cache(words, name):
    """DeepSeek's cache holds what keys are made from; values are narrower than keys."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=8,
        initializer_range=0.3,
    )
    model = unsoft.hf.swap(transformers.DeepseekV3ForCausalLM(config).eval(), name, init="paper")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(words, **settings), model.generate(words, **settings, use_cache=False))
