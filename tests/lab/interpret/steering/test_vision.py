"""Vision-aware steering on four families of image-text models."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import unsoft
from tests.lab.interpret.steering.image_text import GRIDS, IMAGE, image_text, written
from unsoft.lab.interpret.steering import steering
from unsoft.lab.interpret.steering.vision import (
    Captioned,
    contributions,
    log_likelihoods,
    masked,
    most_relevant,
    noise,
    relevance,
    vision_states,
    visual_columns,
    visual_grid,
)


@pytest.fixture(params=GRIDS)
def case(request):
    model, inputs = image_text(request.param)
    return request.param, model, inputs, *written(model, inputs)


def test_one_pass_over_the_caption_is_what_generation_saw(case):
    name, model, inputs, caption, logits = case
    expected = logits.log_softmax(-1).gather(1, caption[:, None])[:, 0]
    assert torch.allclose(log_likelihoods(model, inputs, caption), expected, atol=1e-4)
    assert visual_grid(model, inputs) == GRIDS[name]


def test_everything_runs_and_leaves_no_trace(case):
    name, model, inputs, caption, _ = case
    before = model(**inputs).logits
    setting = {key: getattr(model.config, key)._attn_implementation for key in model.config.sub_configs}
    example = Captioned(inputs, caption)
    states = vision_states(model, [example, example], alpha=-100.0, negative="without")
    result = states.directions("pca")
    assert result.site == "mlp" and list(result.vectors) == [0, 1]
    assert torch.equal(model(**inputs).logits, before)
    assert setting == {
        key: getattr(model.config, key)._attn_implementation for key in model.config.sub_configs
    }
    with steering(model, result, 3.0):
        assert not torch.equal(written(model, inputs)[1], case[4])
    assert torch.equal(written(model, inputs)[1], case[4])


def test_contributions_against_attention_of_our_own():
    """Weights from plain torch, gradients with respect to what is added to them, products in numpy."""
    model, inputs = image_text("llava")
    caption, _ = written(model, inputs)
    result = contributions(model, inputs, caption, [0, 2])
    text = torch.cat([inputs["input_ids"], caption[None]], 1)
    length, layers = text.shape[1], 2
    added = torch.zeros(layers, 4, length, length, requires_grad=True)
    kept = {}

    def attention(module, query, key, value, mask, scaling, **options):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        causal = torch.full((length, length), -torch.inf).triu(1)
        weights = (query @ key.mT * scaling + causal).softmax(-1)
        kept[module.layer_idx] = weights[0].detach()
        return ((weights + added[module.layer_idx]) @ value).transpose(1, 2), None

    AttentionInterface.register("ours-for-a-test", attention)
    model.model.language_model.set_attn_implementation("ours-for-a-test")
    logits = model(input_ids=text, pixel_values=inputs["pixel_values"]).logits[0].log_softmax(-1)
    columns = (text[0] == IMAGE).nonzero()[:, 0].numpy()
    for row, token in zip(result, (0, 2), strict=True):
        place = inputs["input_ids"].shape[1] + token - 1
        (slope,) = torch.autograd.grad(logits[place, caption[token]], added, retain_graph=True)
        flow = np.eye(length)
        for layer in range(layers):
            product = (slope[layer] * kept[layer]).double().numpy()
            flow = flow + np.maximum(product, 0).mean(0) @ flow
        assert np.allclose(row, flow[place, columns], rtol=1e-3, atol=1e-7)
        assert row.max() > 0


def test_frozen_parameters_do_not_matter():
    model, inputs = image_text("llava")
    caption, _ = written(model, inputs)
    before = contributions(model, inputs, caption, [1])
    assert torch.equal(contributions(model.requires_grad_(False), inputs, caption, [1]), before)


def test_masks_cover_the_regions_of_their_tokens():
    model, inputs = image_text("llava")
    hidden = torch.zeros(16, dtype=torch.bool)
    hidden[6] = True  # row 1, column 2 of 4 by 4, 4 pixels each
    pixels, changed = inputs["pixel_values"], masked(model, inputs, hidden)["pixel_values"]
    mean = pixels.mean((-2, -1))[0]
    assert torch.allclose(changed[0, :, 4:8, 8:12], mean[:, None, None].expand(3, 4, 4))
    changed[0, :, 4:8, 8:12] = pixels[0, :, 4:8, 8:12]
    assert torch.equal(changed, pixels)
    model, inputs = image_text("qwen2_vl")
    changed = masked(model, inputs, torch.tensor([False, True, False, False]))["pixel_values"]
    assert (changed != inputs["pixel_values"]).any(1).tolist() == [False] * 4 + [True] * 4 + [False] * 8


def test_a_masked_region_is_not_seen():
    """The feature of the token whose region is masked changes most where the tower hardly mixes."""
    model, inputs = image_text("llava")
    hidden = torch.zeros(16, dtype=torch.bool)
    hidden[6] = True
    with torch.no_grad():
        embed = model.model.vision_tower.embeddings
        before, after = (embed(x["pixel_values"])[0, 1:] for x in (inputs, masked(model, inputs, hidden)))
    assert (before != after).any(1).nonzero()[:, 0].tolist() == [6]


def test_noise_has_the_colours_of_the_picture():
    pixels = torch.randn(1, 3, 64, 64) * torch.tensor([1.0, 2.0, 3.0])[:, None, None] + 5
    drawn = noise({"pixel_values": pixels}, 0)["pixel_values"]
    assert torch.allclose(drawn.mean((-2, -1)), pixels.mean((-2, -1)), atol=0.2)
    assert torch.allclose(drawn.std((-2, -1)), pixels.std((-2, -1)), atol=0.2)
    assert abs(torch.corrcoef(torch.stack([drawn.flatten(), pixels.flatten()]))[0, 1]) < 0.05
    assert not torch.equal(drawn, noise({"pixel_values": pixels}, 1)["pixel_values"])


def test_what_all_tokens_share_is_taken_off(monkeypatch):
    """A sink that every word looks at is no reason for any of them."""
    model, inputs = image_text("llava")
    maps = torch.full((3, 16), 0.1, dtype=torch.float64)
    maps[:, 0] = 10.0  # the sink
    maps[1, 9] = 1.0
    monkeypatch.setattr("unsoft.lab.interpret.steering.vision.contributions", lambda *given: maps.clone())
    monkeypatch.setattr(
        "unsoft.lab.interpret.steering.vision.likelihood_ratios",
        lambda *given: torch.tensor([0.0, 3.0, 0.5]),
    )
    result = relevance(model, inputs, torch.tensor([20, 21, 22]))
    assert result.visual.tolist() == [False, True, False]
    assert result.maps[1].argmax() == 9 and result.maps[1].flatten()[0] == 0 and result.maps[0].sum() == 0
    assert most_relevant(result, 1 / 16).nonzero()[:, 0].tolist() == [9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": None}, "needs image and text here, and there is not a picture"),
        ({"input_ids": torch.tensor([[1, 10, 11]])}, "hold no image token"),
        ({"input_ids": torch.tensor([[IMAGE], [IMAGE]])}, "one example at a time"),
        (
            {"input_ids": torch.tensor([[1, *[IMAGE] * 15, 7]])},
            "15 visual tokens are no grid over one picture",
        ),
        ({"pixel_values": torch.zeros(1, 2, 3, 16, 16)}, "cut pictures into tiles are not supported"),
    ],
)
def test_bad_examples(change, message):
    model, inputs = image_text("llava")
    given = {name: value for name, value in (inputs | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        visual_grid(model, given)


def test_bad_arguments(tiny):
    model, inputs = image_text("llava")
    caption, _ = written(model, inputs)
    examples = [Captioned(inputs, caption)] * 2
    with pytest.raises(
        ValueError, match="only 0 of 2 captions have a word that needs its picture by more than 99"
    ):
        vision_states(model, examples, alpha=99.0)
    for wrong in (torch.tensor([IMAGE]), caption[:0]):
        with pytest.raises(ValueError, match="at least one token, and no image token"):
            log_likelihoods(model, inputs, wrong)
    with pytest.raises(ValueError, match="'share' must be between 0 and 1, not 1.5"):
        vision_states(model, examples, share=1.5)
    with pytest.raises(ValueError, match="'negative' must be 'original' or 'without'"):
        vision_states(model, examples, negative="blurred")
    with pytest.raises(ValueError, match="2 is not among the 2 layers"):
        vision_states(model, examples, layers=2)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM needs image and text here, and there is not an image token"
    ):
        visual_columns(tiny("llama"), inputs)
    with pytest.raises(ValueError, match="mechanisms were swapped"):
        contributions(unsoft.hf.swap(model, "cog"), inputs, caption, [0])
