"""Measurements of a trained language model besides its score."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unsoft import measure
from unsoft.lab.tasks import IGNORE, Batch
from unsoft.lab.tasks.draw import generator, integers
from unsoft.lab.tasks.language import LanguageTask
from unsoft.lab.training.model import to_model

_ROWS, _AT_ONCE = 16, 4
"""Rows of each measurement, and how many of them go through the model at a time."""
_COPIED = 64
"""Tokens of a random passage that is repeated."""


@torch.no_grad()
def language_figures(
    model: PreTrainedModel, task: LanguageTask, device: torch.device
) -> dict[str, list[Any]]:
    """Return figures of a language model.

    loss_by_position
        Triples of the first position, the last position and the bits per byte between them, up to four times
        the length of training. Positions count from the beginning of a document or row.
    copy, induction
        Bits per token that a model saves on random tokens that occurred before: on the second of two equal
        passages, and on the token after a single repeated token, where nothing else hints at it. 0 for a
        model that does not look back.
    entropy, negative_share
        Mean over rows of the attention weights, for each layer: :func:`unsoft.measure.entropy` in nats, and
        the share of absolute weight that is negative.
    outliers
        Largest absolute activation over the root mean square, after each layer; the mean over rows.
    """
    model.eval()
    entropy, negative, outliers = [], [], []
    for batch in _pieces(task.sample(_ROWS, seed=0), task, device):
        outputs = model(**batch, output_attentions=True, output_hidden_states=True)
        weights = [layer.float() for layer in outputs["attentions"]]
        entropy.append([measure.entropy(layer).mean().item() for layer in weights])
        negative.append([measure.negative_share(layer).mean().item() for layer in weights])
        states = [state.float().flatten(1) for state in outputs["hidden_states"][1:]]
        outliers.append([(x.abs().amax(1) / x.square().mean(1).sqrt()).mean().item() for x in states])
    return {
        "loss_by_position": _loss_by_position(model, task, device),
        "copy": [_saved(model, *_copied(task), task, device)],
        "induction": [_saved(model, *_repeated(task), task, device)],
        "entropy": _mean(entropy),
        "negative_share": _mean(negative),
        "outliers": _mean(outliers),
    }


def _mean(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows, dtype=torch.double).mean(0).tolist()


def _pieces(batch: Batch, task: LanguageTask, device: torch.device) -> list[dict[str, Tensor]]:
    """Return a batch in pieces, as keywords of a model without labels."""
    pieces = zip(batch.inputs.split(_AT_ONCE), batch.labels.split(_AT_ONCE), strict=True)
    whole = [to_model(Batch(*piece), task, 0) for piece in pieces]
    return [{name: one[name].to(device) for name in one if name != "labels"} for one in whole]


def _bits(model: PreTrainedModel, batch: Batch, task: LanguageTask, device: torch.device) -> Tensor:
    """Return the bits of every label, 0 where there is none; (rows, length)."""
    rows = []
    pieces = _pieces(batch, task, device)
    for keywords, labels in zip(pieces, batch.labels.split(_AT_ONCE), strict=True):
        logits = model(**keywords)["logits"].float().transpose(1, 2)
        options: dict[str, Any] = {"reduction": "none", "ignore_index": IGNORE}
        nats = torch.nn.functional.cross_entropy(logits, labels.to(device), **options)
        rows.append(nats.cpu() / math.log(2))
    return torch.cat(rows)


def _loss_by_position(model: PreTrainedModel, task: LanguageTask, device: torch.device) -> list[list[float]]:
    longest = task.sweep()[-1]
    assert isinstance(longest, LanguageTask)
    batch = longest.sample(_ROWS, seed=2)
    bits = _bits(model, batch, longest, device)
    positions, asked = longest.positions(batch.inputs), batch.labels != IGNORE
    found, first = [], 0
    while first < longest.length:
        last = max(2 * first, 1)
        here = asked & (positions >= first) & (positions < last)
        if bool(here.any()):
            found.append([first, last - 1, bits[here].mean().item() / task.corpus.bytes_per_token])
        first = last
    return found


def _saved(
    model: PreTrainedModel, batch: Batch, second: Tensor, task: LanguageTask, device: torch.device
) -> float:
    """Return the mean bits of labels where they are new, minus those where they were seen before."""
    bits = _bits(model, batch, task, device)
    return (bits[~second].mean() - bits[second].mean()).item()


def _copied(task: LanguageTask) -> tuple[Batch, Tensor]:
    """Return random passages twice, and which labels belong to the second copy."""
    size = min(_COPIED, task.length // 2)
    random = generator(0, "copy")
    passage = integers(task.begins, (_ROWS, size), random)
    rows = torch.cat([torch.full((_ROWS, 1), task.begins), passage, passage], 1)
    second = torch.zeros(_ROWS, 2 * size, dtype=torch.bool)
    second[:, size + 1 :] = True  # the first token of the second copy cannot be known
    return Batch(rows[:, :-1], rows[:, 1:]), second


def _repeated(task: LanguageTask) -> tuple[Batch, Tensor]:
    """Return different tokens in which one pair occurs twice, and the label after its second start."""
    size = min(4 * _COPIED, task.length, task.begins - 1)
    random = generator(0, "induction")
    tokens = torch.stack([torch.randperm(task.begins, generator=random)[:size] for _ in range(_ROWS)])
    rows, place = torch.arange(_ROWS), integers(size // 2, (_ROWS,), random)
    again = size // 2 + integers(size // 2 - 1, (_ROWS,), random)
    tokens[rows, again], tokens[rows, again + 1] = tokens[rows, place], tokens[rows, place + 1]
    inputs = torch.cat([torch.full((_ROWS, 1), task.begins), tokens], 1)
    second = torch.zeros(_ROWS, size, dtype=torch.bool)
    second[rows, again + 1] = True
    return Batch(inputs[:, :-1], inputs[:, 1:]), second
