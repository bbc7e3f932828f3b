"""Values of the first layer inside models: what every layer gets, with caches, and where it cannot work."""

import pytest
import torch

import unsoft

NEW = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_an_open_start_changes_nothing(tiny, words):
    plain = tiny("llama")
    with torch.no_grad():
        before = plain(words).logits
        after = unsoft.hf.swap(plain, "value-residual+softmax")(words).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


def test_every_layer_but_the_first_mixes_in_the_first_values(tiny, words, monkeypatch):
    model = unsoft.hf.swap(tiny("llama"), "value-residual+softmax", init="paper")
    seen = []
    inner = unsoft.mechanism("softmax", heads=1, head_dim=1).__class__
    attend = inner.attend
    monkeypatch.setattr(
        inner, "attend", lambda self, x: seen.append((x.value, x.first_value)) or attend(self, x)
    )
    model(words).logits.sum().backward()
    (first, none), *others = seen
    assert none is None and others
    for mixed, given in others:
        assert given is first
        own = 2 * mixed - first
        assert (own - first).abs().max() > 1e-3
    shares = [p for name, p in model.named_parameters() if name.endswith("shares")]
    assert len(shares) == len(others) and all(p.grad.abs().min() > 0 for p in shares)
    assert all(m.unsoft.first_values.value is None for m in model.modules() if hasattr(m, "unsoft"))


@pytest.mark.parametrize("inner", ["cog", "linear-relu", "gated-deltanet"])
def test_decoding_gives_what_the_whole_text_gives(tiny, padded, inner):
    model = unsoft.hf.swap(tiny("llama"), f"value-residual+{inner}", init="paper")
    batch = padded("left")
    assert torch.equal(model.generate(**batch, **NEW), model.generate(**batch, **NEW, use_cache=False))


def test_a_saved_model_shares_again(tiny, words, tmp_path):
    model = unsoft.hf.swap(tiny("llama"), "value-residual+softmax", init="paper").eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(unsoft.hf.load(tmp_path).eval()(words).logits, model(words).logits)


def test_gradient_checkpointing_is_refused_by_name(tiny, words):
    model = unsoft.hf.swap(tiny("llama"), "value-residual+softmax", init="paper").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(words).logits.sum().backward()


def test_a_layer_alone_says_what_it_misses():
    layer = unsoft.mechanism("value-residual+softmax", heads=1, head_dim=4, layer=1)
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="argument 'first_value' is missing; layer 1"):
        layer(x, x, x)
    with pytest.raises(ValueError, match="argument 'first_value' has shape"):
        layer(x, x, x, first_value=x[:, :, 1:])
