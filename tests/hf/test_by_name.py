"""``attn_implementation="unsoft:cog"`` loads what ``swap`` makes of the loaded model."""

import copy
import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import unsoft
from unsoft.modules.registry import names


@pytest.mark.parametrize("name", [*names(), "logn+cog", "first_last(softmax)+relu2", "{weight=s*s}"])
def test_mechanisms_without_parameters_are_loaded_and_others_point_to_swap(tiny, words, name):
    model = tiny("llama")
    expected = unsoft.hf.swap(copy.deepcopy(model), name)
    load = AutoModelForCausalLM.from_config
    if any(".unsoft." in parameter for parameter, _ in expected.named_parameters()):
        with pytest.raises(ValueError, match=r"has parameters.*unsoft\.hf\.swap\(model"):
            load(model.config, attn_implementation=f"unsoft:{name}")
        return
    loaded = load(model.config, attn_implementation=f"unsoft:{name}").eval()
    loaded.load_state_dict(expected.state_dict())
    assert torch.equal(loaded(words).logits, expected(words).logits)


@pytest.mark.parametrize("name", ["cog", "linear-elu1"])
def test_a_loaded_model_works_like_a_swapped_one(tiny, words, padded, tmp_path, name):
    tiny("llama").save_pretrained(tmp_path / "plain")
    implementation = f"unsoft:{name}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation=implementation)
    expected = unsoft.hf.swap(LlamaForCausalLM.from_pretrained(tmp_path / "plain"), name)
    assert type(model) is type(expected)
    batch = padded("left")
    options = {"max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(**batch, **options)
    assert torch.equal(tokens, expected.generate(**batch, **options))
    assert torch.equal(tokens, model.generate(**batch, **options, use_cache=False))
    packed = torch.cat([torch.arange(4), torch.arange(5)])[None]
    together = model(words[:1], position_ids=packed, use_cache=False).logits
    alone = [model(part).logits for part in (words[:1, :4], words[:1, 4:])]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "swapped")
    assert json.loads((tmp_path / "swapped" / "config.json").read_text())["unsoft"]["mechanism"] == name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "swapped")
    assert torch.equal(again(words).logits, model(words).logits)
    with pytest.raises(ValueError, match="saved with mechanisms of its own"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "swapped", attn_implementation="unsoft:relu2")


def test_both_towers_and_loading_info(tiny, tmp_path):
    tiny("clip").save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="unsoft:cog")
    assert sum(hasattr(module, "unsoft") for module in model.modules()) == 4
    tiny("llama").save_pretrained(tmp_path)
    model, report = LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="unsoft:cog", output_loading_info=True
    )
    assert model.model.layers[0].self_attn.unsoft.label == "cog" and not report["missing_keys"]


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("unsoft:nosuch", "'unsoft:nosuch': mechanism: unknown name 'nosuch'"),
        ("unsoft", "'unsoft' names no mechanism; write 'unsoft:cog'"),
        ("unsoft:", "'unsoft:' names no mechanism"),
    ],
)
def test_names_that_do_not_exist_raise_before_anything_is_loaded(tiny, tmp_path, implementation, message):
    model = tiny("llama")
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(model.config, attn_implementation=implementation)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=message):  # the folder does not exist
        LlamaForCausalLM.from_pretrained(tmp_path / "none", attn_implementation=implementation)


def test_a_model_in_memory_is_left_unchanged(tiny, words):
    model = tiny("llama")
    before = model(words).logits
    with pytest.raises(ValueError, match=r"for a model in memory call unsoft\.hf\.swap\(model, 'cog'\)"):
        model.set_attn_implementation("unsoft:cog")
    with pytest.raises(ValueError, match="names no mechanism"):
        model.set_attn_implementation("unsoft")
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(words).logits, before)


def test_a_model_that_cannot_be_swapped_says_why():
    from transformers import T5Config

    config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="position bias"):
        AutoModel.from_config(config, attn_implementation="unsoft:cog")
