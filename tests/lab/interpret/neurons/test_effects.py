"""The analytic effects of ablation against a model that runs ablated."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, VaultGemmaConfig, VaultGemmaForCausalLM

from tests.lab.interpret.inspection.tiny import GROUPED, WORDS, tiny
from tests.lab.interpret.neurons.planted import counts, planted_model, text
from tests.lab.interpret.neurons.reference import brute_force
from unsoft.lab.interpret.neurons import effects as module
from unsoft.lab.interpret.neurons.effects import NAMES, NeuronAblation, ablate
from unsoft.lab.interpret.neurons.parts import find_parts, read_stream, read_text
from unsoft.lab.interpret.neurons.weights import count_words, unigram

IDS = torch.randint(3, WORDS, (3, 24), generator=torch.Generator().manual_seed(3))


def capped():
    torch.manual_seed(2)
    return VaultGemmaForCausalLM(
        VaultGemmaConfig(**GROUPED, final_logit_softcapping=2.0, initializer_range=0.3)
    ).eval()


def tied():
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True, initializer_range=0.2)).eval()


MODELS = {name: lambda name=name: with_gain(tiny(name)) for name in ("llama", "gpt2", "neox", "opt", "qwen3")}
MODELS |= {"tied": lambda: with_gain(tied()), "softcap": lambda: with_gain(capped())}


@torch.no_grad()
def with_gain(model):
    """A final norm whose gain and shift are not those it is born with."""
    norm = find_parts(model).norm
    torch.manual_seed(5)
    norm.weight += 0.5 * torch.randn_like(norm.weight)
    if getattr(norm, "bias", None) is not None:
        norm.bias += 0.5 * torch.randn_like(norm.bias)
    return model


@torch.no_grad()
def measured(model, ids, neurons, counted, **options):
    parts = find_parts(model)
    stream = read_stream(parts, read_text(ids, None, 256, 4096), 4096)
    delta = stream.deviations()[:, neurons]
    ablation = NeuronAblation(stream.residual, stream.target, parts.writes()[neurons], delta)
    return ablate(parts.readout, unigram(counted), ablation, **options)


@pytest.mark.parametrize("name", MODELS)
def test_ablation_is_that_of_the_model(name):
    model, counted = MODELS[name](), count_words(IDS, WORDS)
    neurons = [1, 5, 20]
    result = measured(model, IDS, neurons, counted)
    for place, neuron in enumerate(neurons):
        expected = brute_force(model, IDS, neuron, counted)
        for kind in NAMES:
            ours = getattr(result, kind)[:, place].double()
            assert torch.allclose(ours, expected[kind], atol=1e-4), (kind, neuron)
    assert (
        float(result.loss.abs().max()) > 1e-3 and float((result.loss - result.loss_frozen).abs().max()) > 1e-5
    )


def test_the_tail_is_as_exact_as_the_whole(monkeypatch):
    """With few words summed one by one most of the probability is expanded,
    and some pairs are computed in full."""
    monkeypatch.setattr(module, "TOP", 12)
    full = []
    original = module._Reach._in_full

    def counted(self, result, raw, target, shifts):
        _, moving, _ = shifts[0]
        full.append((int(moving.sum()), moving.numel()))
        original(self, result, raw, target, shifts)

    monkeypatch.setattr(module._Reach, "_in_full", counted)
    model = planted_model()
    neurons = list(range(60))
    fast = measured(model, text()[:2], neurons, counts())
    computed, pairs = (sum(numbers) for numbers in zip(*full, strict=True))
    exact = measured(model, text()[:2], neurons, counts(), exactly=True)
    assert 0 < computed < pairs / 2
    for kind in NAMES:
        difference = (getattr(fast, kind).double() - getattr(exact, kind).double()).abs().max()
        assert float(difference) < 1e-4, kind


def test_blocks_of_neurons_change_nothing(monkeypatch):
    model = planted_model()
    whole = measured(model, text()[:1], list(range(40)), counts())
    monkeypatch.setattr(module, "_NUMBERS", 1500 * 7)
    monkeypatch.setattr(module, "_TOKENS", 10)
    pieces = measured(model, text()[:1], list(range(40)), counts())
    assert all(
        torch.allclose(getattr(whole, kind).double(), getattr(pieces, kind).double(), atol=5e-5)
        for kind in NAMES
    )
