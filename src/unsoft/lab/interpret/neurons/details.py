"""What a person wants to see of one neuron: how predictions change as it is removed,
and where it is active."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.batches import token_labels
from unsoft.lab.interpret.neurons.effects import Question, ablate
from unsoft.lab.interpret.neurons.frequency import Unigram
from unsoft.lab.interpret.neurons.parts import Parts
from unsoft.lab.interpret.neurons.readout import Readout
from unsoft.lab.interpret.neurons.stream import Stream, Text

DOSES = (-1.0, -0.5, 0.5, 1.0, 1.5, 2.0)
"""How much of a neuron's deviation from its mean is taken away: 1 is mean ablation,
below 0 it is made stronger."""
_TOKENS = 128
_SHOWN = 8
_CONTEXT = 8


def neuron_details(
    readout: Readout,
    unigram: Unigram,
    parts: Parts,
    stream: Stream,
    text: Text,
    neurons: list[int],
    tokenizer: Any,
) -> dict[int, dict[str, Any]]:
    """By number of the neuron: ``curve``, mean changes by dose, and ``tokens``,
    where it differs most from its mean."""
    chosen = torch.tensor(neurons)
    step = max(1, len(stream.target) // _TOKENS)
    rows = torch.arange(0, len(stream.target), step)[:_TOKENS]
    writes, delta = parts.writes(-1)[chosen], stream.deviations()[:, chosen]
    curves: dict[int, list[dict[str, float]]] = {number: [_point(0.0)] for number in neurons}
    for dose in DOSES:
        question = Question(stream.residual[rows], stream.target[rows], writes, dose * delta[rows])
        found = ablate(readout, unigram, question)
        means = {
            name: getattr(found, name).mean(0).tolist()
            for name in ("entropy", "entropy_frozen", "loss", "loss_frozen")
        }
        for place, number in enumerate(neurons):
            curves[number].append(_point(dose, **{name: values[place] for name, values in means.items()}))
    return {
        number: {
            "curve": sorted(curves[number], key=lambda point: point["dose"]),
            "tokens": _strongest(stream, text, -delta[:, place], number, tokenizer),
        }
        for place, number in enumerate(neurons)
    }


def _point(
    dose: float,
    entropy: float = 0.0,
    entropy_frozen: float = 0.0,
    loss: float = 0.0,
    loss_frozen: float = 0.0,
) -> dict[str, float]:
    return {
        "dose": dose,
        "entropy": entropy,
        "entropy_frozen": entropy_frozen,
        "loss": loss,
        "loss_frozen": loss_frozen,
    }


def _strongest(
    stream: Stream, text: Text, deviation: Tensor, number: int, tokenizer: Any
) -> list[dict[str, Any]]:
    """Tokens at which the neuron is farthest from its mean, with the words before and the word that came
    next."""
    result = []
    for at in deviation.abs().topk(min(_SHOWN, len(deviation))).indices.tolist():
        sequence, position = int(stream.sequence[at]), int(stream.position[at])
        row = text.sequences[sequence]
        labels = token_labels(row[max(0, position - _CONTEXT) : position + 2].tolist(), tokenizer)
        result.append(
            {
                "activation": float(stream.activations[at, number]),
                "before": "".join(labels[:-2]),
                "token": labels[-2],
                "next": labels[-1],
            }
        )
    return result
