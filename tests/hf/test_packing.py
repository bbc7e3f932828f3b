"""Packed texts and sliding windows reach mechanisms as documents and windows, and no text sees another."""

import pytest
import torch
import transformers

import unsoft
from unsoft.hf import masks
from unsoft.modules.registry import names

MAGNITUDES = [
    ("magnitude", {}),
    ("magnitude", {"causal": "arrival"}),
    ("magnitude", {"causal": "prefix"}),
    ("magnitude", {"causal": "streaming", "centres": 4, "chunk": 3}),
    ("magnitude+cog", {"where": "mass"}),
    ("magnitude+linear-relu", {}),
    ("density+cog", {}),
]
EVERY = [pytest.param(name, {}, id=name) for name in names()] + [
    pytest.param(name, options, id="-".join([name, *map(str, options.values())]))
    for name, options in MAGNITUDES[1:]
]
WINDOWED = ["softmax", "cog", "gpam", "dynamic-alibi", "retention", "linear-elu1", "stick-breaking"]
PACKED = torch.cat([torch.arange(4), torch.arange(5)])[None]
BLOCKS = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).tril().bool()[None, None]


@torch.no_grad()
def check_packing(model, words, **packing):
    """Each text gives what it gives alone, and the second does not change by a bit with the first."""
    packed = model(words[:1], **packing).logits
    alone = [model(part, use_cache=False).logits for part in words[:1].split([4, 5], dim=1)]
    assert (packed - torch.cat(alone, dim=1)).abs().max() <= 1e-5
    changed = torch.cat([(words[:1, :4] + 7) % 47 + 3, words[:1, 4:]], dim=1)
    other = model(changed, **packing).logits
    assert torch.equal(other[:, 4:], packed[:, 4:])
    assert not torch.equal(other[:, :4], packed[:, :4])


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_packed_texts_do_not_see_each_other(tiny, words, name, options):
    """Positions that start from 0 again mean a new text."""
    model = unsoft.hf.swap(tiny("llama"), name, init="paper", **options)
    check_packing(model, words, position_ids=PACKED, use_cache=False)


@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_nor_in_a_window(tiny, words, kind, window):
    for name, options in [*((name, {}) for name in WINDOWED), *MAGNITUDES]:
        model = unsoft.hf.swap(tiny(kind, sliding_window=window), name, init="paper", **options)
        check_packing(model, words, position_ids=PACKED, use_cache=False)


@pytest.mark.parametrize("name", ["cog", "magnitude", "retention", "deltanet", "dynamic-alibi"])
@pytest.mark.parametrize("return_position_ids", [True, False])
def test_the_flattening_collator_packs(tiny, words, name, return_position_ids):
    """It passes positions, boundaries, or both."""
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_position_ids=return_position_ids
    )
    batch = collate([{"input_ids": part.tolist()} for part in words[0].split([4, 5])])
    assert torch.equal(batch.pop("input_ids"), words[:1])
    batch.pop("labels")
    model = tiny("gpt2") if not return_position_ids else tiny("llama")
    if not return_position_ids:  # GPT-2's learned positions would run on through the row
        model.transformer.wpe.weight.data.zero_()
        name = "cog" if name == "dynamic-alibi" else name
    check_packing(unsoft.hf.swap(model, name, init="paper"), words, use_cache=False, **batch)


@torch.no_grad()
def test_rows_of_a_batch_may_be_packed_differently(tiny, words):
    model = unsoft.hf.swap(tiny("mistral"), "magnitude", init="paper")
    positions = torch.cat([PACKED, torch.cat([torch.arange(7), torch.arange(2)])[None]])
    packed = model(words, position_ids=positions, use_cache=False).logits
    for row, size in enumerate((4, 7)):
        parts = words[row : row + 1].split([size, 9 - size], dim=1)
        alone = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
        assert (packed[row] - alone[0]).abs().max() <= 1e-5


