"""What the weights alone say of neurons: how much of each is invisible to the unembedding,
and what it reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.frequency import Unigram
from unsoft.lab.interpret.neurons.readout import Readout

SWEEP = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Sizes of the null space, of the width of the stream."""
DEFAULT = 0.01
_NEURONS = 128


@dataclass(frozen=True)
class Weights:
    """Of each neuron (neurons,)."""

    norm: Tensor
    rho: Tensor
    """Share of its length in the effective null space, the ``null`` directions that the unembedding sees
    least."""
    sweep: dict[int, Tensor]
    """``rho`` for other sizes of the null space."""
    null: int
    logit_variance: Tensor
    """Variance over words of the cosine between the neuron and the word (LogitVar)."""
    frequency_cosine: Tensor
    """Cosine between what it reaches and the direction of word frequency."""
    spectrum: Tensor
    """Singular values of the unembedding, largest first."""


def null_sizes(width: int) -> list[int]:
    """Numbers of directions that are tried, smallest first.

    >>> null_sizes(576), null_sizes(20)
    ([3, 6, 12, 29, 58], [1, 2])
    """
    return sorted({max(1, round(share * width)) for share in SWEEP})


def read_weights(readout: Readout, unigram: Unigram, writes: Tensor, null: int | None = None) -> Weights:
    """``null`` is the number of directions of the null space, 1 % of the width unless given."""
    width = writes.shape[1]
    usable = width - 1 if readout.norm.centred else width
    if null is None:
        null = max(1, round(DEFAULT * width))
    if isinstance(null, bool) or not isinstance(null, int) or not 1 <= null < usable:
        raise ValueError(
            f"neurons: argument 'null' must be a whole number from 1 to {usable - 1}, not {null!r}"
        )
    # A logit that all words share changes nothing, so the unembedding is centred over words.
    words = readout.unembedding - readout.unembedding.mean(0)
    writes = readout.norm.centre(writes)
    values, directions = torch.linalg.eigh(words.mT.double() @ words.double())
    if readout.norm.centred:  # the direction that a LayerNorm removes is no place to hide
        values, directions = values[1:], directions[:, 1:]
    norm = writes.norm(dim=1)
    inside = ((writes.double() @ directions) ** 2).cumsum(1)  # least visible directions first
    sweep = {
        size: (inside[:, size - 1].sqrt() / norm.double().clamp_min(1e-30)).float()
        for size in sorted({*null_sizes(usable), null})
    }
    lengths = words.norm(dim=1).clamp_min(1e-30)
    variance, cosine = torch.empty_like(norm), torch.empty_like(norm)
    for start in range(0, len(writes), _NEURONS):
        part = slice(start, start + _NEURONS)
        reach = writes[part] @ words.mT
        size = reach.norm(dim=1).clamp_min(1e-30)
        cosine[part] = reach @ unigram.direction / size
        variance[part] = (reach / lengths / norm[part, None].clamp_min(1e-30)).var(1, correction=0)
    spectrum = values.clamp_min(0.0).sqrt().flip(0).float()
    return Weights(norm, sweep[null], sweep, null, variance, cosine, spectrum)
