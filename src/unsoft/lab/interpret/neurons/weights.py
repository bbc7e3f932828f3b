"""Figures from weights alone: how much of a neuron the unembedding cannot see, and its effect on logits.

Word frequencies define a direction in the space of logits, along which words differ by how often they occur.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.lab.interpret.neurons.parts import Readout

NULL = 0.01
"""Size of the null space, as a fraction of the width of the stream."""
_NEURONS = 128


@dataclass(frozen=True)
class Unigram:
    """``log_share`` (words,) are logarithms of frequencies; ``direction`` is their centred unit vector."""

    log_share: Tensor
    direction: Tensor
    counted: int
    """Number of counted tokens."""


def unigram(counts: Tensor) -> Unigram:
    """Return frequencies from counts of words; one is added to each, so that no logarithm is infinite.

    >>> frequency = unigram(torch.tensor([7.0, 1.0, 0.0]))
    >>> [round(float(x), 3) for x in frequency.log_share.exp()]
    [0.727, 0.182, 0.091]
    >>> abs(round(float(frequency.direction.sum()), 5))
    0.0
    """
    if counts.dim() != 1 or not bool((torch.isfinite(counts) & (counts >= 0)).all()):
        raise ValueError(
            "neurons: argument 'counts' must be one number for each word, finite and not negative,"
            f" not {counts.dtype} of shape {tuple(counts.shape)}"
        )
    share = (counts.double() + 1) / (counts.double() + 1).sum()
    centred = share.log() - share.log().mean()
    if float(centred.norm()) < 1e-9:
        raise ValueError(
            "neurons: all words are counted equally often, so there is no direction of frequency; give a"
            " longer text or other counts"
        )
    return Unigram(share.log().float(), (centred / centred.norm()).float(), int(counts.sum()))


def count_words(tokens: Tensor, words: int) -> Tensor:
    """Return how often each of ``words`` words occurs."""
    return torch.bincount(tokens.flatten().cpu(), minlength=words)


@dataclass(frozen=True)
class NeuronWeights:
    """Figures of each neuron (neurons,)."""

    norm: Tensor
    rho: Tensor
    """Share of its length in the effective null space, the ``null`` directions that the unembedding sees
    least."""
    null: int
    logit_variance: Tensor
    """Variance over words of the cosine between the neuron and the word (LogitVar)."""
    frequency_cosine: Tensor
    """Cosine between its effect on logits and the direction of word frequency."""
    spectrum: Tensor
    """Singular values of the unembedding, largest first."""


def read_weights(
    readout: Readout, frequency: Unigram, writes: Tensor, null: int | None = None
) -> NeuronWeights:
    """Compute the figures; ``null`` is the size of the null space, by default 1 % of the width."""
    width = writes.shape[1]
    usable = width - 1 if readout.norm.centred else width
    null = max(1, round(NULL * width)) if null is None else null
    whole_number("neurons", "null", null, 1, usable - 1)
    # A logit that all words share changes nothing, so the unembedding is centred over words.
    words = readout.unembedding - readout.unembedding.mean(0)
    writes = readout.norm.centre(writes)
    values, directions = torch.linalg.eigh(words.mT.double() @ words.double())
    if readout.norm.centred:  # a LayerNorm removes this direction, so nothing can be hidden there
        values, directions = values[1:], directions[:, 1:]
    norm = writes.norm(dim=1)
    inside = (writes.double() @ directions[:, :null]).norm(dim=1)  # least visible directions first
    rho = (inside / norm.double().clamp_min(1e-30)).float()
    lengths = words.norm(dim=1).clamp_min(1e-30)
    variance, cosine = torch.empty_like(norm), torch.empty_like(norm)
    for start in range(0, len(writes), _NEURONS):
        part = slice(start, start + _NEURONS)
        reach = writes[part] @ words.mT
        cosine[part] = reach @ frequency.direction / reach.norm(dim=1).clamp_min(1e-30)
        variance[part] = (reach / lengths / norm[part, None].clamp_min(1e-30)).var(1, correction=0)
    spectrum = values.clamp_min(0.0).sqrt().flip(0).float()
    return NeuronWeights(norm, rho, null, variance, cosine, spectrum)