@torch.no_grad()
def test_boundaries_are_for_one_row(tiny, words):
    model, ends = unsoft.hf.swap(tiny("llama"), "cog"), torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q and .* one row of packed texts .* 2 rows"):
        model(words, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@torch.no_grad()
def test_gates_refuse_masks_of_packed_texts(tiny, words, kind):
    """A mask does not say whether a hidden key belongs to another text; with a cache or without."""
    for name, options in MAGNITUDES:
        model = unsoft.hf.swap(tiny(kind), name, init="paper", **options)
        refused = pytest.raises(ValueError, match="depend on all keys before.*pass packed texts one by one")
        with refused:
            model(words[:1], attention_mask=BLOCKS, position_ids=PACKED, use_cache=False)
        with refused:
            cache = unsoft.hf.MechanismCache(model)
            model(words[:1], attention_mask=BLOCKS, position_ids=PACKED, past_key_values=cache)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_windows_and_packed_texts_need_no_mask(tiny, words, padded, kind, monkeypatch):
    model = unsoft.hf.swap(tiny(kind), "cog")

    def refuse(*args, **options):
        raise AssertionError("a mask was built")

    monkeypatch.setattr(masks, "sdpa_mask", refuse)
    monkeypatch.setattr(masks.Visibility, "table", refuse)
    model(words).logits.sum().backward()
    with torch.no_grad():
        model(words, position_ids=PACKED, use_cache=False)
        for side in ("left", "right"):
            model(**padded(side))
        model.generate(**padded("left"), max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@torch.no_grad()
def test_windows_generate_what_the_model_does(tiny, padded, kind, cache):
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    settings = window if kind == "qwen3" else {}
    model, batch = tiny(kind, **settings), padded("left")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": cache}
    expected = model.generate(**batch, **options).logits
    actual = unsoft.hf.swap(model, "softmax").generate(**batch, **options).logits
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 2e-5


@torch.no_grad()
def test_windows_that_look_both_ways(words):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.ModernBertConfig(
        **sizes, vocab_size=50, pad_token_id=0, local_attention=4, initializer_range=0.3
    )
    config._attn_implementation = "eager"
    model = transformers.ModernBertModel(config).eval()
    mask = torch.ones_like(words)
    mask[1, 6:] = 0
    expected = model(words, attention_mask=mask).last_hidden_state
    actual = unsoft.hf.swap(model, "softmax")(words, attention_mask=mask).last_hidden_state
    assert (actual - expected)[mask.bool()].abs().max() <= 1e-5


def test_patterns_that_no_window_describes_get_a_table():
    """Chunks, blocks that see each other, and whatever a model adds."""
    from transformers.masking_utils import (
        and_masks,
        blockwise_overlay,
        causal_mask_function,
        chunked_causal_mask_function,
        or_masks,
    )

    chunks = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    blocks = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1]])))
    own = and_masks(causal_mask_function, lambda b, h, i, j: j != 1)
    for function in (chunks, blocks, own):
        table = masks.key_mask(1, 5, 5, mask_function=function, local_size=3)
        i, j = torch.arange(5)[:, None], torch.arange(5)
        assert torch.equal(table[0, 0], function(0, 0, i, j).expand(5, 5))


@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_visibility_shows_what_the_mask_does(queries, window, both_ways):
    from transformers.masking_utils import (
        sdpa_mask,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )

    make = sliding_window_bidirectional_mask_function if both_ways else sliding_window_causal_mask_function
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]]).bool()
    sizes, options = (2, queries, 7, 9 - queries, 2), {"mask_function": make(window), "local_size": window}
    skip = {"allow_is_causal_skip": not both_ways, "allow_is_bidirectional_skip": both_ways}
    shown = masks.key_mask(*sizes, attention_mask=padding, **options, **skip)
    expected = sdpa_mask(*sizes, attention_mask=padding, allow_is_causal_skip=False, **options)
    assert torch.equal(shown.table().expand_as(expected), expected)
    assert shown.shown.padding.tolist() == [[0], [2]]
