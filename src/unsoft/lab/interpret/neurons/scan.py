"""``scan``: ablate every neuron of the last layer, measure the effects, and test them against similar ones.

Single neurons get details: ablation curves, tokens that activate them, and their role in repeated texts. A
model that has seen a text before can copy it, and its entropy falls. Neurons whose activation rises then, and
whose clipping lowers the entropy further, keep the model from being too sure (Stolfo et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.lab.interpret.models import body_runner, evaluating, name_of, recorded_inputs, token_labels
from unsoft.lab.interpret.neurons import parts as reading
from unsoft.lab.interpret.neurons.effects import NeuronAblation, ablate, entropies
from unsoft.lab.interpret.neurons.parts import FIRST, LEAST, ModelParts, Stream, TokenSequences, by_sequence
from unsoft.lab.interpret.neurons.result import ENTROPY, ROLES, Scan
from unsoft.lab.interpret.neurons.statistics import BLOCK, ROUNDS, Bootstrap, neuron_records
from unsoft.lab.interpret.neurons.weights import Unigram, count_words, read_weights, unigram

DOSES = (-1.0, -0.5, 0.5, 1.0, 1.5, 2.0)
"""Fractions of a neuron's deviation from its mean that are removed: 1 is mean ablation, below 0 amplifies."""
_CURVES = ("entropy", "entropy_frozen", "loss", "loss_frozen")
_TOKENS = 128
_SHOWN = 8
_CONTEXT = 8
_SEQUENCES = 8
_CANDIDATES = 6
_CONTROLS = 3
_ROWS = 64
Progress = Callable[[str, int, int], None]


