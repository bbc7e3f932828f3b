"""LoRA of PEFT around swapped models: the mechanism stays, trains if asked to, and comes back."""

import pytest
import torch

import unsoft

peft = pytest.importorskip("peft")


def adapted(model, **options):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def step(model, words):
    """One step of training; the gradients' names."""
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    model(words, labels=words).loss.backward()
    with torch.no_grad():
        for x in trained.values():
            x.add_(x.grad, alpha=-1.0)
    return trained.keys()


@pytest.mark.parametrize("mechanism", ["gated+cog", "magnitude+softmax"])
def test_the_mechanism_is_frozen_unless_asked_for(tiny, words, mechanism):
    lora = step(adapted(unsoft.hf.swap(tiny("llama"), mechanism)), words)
    assert lora and not [name for name in lora if ".unsoft." in name]
    both = step(adapted(unsoft.hf.swap(tiny("llama"), mechanism), modules_to_save=["unsoft"]), words)
    assert [name for name in both if ".unsoft." in name] and len(both) > len(lora)


def test_an_adapter_with_its_mechanism_comes_back(tiny, words, tmp_path):
    model = adapted(unsoft.hf.swap(tiny("llama"), "gated+cog"), modules_to_save=["unsoft"]).eval()
    before = model(words).logits
    step(model, words)
    after = model(words).logits
    assert not torch.allclose(before, after, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(unsoft.hf.swap(tiny("llama"), "gated+cog"), tmp_path).eval()
    assert torch.allclose(again(words).logits, after, atol=1e-6)


def test_a_merged_adapter_is_a_swapped_model(tiny, words, tmp_path):
    model = adapted(unsoft.hf.swap(tiny("llama"), "gated+cog")).eval()
    step(model, words)
    expected = model(words).logits
    model.merge_and_unload().save_pretrained(tmp_path)
    again = unsoft.hf.load(tmp_path)
    assert torch.allclose(again(words).logits, expected, atol=1e-5)
    assert again.model.layers[0].self_attn.unsoft.label == "gated+cog"
