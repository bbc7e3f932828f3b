"""``scan``: ablate every neuron of a layer, measure the effects, and test them against similar neurons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.lab.interpret.models import name_of
from unsoft.lab.interpret.neurons.details import induction_check, neuron_details
from unsoft.lab.interpret.neurons.effects import NeuronAblation, ablate, ablate_layer
from unsoft.lab.interpret.neurons.parts import find_parts
from unsoft.lab.interpret.neurons.result import ROLES, Scan
from unsoft.lab.interpret.neurons.statistics import BLOCK, ROUNDS, choose_neurons, neuron_records
from unsoft.lab.interpret.neurons.stream import read_stream, read_text
from unsoft.lab.interpret.neurons.weights import check_words, count_words, read_weights, unigram

Progress = Callable[[str, int, int], None]


@torch.no_grad()
def scan(
    model: Any,
    text: str | Tensor,
    *,
    tokenizer: Any = None,
    layer: int | None = None,
    tokens: int = 4096,
    length: int = 256,
    null: int | None = None,
    counts: Tensor | None = None,
    candidates: int = 16,
    seed: int = 0,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Scan:
    """Find the neurons that regulate a model's confidence, through the final norm or word frequency.

    text
        A text (with ``tokenizer``), or token ids (sequences, length).
    layer
        By default the last, where all neurons are examined analytically. In another layer the model itself
        runs with neurons ablated, so only ``candidates`` for each role are examined, with controls.
    tokens, length
        Number of tokens to measure on, in sequences of this length.
    null
        Size of the effective null space, by default 1 % of the width.
    counts
        Number of occurrences of each word, (words,); by default counted in the text.
    progress
        Called with (stage, steps done, all steps).

    The scan is read-only: the model is unchanged afterwards.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> result = scan(LlamaForCausalLM(config), torch.randint(50, (4, 30)))
    >>> len(result.neurons), result.layer, 0 <= result.neurons[0]["rho"] <= 1
    (24, 1, True)
    """
    sizes = {"tokens": tokens, "length": length, "candidates": candidates, "batch_size": batch_size}
    for name, value in sizes.items():
        whole_number("neurons", name, value)
    report: Progress = progress or (lambda stage, done, total: None)
    parts = find_parts(model)
    number = parts.check_layer(layer)
    readout = parts.readout
    cut = read_text(text, tokenizer, length, tokens)
    words = len(readout.unembedding)
    counts = count_words(cut.all_tokens, words) if counts is None else check_words(counts, words)
    frequency = unigram(counts)
    stream = read_stream(parts, cut, number, tokens, batch_size, partial(report, "reading the text"))
    writes = parts.writes(number)
    weights = read_weights(readout, frequency, writes, null)
    ablating = partial(report, "ablating neurons")
    if number == parts.last:
        chosen = torch.arange(len(weights.norm))
        ablation = NeuronAblation(stream.residual, stream.target, writes, stream.deviations())
        effects = ablate(readout, frequency, ablation, progress=ablating)
    else:
        chosen = choose_neurons(weights, stream.activations, candidates, seed)
        effects = ablate_layer(parts, frequency, stream, chosen, ablating)
    records, controls = neuron_records(number, chosen, weights, stream.activations[:, chosen], effects, seed)
    details: dict[int, Any] = {}
    induction: list[dict[str, Any]] = []
    if number == parts.last:
        rankings = [
            ranking(records)[:candidates] for role in ROLES for ranking in (role.ranked, role.candidates)
        ]
        shown = sorted({record["neuron"] for ranking in rankings for record in ranking})
        details = neuron_details(parts, frequency, stream, shown, tokenizer)
        induction = induction_check(parts, frequency, cut, records, controls["mediated"], seed)
    settings = {
        "tokens": len(stream.target),
        "sequences": len(cut.sequences),
        "length": cut.sequences.shape[1],
        "null": weights.null,
        "width": writes.shape[1],
        "words": words,
        "counted": frequency.counted,
        "controls": controls["mediated"].shape[1],
        "block": BLOCK,
        "rounds": ROUNDS,
        "seed": seed,
        "norm": "LayerNorm" if readout.norm.centred else "RMSNorm",
        "style": parts.style,
        "softcap": readout.softcap,
    }
    spectrum = weights.spectrum.tolist()
    name = name_of(parts.model)
    return Scan(name, number, len(parts.blocks), settings, records, spectrum, induction, details)