@torch.no_grad()
def scan(
    model: Any,
    text: str | Tensor,
    *,
    tokenizer: Any = None,
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
    tokens, length
        Number of tokens to measure on, in sequences of this length.
    null
        Size of the effective null space, by default 1 % of the width.
    counts
        Number of occurrences of each word, (words,); by default counted in the text.
    candidates
        Number of neurons of each role that get details, by weights and by effect.
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
    parts = reading.find_parts(model)
    readout = parts.readout
    cut = reading.read_text(text, tokenizer, length, tokens)
    words = len(readout.unembedding)
    counts = count_words(cut.all_tokens, words) if counts is None else counts
    if counts.dim() == 1 and len(counts) != words:
        problem = f"has {len(counts)} numbers; the vocabulary has {words} words"
        raise ValueError(f"neurons: argument 'counts' {problem}")
    frequency = unigram(counts)
    stream = reading.read_stream(parts, cut, tokens, batch_size, partial(report, "reading the text"))
    writes = parts.writes()
    weights = read_weights(readout, frequency, writes, null)
    ablation = NeuronAblation(stream.residual, stream.target, writes, stream.deviations())
    effects = ablate(readout, frequency, ablation, progress=partial(report, "ablating neurons"))
    records, controls = neuron_records(parts.last, weights, stream.activations, effects, seed)
    rankings = [ranking(records)[:candidates] for role in ROLES for ranking in (role.ranked, role.candidates)]
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
    spectrum, name = weights.spectrum.tolist(), name_of(parts.model)
    return Scan(name, parts.last, len(parts.blocks), settings, records, spectrum, induction, details)


def neuron_details(
    parts: ModelParts, unigram: Unigram, stream: Stream, neurons: list[int], tokenizer: Any
) -> dict[int, dict[str, Any]]:
    """Return by neuron ``curve``, mean changes by dose, and ``tokens``, those farthest from its mean."""
    chosen = torch.tensor(neurons)
    step = max(1, len(stream.target) // _TOKENS)
    rows = torch.arange(0, len(stream.target), step)[:_TOKENS]
    writes, delta = parts.writes()[chosen], stream.deviations()[:, chosen]
    curves = {0.0: {name: [0.0] * len(neurons) for name in _CURVES}}
    for dose in DOSES:
        ablation = NeuronAblation(stream.residual[rows], stream.target[rows], writes, dose * delta[rows])
        effects = ablate(parts.readout, unigram, ablation)
        curves[dose] = {name: getattr(effects, name).mean(0).tolist() for name in _CURVES}
    return {
        number: {
            "curve": [
                {"dose": dose} | {name: curves[dose][name][index] for name in _CURVES}
                for dose in sorted(curves)
            ],
            "tokens": _strongest(stream, -delta[:, index], number, tokenizer),
        }
        for index, number in enumerate(neurons)
    }


def _strongest(stream: Stream, deviation: Tensor, number: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tokens at which the neuron is farthest from its mean, with context and next word."""
    result = []
    for at in deviation.abs().topk(min(_SHOWN, len(deviation))).indices.tolist():
        row, position = stream.text.sequences[int(stream.sequence[at])], int(stream.position[at])
        labels = token_labels(row[max(0, position - _CONTEXT) : position + 2].tolist(), tokenizer)
        words = {"before": "".join(labels[:-2]), "token": labels[-2], "next": labels[-1]}
        result.append({"activation": float(stream.activations[at, number])} | words)
    return result


def induction_check(
    parts: ModelParts,
    unigram: Unigram,
    text: TokenSequences,
    records: list[dict[str, Any]],
    controls: Tensor,
    seed: int,
) -> list[dict[str, Any]]:
    """Return a record per entropy neuron, candidate and some of their controls; none for short sequences.

    The model reads the first half of each sequence twice. In the second reading an activation is clipped at
    the neuron's mean of the first, on the side to which it rose.
    """
    model, half = parts.model, text.sequences.shape[1] // 2
    if (half - FIRST - 1) * min(len(text.sequences), _SEQUENCES) < LEAST:
        return []
    groups = _groups(records, controls)
    chosen = list(groups)
    once = text.sequences[:_SEQUENCES, :half].to(model.device)
    with evaluating(model), recorded_inputs(parts.down, parts.norm) as seen:
        body_runner(model)(input_ids=torch.cat([once, once], 1))
    residual = seen[parts.norm].float()
    activations = by_sequence(seen[parts.down], residual)[..., chosen].float()
    # The same words in both readings, each with the same next word.
    first, second = slice(FIRST, half - 1), slice(half + FIRST, 2 * half - 1)
    target = once[:, FIRST + 1 :].flatten()
    before, after = activations[:, first].flatten(0, 1), activations[:, second].flatten(0, 1)
    streams = [residual[:, part].flatten(0, 1) for part in (first, second)]
    rise = after - before
    mean = before.mean(0)
    clipped = torch.where(rise.mean(0) > 0, after.minimum(mean), after.maximum(mean))
    writes = parts.writes()[chosen]
    ablation = NeuronAblation(streams[1], target, writes, clipped - after)
    effects = ablate(parts.readout, unigram, ablation)
    bootstrap = Bootstrap(len(target), seed)
    entropy = [
        float(torch.cat([entropies(parts.readout.logits(x)) for x in stream.split(_ROWS)]).mean())
        for stream in streams
    ]
    columns = {
        "activation_first": mean,
        "activation_second": after.mean(0),
        **bootstrap.mean(rise / before.std(0).clamp_min(1e-12)).columns("rise"),
        "entropy_first": torch.full_like(mean, entropy[0], dtype=torch.float64),
        "entropy_second": torch.full_like(mean, entropy[1], dtype=torch.float64),
        **bootstrap.mean(effects.entropy).columns("clipping"),
        "clipping_frozen": bootstrap.mean(effects.entropy_frozen).value,
        "clipping_loss": bootstrap.mean(effects.loss).value,
    }
    return [
        {name: records[number][name] for name in ("layer", "neuron")}
        | {"group": groups[number]}
        | {name: float(values[index]) for name, values in columns.items()}
        for index, number in enumerate(chosen)
    ]


def _groups(records: list[dict[str, Any]], controls: Tensor) -> dict[int, str]:
    """Return indices of records with the reason why each neuron is examined."""
    index_of = {record["neuron"]: index for index, record in enumerate(records)}
    groups = {index_of[record["neuron"]]: "entropy" for record in ENTROPY.members(records)}
    for record in ENTROPY.candidates(records)[:_CANDIDATES]:
        groups.setdefault(index_of[record["neuron"]], "candidate")
    for index in list(groups):
        for control in controls[index, :_CONTROLS].tolist():
            groups.setdefault(control, "control")
    return groups
