"""Statistics while training, against the measures of dense weights; and the recipes that use them."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import unsoft
from unsoft import measure
from unsoft.lab.interpret import AttentionStats

RECIPES = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text().split("```python\n")[1:]
MEASURES = {
    "entropy": measure.entropy,
    "first_share": measure.sink_mass,
    "negative_share": measure.negative_share,
}


def run(number):
    scope = {"__name__": "recipe"}
    exec(compile(RECIPES[number].partition("```")[0], f"recipe {number}", "exec"), scope)
    return scope


@pytest.mark.parametrize("name", ["cog", "logn+softmax", "gated+cog", "linear-elu1"])
def test_they_are_the_measures_of_the_weights(name):
    torch.manual_seed(0)
    mechanism = unsoft.mechanism(name, heads=4, head_dim=32)
    q, k, v = (torch.randn(2, heads, 150, 32) for heads in (4, 2, 2))
    logged = []
    stats = AttentionStats(logged.append, model=torch.nn.ModuleDict({"mechanism": mechanism}), every=2)
    options = {"is_causal": True, "enable_gqa": True}
    _, weights = copy.deepcopy(mechanism)(q, k, v, **options, return_weights=True)
    for _ in range(4):
        mechanism(q, k, v, **options)
        mechanism(q[:, :, :7], k[:, :, :7], v[:, :, :7], **options)  # as checkpointing: only the first counts
        stats.step()
    assert len(logged) == 2 and logged[0] == logged[1] == stats.latest
    for key, function in MEASURES.items():
        expected = float(function(weights.detach())[..., 1:].double().mean())
        assert stats.latest[f"attention/{key}"] == pytest.approx(expected, abs=1e-5)
    parameters = {f"attention/{name}" for name, _ in mechanism.named_parameters()}
    assert set(stats.latest) == parameters | {f"attention/{key}" for key in MEASURES}


def test_models_and_steps_that_cannot_be_measured_raise():
    with pytest.raises(ValueError, match="Linear has no mechanism of unsoft"):
        AttentionStats(model=torch.nn.Linear(2, 2))
    layer = unsoft.nn.MultiheadAttention(8, 2, mechanism="cog").eval()
    stats, x = AttentionStats(model=layer), torch.randn(3, 1, 8)
    layer(x, x, x)
    with pytest.raises(RuntimeError, match="must be in training mode"):
        stats.step()
    assert not layer.mechanism._forward_pre_hooks


def test_recipe_of_a_plain_loop(capsys):
    scope = run(0)
    assert scope["losses"][-1] < 0.7 * scope["losses"][0]
    assert capsys.readouterr().out.count("attention/h.1.attn.attend/entropy") == 2


def test_recipe_of_transformers_trainer():
    scope = run(1)
    history = [row for row in scope["trainer"].state.log_history if any("negative_share" in x for x in row)]
    assert [row["step"] for row in history] == [1, 3]
    assert 0.1 < history[0]["attention/model.layers.1.self_attn/negative_share"] < 0.9
    assert scope["again"].model.layers[0].self_attn.unsoft.label == "cog"
    assert not scope["model"].model.layers[0].self_attn.unsoft.mechanism._forward_pre_hooks


def test_recipe_of_peft():
    scope = run(2)
    torch.testing.assert_close(scope["actual"], scope["expected"], rtol=0, atol=1e-6)
    names = [name for name, x in scope["model"].named_parameters() if x.requires_grad]
    assert any("lora_A" in name for name in names) and any("unsoft.modules_to_save" in name for name in names)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
@pytest.mark.filterwarnings("ignore")  # Lightning's own, of what torch deprecates
def test_recipe_of_lightning():
    scope = run(3)
    assert scope["stats"].steps == 4
    assert 0.1 < scope["stats"].latest["attention/model.model.layers.0.self_attn/negative_share"] < 0.9
