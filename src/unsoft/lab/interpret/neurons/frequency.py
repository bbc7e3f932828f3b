"""How often words occur, and the direction in the space of logits along which they differ by that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unigram:
    """``log_share`` (words,) are logarithms of frequencies; ``direction`` is their centred unit vector."""

    log_share: Tensor
    direction: Tensor
    counted: int
    """How many tokens were counted."""


def unigram(counts: Tensor) -> Unigram:
    """From how often each word occurs; one is added to each, so that no logarithm is infinite.

    >>> found = unigram(torch.tensor([7.0, 1.0, 0.0]))
    >>> [round(float(x), 3) for x in found.log_share.exp()], abs(round(float(found.direction.sum()), 5))
    ([0.727, 0.182, 0.091], 0.0)
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
    """How often each of so many words occurs."""
    return torch.bincount(tokens.flatten().cpu(), minlength=words)


def read_counts(path: Path) -> Tensor:
    """A file of counts: JSON, a list with one number for each word of the vocabulary."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"neurons: the counts in {path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise ValueError(f"neurons: the counts in {path} are not JSON") from None
    if not isinstance(found, list) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in found
    ):
        raise ValueError(f"neurons: the counts in {path} must be a JSON list with a number for each word")
    return torch.tensor(found, dtype=torch.float64)


def check_words(counts: Tensor, words: int) -> Tensor:
    """Counts for a vocabulary of so many words."""
    if counts.dim() == 1 and len(counts) != words:
        raise ValueError(
            f"neurons: argument 'counts' has {len(counts)} numbers, the model knows {words} words"
        )
    return counts
