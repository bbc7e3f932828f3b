"""Positions in a swapped model: i, j and n of a formula against attention written by hand, with caches,
padding and windows.

The reference is the same model, one text at a time, without padding or cache, with an eager attention that is
written here.
"""

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import sdpa_mask

import unsoft
from unsoft.modules.pointwise import Pointwise

FORMULAS = {
    "distance": (
        unsoft.Formula("sigmoid(s)*exp(-0.1*(i - j))/n"),
        lambda s, i, j, n: s.sigmoid() * torch.exp(-0.1 * (i - j)) / n,
    ),
    "absolute": (
        unsoft.Formula("sigmoid(s + 0.05*j)*(1 + 0.02*i)/(3 + j)"),
        lambda s, i, j, n: (s + 0.05 * j).sigmoid() * (1 + 0.02 * i) / (3 + j),
    ),
    "count": (unsoft.Formula("tanh(s)/sqrt(n)"), lambda s, i, j, n: s.tanh() / n.sqrt()),
}
LONG, SHORT = 140, 131
NEW = {
    "max_new_tokens": 5,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "output_logits": True,
    "return_dict_in_generate": True,
}
KINDS = {"llama": {}, "gpt2": {}, "mistral": {"sliding_window": 40}, "gpt_neox": {}}


def define(weight):
    """A model's attention is from now on ``weight(s, i, j, n)`` of the keys that a row sees, for one text
    from its start."""

    def attend(module, query, key, value, attention_mask, scaling=None, **options):
        assert len(query) == 1 and query.shape[2] == key.shape[2]
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        position = torch.arange(query.shape[2], dtype=query.dtype)
        n = attention_mask.sum(-1, keepdim=True).to(query.dtype)
        weights = weight(query @ key.mT * scaling, position[:, None], position, n)
        return torch.where(attention_mask, weights, 0).matmul(value).transpose(1, 2), None

    AttentionInterface.register("written_by_hand", attend)
    AttentionMaskInterface.register(
        "written_by_hand",
        lambda *args, **options: sdpa_mask(
            *args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        ),
    )


@pytest.fixture
def model(tiny):
    """A tiny model with room for long texts."""
    return lambda kind: tiny(kind, max_position_embeddings=256, **KINDS[kind]).double()


@pytest.fixture
def texts():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (1, count), generator=draw) for count in (LONG, SHORT)]


@pytest.fixture
def batch(texts):
    """Both texts, the shorter one padded on the left."""
    ids, mask = torch.full((2, LONG), 7), torch.ones(2, LONG, dtype=torch.long)
    ids[0], ids[1, LONG - SHORT :], mask[1, : LONG - SHORT] = texts[0], texts[1], 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def by_hand(model, texts):
    """The logits of each text and of what it goes on with, by the attention above."""

    @torch.no_grad()
    def by_hand(kind, weight):
        define(weight)
        plain = model(kind)
        plain.set_attn_implementation("written_by_hand")
        results = []
        for text in texts:
            for _ in range(NEW["max_new_tokens"]):
                logits = plain(text, use_cache=False).logits
                text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
            results.append((text, plain(text, use_cache=False).logits))
        return results

    return by_hand


