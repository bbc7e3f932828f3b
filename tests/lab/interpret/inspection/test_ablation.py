"""Losses without heads or their deletions, against models with changed weights; verdicts by their rules."""

import copy

import pytest
import torch

import unsoft
from tests.lab.interpret.inspection.tiny import reading, tiny
from unsoft.lab.interpret.inspection.ablation import ablate, judged, losses_without, without
from unsoft.lab.interpret.inspection.layout import find_layout
from unsoft.lab.interpret.models import batches, body_runner, evaluating

TOKENS = torch.randint(5, 25, (4, 24), generator=torch.Generator().manual_seed(0))
READ = reading("llama")["input_ids"]


@pytest.fixture(scope="module")
def model():
    return tiny("llama").eval()


@pytest.fixture(scope="module")
def found(model):
    return unsoft.lab.interpret.inspect(model, TOKENS)


def layout_of(model):
    parts = batches(TOKENS, None, 4, 64, model.device)
    with evaluating(model):
        return find_layout(model, body_runner(model), parts[0])


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


def test_the_numbers_are_those_of_the_losses(model, found):
    calls = []
    done = ablate(model, TOKENS, found, heads=2, draws=2, progress=lambda *x: calls.append(x))
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


def test_random_heads_are_of_the_same_layers_and_not_in_the_role(model, found):
    seen = []
    ablate(model, TOKENS, found, heads=1, draws=3, progress=lambda k, n, words: seen.append(words))
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
    assert judged("sink", "0.0", change, others.expand(4, -1)).verdict == verdict


def test_a_model_without_a_next_token_is_refused():
    bert = tiny("bert")
    with pytest.raises(ValueError, match="predicts no next token"):
        ablate(bert, TOKENS, unsoft.lab.interpret.inspect(bert, TOKENS))


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_without_a_head_is_without_its_columns_of_the_output_projection(name):
    model, ids = tiny(name), READ
    torch.testing.assert_close(losses_without(model, ids, []), loss(model, ids), rtol=1e-5, atol=1e-5)
    found = losses_without(model, ids, [(1, 2)], batch_size=2)
    layers = {"llama": "model.layers.1.self_attn.o_proj", "gpt2": "transformer.h.1.attn.c_proj"}
    weight = model.get_submodule(layers.get(name, "gpt_neox.layers.1.attention.dense")).weight
    with torch.no_grad():
        (weight if name == "gpt2" else weight.mT)[16:24] = 0  # inputs of the third head, of width 8
    torch.testing.assert_close(found, loss(model, ids), rtol=1e-5, atol=1e-5)


def test_without_deletions_against_loops_over_rows_and_sources():
    """One layer of softmax written out, with values from which what points against the source is taken."""
    model, ids = tiny("llama"), READ[:1]
    heads = [(0, head) for head in range(4)]
    found = losses_without(model, ids, heads, "deletion")
    layer = model.model.layers[0]
    states = model.model.embed_tokens(ids)[0].detach()
    seen = {}
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given: seen.update(out=given[0]))
    attention = layer.self_attn.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[0][0]
        normed = layer.input_layernorm(states)
        values = (normed @ layer.self_attn.v_proj.weight.mT).view(len(states), 2, 8)  # two key heads
    hook.remove()
    model.set_attn_implementation(attention)
    out = seen["out"].clone()
    for _, head in heads:
        through = layer.self_attn.o_proj.weight.detach()[:, 8 * head : 8 * head + 8]  # (width, 8)
        for source in range(len(states)):
            towards = through.mT @ states[source]
            along = float(values[source, head // 2] @ towards)
            if along < 0:
                for row in range(source, len(states)):
                    out[0, row, 8 * head : 8 * head + 8] -= (
                        weights[head, row, source] * along * towards / (towards @ towards)
                    )
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given: (out,))
    expected = loss(model, ids)
    hook.remove()
    assert float((found - loss(model, ids)).abs()) > 5e-4, "there was something to take"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_control_takes_something_else_and_the_model_stays_as_it_was():
    model, ids = tiny("llama"), READ
    before = {name: x.clone() for name, x in model.state_dict().items()}
    every = [(layer, head) for layer in range(2) for head in range(4)]
    deletion, control, again = (
        losses_without(model, ids, every, part, seed=1)
        for part in ("deletion", "as much elsewhere", "as much elsewhere")
    )
    assert torch.equal(control, again) and not torch.allclose(deletion, control)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(losses_without(model, ids, []), loss(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "part", "words"),
    [([(0, 4)], "head", r"\(0, 4\); the model has no such head"), ([], "nose", "'part' is 'nose'")],
)
def test_what_is_not_there_is_refused(heads, part, words):
    with pytest.raises(ValueError, match=words):
        losses_without(tiny("llama"), READ, heads, part)
