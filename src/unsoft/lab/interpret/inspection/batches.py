"""What a user gives to look at, texts or a batch, cut into small batches for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NO_MODEL_INPUT = ("labels", "overflow_to_sample_mapping", "special_tokens_mask", "offset_mapping", "length")


@dataclass(frozen=True)
class Batch:
    """A few sequences at a time."""

    inputs: dict[str, Any]
    labels: list[list[str]]
    """A word for each token of each sequence, padding left out."""

    @property
    def names(self) -> Tensor | None:
        """Integer tokens (batch, length), if the model reads such."""
        return self.inputs.get("input_ids")

    def kept(self, length: int) -> list[Tensor | None]:
        """For each sequence the positions that are not padding, None if all ``length`` are real."""
        mask = self.inputs.get("attention_mask")
        size = next(len(x) for x in self.inputs.values() if isinstance(x, Tensor))
        if mask is None or mask.shape != (size, length):
            return [None] * size
        return [None if bool(row.all()) else row.nonzero()[:, 0] for row in mask.bool()]

    def words(self, item: int, length: int) -> list[str]:
        """Labels of a sequence of ``length`` kept tokens; its positions where the model made tokens of its
        own."""
        labels = self.labels[item] if item < len(self.labels) else []
        return labels if len(labels) == length else [str(position) for position in range(length)]


def batches(
    given: Any,
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    device: torch.device,
    most: int | None = None,
) -> list[Batch]:
    """Texts (str or a sequence of them), token numbers (batch, length), or the keyword arguments of the
    model.

    Texts that are longer than ``max_length`` tokens are cut into several sequences. ``most`` is the largest
    number of sequences.

    >>> [cut] = batches(torch.tensor([[5, 6, 7]]), None, 8, 512, torch.device("cpu"))
    >>> cut.labels, cut.kept(3)
    ([['5', '6', '7']], [None])
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    if isinstance(given, Mapping):
        inputs = {name: value for name, value in given.items() if name not in NO_MODEL_INPUT}
    elif isinstance(given, Sequence) and given and all(isinstance(text, str) for text in given):
        inputs = _encoded(list(given), tokenizer, max_length)
    else:
        raise TypeError(
            "inspect: argument 'texts_or_batch' must be a text, a list of texts, a tensor of token numbers,"
            f" or a dict of the model's arguments, not {_described(given)}"
        )
    sizes = {len(x) for x in inputs.values() if isinstance(x, Tensor)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"inspect: argument 'texts_or_batch' holds tensors for {sorted(sizes) or 'no'} sequences; they"
            " must agree on one number, at least 1"
        )
    size = min(sizes) if most is None else min(*sizes, most)
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return [
        _cut(inputs, slice(at, min(at + batch_size, size)), tokenizer) for at in range(0, size, batch_size)
    ]


def _cut(inputs: dict[str, Any], part: slice, tokenizer: Any) -> Batch:
    cut = {name: x[part] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    numbers, mask = cut.get("input_ids"), cut.get("attention_mask")
    if mask is not None:  # columns that are padding in all of these sequences
        real = mask.bool().any(0).nonzero()[:, 0] if mask.dim() == 2 else None
        if real is not None and len(real) and int(real[-1]) + 1 < mask.shape[1]:
            end, length = int(real[-1]) + 1, mask.shape[1]
            cut = {
                name: x[:, :end]
                if isinstance(x, Tensor) and x.shape[1:2] == (length,) and x.dim() == 2
                else x
                for name, x in cut.items()
            }
            numbers, mask = cut.get("input_ids"), cut.get("attention_mask")
    labels = []
    if numbers is not None:
        for item, row in enumerate(numbers):
            real = row if mask is None else row[mask[item].bool()]
            labels.append(token_labels(real.tolist(), tokenizer))
    return Batch(cut, labels)


def _encoded(texts: list[str], tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError(
            "inspect: texts need argument 'tokenizer'; or give a dict such as tokenizer(texts,"
            " return_tensors='pt')"
        )
    found = tokenizer(texts, truncation=True, max_length=max_length, return_overflowing_tokens=True)
    columns = {name: rows for name, rows in found.items() if name not in NO_MODEL_INPUT}
    columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
    longest = max(map(len, columns["input_ids"]))
    if not longest:
        raise ValueError("inspect: argument 'texts_or_batch' holds no tokens")
    fill = {"input_ids": tokenizer.pad_token_id or 0}
    return {
        name: torch.tensor([row + [fill.get(name, 0)] * (longest - len(row)) for row in rows])
        for name, rows in columns.items()
    }


def token_labels(numbers: list[int], tokenizer: Any) -> list[str]:
    """A word for each token; spaces stay, so that word beginnings can be told."""
    if tokenizer is None:
        return [str(number) for number in numbers]
    return [tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in numbers]


def _described(given: Any) -> str:
    if isinstance(given, Sequence):
        return (
            f"a {type(given).__name__} of {', '.join(sorted({type(x).__name__ for x in given})) or 'nothing'}"
        )
    return type(given).__name__
