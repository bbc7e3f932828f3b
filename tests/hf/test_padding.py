"""Padding in a swapped model: on the left every mechanism and every modifier, at lengths beyond one tile,
with its cache; on the right those that check distances."""

import pytest
import torch

import unsoft
from unsoft.modules.registry import modifiers, names

LONG, SHORT, NEW = 140, 131, 3
BASES = ("cog", "softmax", "linear-elu1", "retention", "gpam")


def _fits(name: str) -> bool:
    """False also where a module refuses what is inside: density around retention, which has no normaliser."""
    try:
        return unsoft.mechanism(name, heads=2, head_dim=4) is not None
    except ValueError:
        return False


EVERY = names() + [
    name for modifier in modifiers() for base in BASES if _fits(name := f"{modifier.name}+{base}")
]
WINDOWS = ["cog", "logn+softmax", "softpick", "retention", "cosformer", "performer", "linear-identity"]
CASES = [("llama", name) for name in EVERY] + [("mistral", name) for name in WINDOWS]


def test_every_modifier_is_among_the_cases():
    assert {modifier.name for modifier in modifiers()} <= {
        name.split("+")[0] for name in EVERY if "+" in name
    }


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_padded_batch_decodes_what_each_text_does_alone(tiny, kind, name):
    """The batch with padding and caches, against each text by itself without either; in float64, logits kept
    in float32."""
    window = {"sliding_window": 40} if kind == "mistral" else {}
    model = tiny(kind, max_position_embeddings=256, num_hidden_layers=1, **window).double()
    model = unsoft.hf.swap(model, name, init="paper")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (2, LONG), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, : LONG - SHORT] = 0
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    actual = model.generate(input_ids=ids, attention_mask=mask, **settings).logits
    for b, start in enumerate((0, LONG - SHORT)):
        alone = model.generate(ids[[b], start:], **settings, use_cache=False).logits
        for step, expected in zip(actual, alone, strict=True):
            assert (step[b] - expected[0]).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["retention", "decay"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@torch.no_grad()
def test_a_text_padded_on_the_right_gives_what_it_gives_alone(tiny, padded, words, kind, name):
    """Rows of padding see keys within a window, and have no position."""
    model = unsoft.hf.swap(tiny(kind), name, init="paper")
    alone = model(words[1:, :6]).logits[0]
    assert (model(**padded("right")).logits[1, :6] - alone).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["retention", "decay", "gated+retention", "cosformer"])
@torch.no_grad()
def test_a_prompt_padded_on_the_right_goes_on_as_it_does_alone(tiny, padded, words, name):
    """Padding between the prompt and what follows has no position: a fading state must not age by it."""
    model = unsoft.hf.swap(tiny("llama"), name, init="paper")
    batch = padded("right")
    cache = unsoft.hf.MechanismCache(model)
    model(**batch, past_key_values=cache)
    new, mask = torch.tensor([[5, 7, 9], [8, 0, 6]]), batch["attention_mask"]
    shown = torch.tensor([[1, 1, 1], [1, 0, 1]])  # padding again, once the state holds something
    for t in range(3):
        mask = torch.cat([mask, shown[:, [t]]], dim=1)
        positions = mask.cumsum(-1)[:, -1:] - 1
        actual = model(
            new[:, [t]], attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
    for b, tokens in enumerate((torch.cat([words[0], new[0]]), torch.cat([words[1, :6], new[1, ::2]]))):
        alone = model(tokens[None], use_cache=False).logits[0, -1]
        assert (actual[b] - alone).abs().max() <= 2e-5


@torch.no_grad()
def test_distances_in_a_window_cannot_have_gaps(tiny, words):
    model = unsoft.hf.swap(tiny("mistral"), "retention", init="paper")
    gap = torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])
    with pytest.raises(ValueError, match="'positions' must be consecutive"):
        model(words, attention_mask=torch.ones_like(words), position_ids=gap, use_cache=False)
