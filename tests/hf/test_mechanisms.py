"""Inside a model every mechanism is causal, ignores padding, and decodes the same with or without a cache."""

import pytest
import torch

import unsoft
from unsoft.mechanisms.cosformer import Cosformer
from unsoft.modules.registry import names

VARIANTS = [
    ("gated+cog", {}),
    ("logn+softmax", {}),
    ("sink+softmax", {}),
    ("gated+linear-relu", {}),
    ("xsa+softmax", {}),
    ("xsa+stick-breaking", {"current": True}),
    ("magnitude+gpam", {}),
    ("magnitude+linear-elu1", {}),
    ("magnitude+cog", {"where": "mass"}),
    ("magnitude+softmax", {"causal": "prefix"}),
    ("magnitude+softmax", {"causal": "streaming", "centres": 4, "chunk": 3}),
]
EVERY = [
    pytest.param(name, options, id="-".join([name, *map(str, options.values())]))
    for name, options in [(name, {}) for name in names()] + VARIANTS
]
SOME = ["cog", "relu2", "gpam", "linear-identity", "retention", "cosformer", "magnitude"]
HAS_NO_LOGITS = {"linear-identity", "retention", "cosformer"}  # so Gemma2's cap on logits refuses them
KINDS = ("gpt2", "gpt_neox", "mistral", "qwen3", "gemma2", "opt")
OTHERS = [  # every architecture and every mechanism at least twice; all pairs in the slow tests
    pytest.param(kind, name, marks=() if (row + column) % 3 == 0 else pytest.mark.slow)
    for row, kind in enumerate(KINDS)
    for column, name in enumerate(SOME)
    if kind != "gemma2" or name not in HAS_NO_LOGITS
]
NEW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
LOOKS_BACK = {
    name
    for name in {case.values[0] for case in EVERY}
    if unsoft.mechanism(name, heads=4, head_dim=8).causal_only
}


@pytest.fixture
def swapped(tiny):
    """A tiny model with a mechanism as published, whose effect is larger than from an open start."""
    return lambda kind, name, options=None: unsoft.hf.swap(tiny(kind), name, init="paper", **options or {})


@torch.no_grad()
def check_causal(model, words):
    changed = words.clone()
    changed[:, 6:] = (changed[:, 6:] + 7) % 47 + 3
    one, other = model(words).logits, model(changed).logits
    assert torch.equal(one[:, :6], other[:, :6])
    assert (one[:, 6:] - other[:, 6:]).abs().max() > 0.1


@torch.no_grad()
def check_padding(model, padded, side):
    one, other = padded(side), padded(side, padding=7)
    real = one["attention_mask"].bool()
    assert torch.equal(model(**one).logits[real], model(**other).logits[real])
    unmasked = {"input_ids": other["input_ids"]}
    if side == "left":  # without the mask the padding is seen
        assert (model(**one).logits[1, 3:] - model(**unmasked).logits[1, 3:]).abs().max() > 1e-3


@torch.no_grad()
def check_decoding(model, batch, **search):
    cached, computed = (model.generate(**batch, **NEW, **search, use_cache=x) for x in (True, False))
    assert torch.equal(cached, computed)


def check_padded_equals_alone(model, padded, words):
    alone = model(words[1:, 3:], position_ids=torch.arange(3, 9)[None]).logits[0]
    assert (model(**padded("left")).logits[1, 3:] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_every_mechanism_in_a_causal_model(swapped, words, padded, name, options):
    """Causal, independent of padding, and decoding with a cache, also by beam search, which reorders it."""
    model = swapped("llama", name, options)
    check_causal(model, words)
    check_padding(model, padded, "left")
    check_padding(model, padded, "right")
    check_padded_equals_alone(model, padded, words)
    check_decoding(model, padded(None))
    check_decoding(model, padded("left"), num_beams=3)


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_other_architectures(swapped, words, padded, kind, name):
    model = swapped(kind, name)
    check_causal(model, words)
    check_padding(model, padded, "left")
    check_decoding(model, padded("left"))


@pytest.mark.parametrize(("name", "options"), [case for case in EVERY if case.values[0] not in LOOKS_BACK])
def test_every_mechanism_works_both_ways(swapped, words, padded, name, options):
    """In BERT a changed last token changes the first output, and padding changes nothing."""
    model, changed = swapped("bert", name, options), words.clone()
    changed[:, -1] = 5
    with torch.no_grad():
        assert (model(words).logits[:, 0] - model(changed).logits[:, 0]).abs().max() > 1e-4
    check_padding(model, padded, "right")


@pytest.mark.parametrize("kind", ["bert", "vit", "clip"])
@pytest.mark.parametrize("name", ["retention", "decay", "gated+retention"])
def test_a_mechanism_that_looks_back_only_does_not_fit_an_encoder(tiny, kind, name):
    """It is refused when it is swapped in, and the model stays as it was."""
    model = tiny(kind)
    with pytest.raises(
        ValueError, match=f"{name[-5:]}' looks back only, and .* looks both ways; use a mechanism"
    ):
        unsoft.hf.swap(model, name)
    assert not any(hasattr(module, "unsoft") for module in model.modules())


def test_a_tower_that_looks_back_takes_what_looks_back(tiny, words):
    """CLIP's towers are of one class; the one for text passes is_causal in every call."""
    text = tiny("clip").text_model
    with torch.no_grad():
        unsoft.hf.swap(text, "retention", init="paper")(words)


@pytest.mark.parametrize("window", [4, 64])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@pytest.mark.parametrize("name", ["magnitude", "density"])
def test_gates_in_a_window_take_texts_that_are_not_packed(tiny, words, padded, kind, window, name):
    model = unsoft.hf.swap(tiny(kind, sliding_window=window), name, init="paper")
    check_causal(model, words)
    check_padding(model, padded, "left")
    check_padding(model, padded, "right")
    check_decoding(model, padded("left"))


@pytest.mark.parametrize("name", ["retention", "linear-elu1"])
def test_masks_that_show_the_future_are_refused_where_order_matters(swapped, words, name):
    everything = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="this mask lets tokens see some of them"):
        swapped("llama", name)(words, attention_mask=everything)
    assert swapped("llama", "cog")(words, attention_mask=everything).logits.isfinite().all()


def test_cosformer_is_made_for_the_length_of_the_model(tiny):
    def lengths(model):
        return {part.max_length for part in model.modules() if isinstance(part, Cosformer)}

    assert lengths(unsoft.hf.swap(tiny("llama", max_position_embeddings=2048), "cosformer")) == {2048}
    assert lengths(unsoft.hf.swap(tiny("gpt2"), "cosformer")) == {64}
    assert lengths(unsoft.hf.swap(tiny("llama"), "cosformer(32)")) == {32}
    assert lengths(unsoft.hf.swap(tiny("vit"), "cosformer")) == {256}, "images have no such length"
