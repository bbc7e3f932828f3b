"""What a conversion is judged by: loss on held-out text, and how far each layer is from the original's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unsoft.lab.training.conversion.matching import Pair

_AT_ONCE = 512
"""Tokens that go through a model together."""


def _batches(windows: Tensor) -> tuple[Tensor, ...]:
    batches: tuple[Tensor, ...] = windows.split(max(1, _AT_ONCE // windows.shape[1]))
    return batches


@torch.no_grad()
def losses(model: PreTrainedModel, windows: Tensor) -> list[float]:
    """The mean loss of the next token, for each window."""
    model.eval()
    found = []
    for ids in _batches(windows):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        found += each.double().mean(1).tolist()
    return found


@torch.no_grad()
def layer_errors(pair: Pair, windows: Tensor) -> list[float]:
    """The errors of :meth:`Pair.errors`, averaged over batches."""
    pair.student.eval()
    if not pair.changed:
        return []
    found: list[float] = (
        torch.stack([pair.errors(ids) for ids in _batches(windows)]).double().mean(0).tolist()
    )
    return found


def mean_loss(each: list[float]) -> float:
    """Return the mean over windows; infinite where it is not a number, so that stages can be compared.

    >>> mean_loss([1.0, 3.0]), mean_loss([1.0, math.nan])
    (2.0, inf)
    """
    mean = sum(each) / len(each)
    return math.inf if math.isnan(mean) else mean


def perplexity(each: list[float]) -> float:
    """exp of the mean loss; infinite where that is too large for a number.

    >>> perplexity([0.0, 2.0]) == math.e, perplexity([1e9])
    (True, inf)
    """
    mean = mean_loss(each)
    return math.exp(mean) if mean < 700 else math.inf


def margin(each: list[float], original: list[float]) -> float:
    """Half of a 95 % interval of the mean difference of losses (nats), windows taken as independent.

    >>> margin([2.0, 2.0], [1.0, 1.0]), round(margin([2.0, 4.0], [1.0, 1.0]), 2)
    (0.0, 1.96)
    """
    apart = torch.tensor(each, dtype=torch.float64) - torch.tensor(original, dtype=torch.float64)
    return 0.0 if len(apart) < 2 else float(1.96 * apart.std() / math.sqrt(len(apart)))
