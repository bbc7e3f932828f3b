"""Losses without heads, against models with changed weights; verdicts by their rules."""

import copy

import pytest
import torch

import unsoft
from tests.lab.interpret.inspection.tiny import reading, tiny
from unsoft.lab.interpret.inspection.ablation import ablate, judged, losses, without
from unsoft.lab.interpret.inspection.observe import find_layout
from unsoft.lab.interpret.models import batches, evaluating

TOKENS = torch.randint(5, 25, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny("llama").eval()


@pytest.fixture(scope="module")
def inspection(model):
    return unsoft.lab.interpret.inspect(model, TOKENS)


def layout_of(model):
    parts = batches(TOKENS, None, 4, 64, model.device)
    with evaluating(model):
        return find_layout(model, parts[0])


def loss(model, ids=TOKENS):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(-1)


@pytest.mark.parametrize("places", [[(0, 0)], [(1, 2), (0, 1), (1, 0)]])
def test_it_is_as_if_the_projection_did_not_read_the_head(model, places):
    """The reference: the columns of the output projection that belong to these heads are set to 0."""
    other = copy.deepcopy(model)
    width = model.config.hidden_size // model.config.num_attention_heads
    for layer, head in places:
        weight = other.model.layers[layer].self_attn.o_proj.weight
        weight.data[:, head * width : (head + 1) * width] = 0
    before = loss(model)
    with without(layout_of(model), places):
        removed = loss(model)
    torch.testing.assert_close(removed, loss(other))
    assert not torch.allclose(removed, before) and torch.equal(loss(model), before), (
        "afterwards all is as it was"
    )


def test_the_numbers_are_those_of_the_losses(model, inspection):
    calls = []
    done = ablate(model, TOKENS, inspection, heads=2, draws=2, progress=lambda *x: calls.append(x))
    assert done["loss"] == pytest.approx(float(loss(model).mean()), rel=1e-5)
    assert done["tokens"] == 4 * 23 and done["sequences"] == 4
    assert [number for number, _, _ in calls] == list(range(calls[0][1])), "all passes are told"
    for one in done["removed"]:
        places = [tuple(map(int, place.split("."))) for place in one["heads"].split()]
        with without(layout_of(model), places):
            change = loss(model) - loss(model_of_before(model))
        assert one["change"] == pytest.approx(float(change.mean()), abs=1e-5)
        assert one["low"] <= one["change"] <= one["high"]
    together = [one for one in done["removed"] if one["difference"] is not None]
    assert together and all(
        one["difference"] == pytest.approx(one["change"] - one["random"]) for one in together
    )


def model_of_before(model):
    """A copy without the hooks that are on now."""
    other = copy.deepcopy(model)
    for module in other.modules():
        module._forward_pre_hooks.clear()
    return other


def test_random_heads_are_of_the_same_layers_and_not_in_the_role(model, inspection):
    seen = []
    ablate(model, TOKENS, inspection, heads=1, draws=3, progress=lambda k, n, words: seen.append(words))
    assert any(words.startswith("random heads beside") for words in seen)


UP, NOTHING, NOISE = torch.full((16,), 0.3), torch.zeros(16), torch.linspace(-1, 1, 16)


@pytest.mark.parametrize(
    ("change", "others", "verdict"),
    [
        (UP, NOTHING, "matters, more than random heads"),
        (UP, UP + 0.2, "matters, less than random heads"),
        (UP, UP + 0.5 * NOISE, "matters, not told from random heads"),
        (0.3 * NOISE, 0.3 * NOISE.flip(0), "not shown to matter, not told from random heads"),
        (-UP, NOTHING, "harms, less than random heads"),
    ],
)
def test_the_verdict_follows_the_intervals(change, others, verdict):
    assert judged("sink", "0.0", change, others.expand(4, -1))["verdict"] == verdict


def test_a_model_without_a_next_token_is_refused():
    bert = tiny("bert")
    with pytest.raises(ValueError, match="predicts no next token"):
        ablate(bert, TOKENS, unsoft.lab.interpret.inspect(bert, TOKENS))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_predicted(model, side):
    """A padded sequence has the loss that it has alone: neither padding nor the token after it counts."""
    inputs = reading("llama", side)
    (batch,) = batches(inputs, None, 4, 64, model.device)
    with evaluating(model):
        padded = losses(model, [batch])
    alone = [
        loss(model, ids[kept.bool()][None])
        for ids, kept in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    torch.testing.assert_close(padded, torch.cat(alone), rtol=1e-5, atol=1e-5)
    whole = ablate(model, inputs, unsoft.lab.interpret.inspect(model, inputs), heads=1, draws=1)
    assert whole["tokens"] == int(inputs["attention_mask"].sum()) - 3, "one token of each sequence is given"