def last_tokens(result, count):
    """Logits (2, count, vocabulary) of the tokens that generate chose from."""
    return torch.stack(result.logits[:count], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_padded_batch_decodes_what_the_definition_says(model, batch, by_hand, kind, name):
    formula, weight = FORMULAS[name]
    expected = by_hand(kind, weight)
    swapped = unsoft.hf.swap(model(kind), formula)
    count = NEW["max_new_tokens"]
    for cached in (True, False):
        actual = swapped.generate(**batch, **NEW, use_cache=cached)
        for b, (text, logits) in enumerate(expected):
            assert torch.equal(actual.sequences[b, -count:], text[0, -count:])
            own = logits[0, -count - 1 : -1]
            assert (
                last_tokens(actual, count)[b] - own
            ).abs().max() <= 1e-6 * own.abs().max()  # kept in float32


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("cache", ["static", "beams"])
def test_other_ways_of_generating(model, batch, texts, name, cache):
    swapped = unsoft.hf.swap(model("llama"), FORMULAS[name][0])
    how = (
        {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {"num_beams": 3}
    )
    actual = swapped.generate(**batch, **NEW | how).sequences
    expected = swapped.generate(
        **batch, **NEW | how | {"cache_implementation": None}, use_cache=False
    ).sequences
    assert torch.equal(actual, expected)
    if cache == "static":
        for b, text in enumerate(texts):
            alone = swapped.generate(text, **NEW, use_cache=False).sequences
            assert torch.equal(actual[b, LONG:], alone[0, text.shape[1] :])


def pieces(swapped, batch, cache, explicit):
    """Logits of a batch that comes in pieces, with or without the positions that generate would give."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions, start, parts = (mask.cumsum(-1) - 1).clamp(min=0), 0, []
    for count in (1, 60, 70, 1, 1, LONG - 133):
        end = start + count
        more = {"position_ids": positions[:, start:end]} if explicit else {}
        with torch.no_grad():
            parts.append(
                swapped(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    past_key_values=cache,
                    use_cache=True,
                    **more,
                ).logits
            )
        start = end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "counted"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
def test_padded_prompts_in_pieces(model, batch, by_hand, kind, name, make, explicit):
    """These models have rotary positions, so that it makes no difference to them whether padding counts."""
    formula, weight = FORMULAS[name]
    swapped = unsoft.hf.swap(model(kind), formula)
    options = {"max_cache_len": 200} if make is StaticCache else {}
    actual = pieces(swapped, batch, make(config=swapped.config, **options), explicit)
    for b, (_, logits) in enumerate(by_hand(kind, weight)):
        own = logits[0, : (LONG, SHORT)[b]]
        tolerance = 1e-9 if explicit else 1e-5  # rotary positions are computed in float32
        assert (actual[b, -len(own) :] - own).abs().max() <= tolerance * own.abs().max()


def test_a_formula_of_gates_and_positions(model, texts, batch):
    """Gates need all keys, and keep a state: positions reach the formula inside."""
    unsoft_model = unsoft.hf.swap(model("llama"), "magnitude+tanh", init="paper")
    for module in unsoft_model.modules():
        if isinstance(module, Pointwise):
            module.formula = FORMULAS["absolute"][0]
    for layer in unsoft_model.model.layers:
        layer.self_attn.unsoft.uses_positions = True
    actual = unsoft_model.generate(**batch, **NEW)
    for b, text in enumerate(texts):
        alone = unsoft_model.generate(text, **NEW, use_cache=False)
        steps = last_tokens(alone, 5)[0]
        assert (last_tokens(actual, 5)[b] - steps).abs().max() <= 1e-7 * steps.abs().max()


@torch.no_grad()
def test_packed_texts_have_their_own_positions(model, texts):
    swapped = unsoft.hf.swap(model("llama"), FORMULAS["absolute"][0])
    packed, positions = torch.cat(texts, dim=1), torch.cat([torch.arange(LONG), torch.arange(SHORT)])[None]
    actual = swapped(packed, position_ids=positions, use_cache=False).logits
    for text, part in zip(texts, actual.split([LONG, SHORT], dim=1), strict=True):
        alone = swapped(text).logits
        assert (part - alone).abs().max() <= 1e-9 * alone.abs().max()
    with pytest.raises(ValueError, match="position_ids are not consecutive.*use_cache=False"):
        swapped(packed, position_ids=positions)


@pytest.mark.parametrize("name", ["dynamic-alibi", "retention"])
@torch.no_grad()
def test_packed_texts_work_where_attention_is_not_told_of_the_cache(tiny, words, name):
    """Gemma 3 keeps use_cache to itself."""
    swapped = unsoft.hf.swap(tiny("gemma3"), name, init="paper")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = swapped(words[:1], position_ids=positions, use_cache=False).logits
    alone = torch.cat([swapped(words[:1, :4]).logits, swapped(words[:1, 4:]).logits], dim=1)
    assert (packed - alone).abs().max() <= 2e-5
    with pytest.raises(ValueError, match="not consecutive; a cache keeps no positions.*one by one"):
        swapped(words[:1], position_ids=positions)


@torch.no_grad()
def test_texts_that_begin_later_keep_their_positions(model, texts):
    """Explicit positions are honoured, in one call and in pieces."""
    swapped = unsoft.hf.swap(model("llama"), FORMULAS["absolute"][0])
    ids, positions = texts[0][:, :20], torch.arange(50, 70)[None]
    whole = swapped(ids, position_ids=positions).logits
    assert (whole - swapped(ids).logits).abs().max() > 1e-3
    cache = DynamicCache(config=swapped.config)
    parts = [swapped(ids[:, :15], position_ids=positions[:, :15], past_key_values=cache).logits]
    parts += [
        swapped(ids[:, [t]], position_ids=positions[:, [t]], past_key_values=cache).logits
        for t in range(15, 20)
    ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-9 * whole.abs().max()
    gap = torch.tensor([[65, 66, 69]])
    with pytest.raises(ValueError, match="not consecutive, so that those of earlier keys are unknown"):
        swapped(ids[:, :3], position_ids=gap, past_key_values=cache)


@pytest.mark.parametrize("name", ["retention", "decay"])
@torch.no_grad()
def test_distances_cannot_have_gaps(model, texts, name):
    swapped = unsoft.hf.swap(model("llama"), name)
    gap = torch.tensor([[0, 1, 5, 6]])
    with pytest.raises(ValueError, match="consecutive"):
        swapped(texts[0][:, :4], attention_mask=torch.ones(1, 4), position_ids=gap, use_cache=False)


@torch.no_grad()
def test_encoders_count_from_the_first_word(tiny, padded, words):
    swapped = unsoft.hf.swap(tiny("bert"), FORMULAS["distance"][0])
    batch = padded("right")
    alone = swapped(words[1:, :6]).logits
    assert (swapped(**batch).logits[1, :6] - alone[0]).abs().max() <= 1e-5


@torch.no_grad()
def test_cross_attention_has_no_common_positions():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="cross-attention"):
        unsoft.hf.swap(model, FORMULAS["distance"][0])
    unsoft.hf.swap(model, "cog")
