"""Figures from weights alone: how much of a neuron the unembedding cannot see, and its effect on logits.

Word frequencies define a direction in the space of logits, along which words differ by how often they occur.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.lab.interpret.neurons.parts import Readout

SWEEP = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Sizes of the null space, as fractions of the width of the stream."""
DEFAULT = 0.01
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


def read_counts(path: Path) -> Tensor:
    """Read counts from a JSON list with one number for each word of the vocabulary."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"neurons: the counts in {path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise ValueError(f"neurons: the counts in {path} are not JSON") from None
    numbers = isinstance(counts, list) and all(type(count) in (int, float) for count in counts)
    if not numbers:
        raise ValueError(f"neurons: the counts in {path} must be a JSON list with a number for each word")
    return torch.tensor(counts, dtype=torch.float64)


@dataclass(frozen=True)
class NeuronWeights:
    """Figures of each neuron (neurons,)."""

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
    """Cosine between its effect on logits and the direction of word frequency."""
    spectrum: Tensor
    """Singular values of the unembedding, largest first."""


def null_sizes(width: int) -> list[int]:
    """Return the sizes of the null space in the sweep, smallest first.

    >>> null_sizes(576), null_sizes(20)
    ([3, 6, 12, 29, 58], [1, 2])
    """
    return sorted({max(1, round(share * width)) for share in SWEEP})


def read_weights(
    readout: Readout, frequency: Unigram, writes: Tensor, null: int | None = None
) -> NeuronWeights:
    """Compute the figures; ``null`` is the size of the null space, by default 1 % of the width."""
    width = writes.shape[1]
    usable = width - 1 if readout.norm.centred else width
    null = max(1, round(DEFAULT * width)) if null is None else null
    whole_number("neurons", "null", null, 1, usable - 1)
    # A logit that all words share changes nothing, so the unembedding is centred over words.
    words = readout.unembedding - readout.unembedding.mean(0)
    writes = readout.norm.centre(writes)
    values, directions = torch.linalg.eigh(words.mT.double() @ words.double())
    if readout.norm.centred:  # a LayerNorm removes this direction, so nothing can be hidden there
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
        cosine[part] = reach @ frequency.direction / reach.norm(dim=1).clamp_min(1e-30)
        variance[part] = (reach / lengths / norm[part, None].clamp_min(1e-30)).var(1, correction=0)
    spectrum = values.clamp_min(0.0).sqrt().flip(0).float()
    return NeuronWeights(norm, sweep[null], sweep, null, variance, cosine, spectrum)
