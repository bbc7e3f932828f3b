"""Changes of predictions from logits before and after, with every word of the vocabulary summed: exact,
and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.frequency import Unigram

ROWS = 8
"""Rows of logits at a time: they should stay in the processor's cache."""


def changes(unigram: Unigram, before: Tensor, after: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of loss, entropy, divergence and best word, also with the component along word frequency held:
    (rows,) each.

    Logits ``after`` are (rows, words), ``before`` too or (1, words); ``target`` is (rows,).

    >>> from unsoft.lab.interpret.neurons.frequency import unigram
    >>> after = torch.tensor([[0.0, 0.0, 2.0]])
    >>> found = changes(unigram(torch.tensor([5, 2, 1])), torch.zeros(1, 3), after, torch.tensor([2]))
    >>> bool(found["loss"] < 0), bool(found["entropy"] < 0), float(found["changed"])
    (True, True, 1.0)
    """
    start, end = _sums(before), _sums(after)
    direction, likely = unigram.direction, unigram.log_share.exp()
    shift = after - before
    along = shift @ direction
    held = _sums(torch.addr(after, along, direction, alpha=-1), entropy=False)
    at_target, expected = shift.gather(1, target[:, None])[:, 0], shift @ likely
    total, total_held = end["total"] - start["total"], held["total"] - start["total"]
    return {
        "loss": total - at_target,
        "loss_held": total_held - at_target + along * direction[target],
        "entropy": end["entropy"] - start["entropy"],
        "kl": total - expected,
        "kl_held": total_held - expected + along * (direction @ likely),
        "changed": (end["best"] != start["best"]).float(),
    }


def entropies(logits: Tensor) -> Tensor:
    """Of the predictions of rows of logits, in nats.

    >>> round(float(entropies(torch.zeros(1, 8)).exp()), 4)
    8.0
    """
    return _sums(logits)["entropy"]


def _sums(logits: Tensor, entropy: bool = True) -> dict[str, Tensor]:
    """Of rows of logits: the logarithm of the sum of exponentials, entropy and the most likely word."""
    best = logits.max(-1)
    below = logits - best.values[:, None]  # small numbers where probability is, so that sums are accurate
    weights = below.exp()
    sums = weights.sum(-1)
    found = {"total": sums.log() + best.values}
    if entropy:
        found |= {"entropy": sums.log() - weights.mul_(below).sum(-1) / sums, "best": best.indices}
    return found
