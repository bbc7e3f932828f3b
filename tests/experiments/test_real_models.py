"""Losses without heads or their deletions, against models with changed weights and loops."""

import pytest
import torch

from experiments.real_models import ONES, losses_without, squashed
from tests.lab.interpret.inspection.tiny import reading, tiny

READ = reading("llama")["input_ids"]


def loss(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(-1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_without_a_head_is_without_its_columns_of_the_output_projection(name):
    model, ids = tiny(name), READ
    torch.testing.assert_close(losses_without(model, ids, []), loss(model, ids), rtol=1e-5, atol=1e-5)
    ablated = losses_without(model, ids, [(1, 2)], batch_size=2)
    layers = {"llama": "model.layers.1.self_attn.o_proj", "gpt2": "transformer.h.1.attn.c_proj"}
    weight = model.get_submodule(layers.get(name, "gpt_neox.layers.1.attention.dense")).weight
    with torch.no_grad():
        (weight if name == "gpt2" else weight.mT)[16:24] = 0  # inputs of the third head, of width 8
    torch.testing.assert_close(ablated, loss(model, ids), rtol=1e-5, atol=1e-5)


def test_without_deletions_against_loops_over_rows_and_sources():
    """One layer of softmax written out, with values from which what points against the source is taken."""
    model, ids = tiny("llama"), READ[:1]
    heads = [(0, head) for head in range(4)]
    ablated = losses_without(model, ids, heads, "deletion")
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
    assert float((ablated - loss(model, ids)).abs()) > 5e-4, "there was something to take"
    torch.testing.assert_close(ablated, expected, rtol=1e-5, atol=1e-5)


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
    [
        ([(0, 4)], "head", r"\(0, 4\); the model has no such head"),
        ([], "nose", "'part' must be .* not 'nose'"),
    ],
)
def test_what_is_not_there_is_refused(heads, part, words):
    with pytest.raises(ValueError, match=words):
        losses_without(tiny("llama"), READ, heads, part)


def test_over_squashing_of_uniform_attention_falls_like_one_over_n():
    """With queries of zero, one layer adds the mean of all values to the last token."""
    model = tiny("llama")
    model.model.layers = model.model.layers[:1]
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    apart = squashed(model, READ[:2, :4])
    assert len(apart) == len(ONES) and all(row[0] == 0 for row in apart)  # embeddings are the same token
    fall = apart[-1][-1] / apart[-2][-1]
    assert fall == pytest.approx(((ONES[-2] + 4) / (ONES[-1] + 4)) ** 2, rel=0.02)
