"""Models and the texts they read: checks, evaluation mode, hooks on inputs, batches of sequences."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Positions = slice | Tensor
"""Positions of a sequence that are not padding; ``slice(None)`` if none is."""
_NO_MODEL_INPUT = ("labels", "overflow_to_sample_mapping", "special_tokens_mask", "offset_mapping", "length")


def transformers_model(model: Any, caller: str) -> PreTrainedModel:
    """Return the transformers model inside ``model``; raise TypeError if there is none."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose graphs cannot be observed
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise TypeError(f"{caller}: argument 'model' must be a transformers model, not {kind}")
    return model


def single_stack(model: Any) -> PreTrainedModel:
    """Return a model that ``inspect`` supports; raise ValueError for an encoder with a decoder."""
    network = transformers_model(model, "inspect")
    if getattr(network.config, "is_encoder_decoder", False):
        raise ValueError(
            f"inspect: {type(network).__name__} is an encoder and a decoder; give one of them, such as"
            " model.get_encoder()"
        )
    return network


def name_of(model: Any) -> str:
    """Return the name that a model was loaded by, or that of its class."""
    return getattr(model, "name_or_path", "") or type(model).__name__


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; restore the mode of every module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def body_runner(model: nn.Module) -> Callable[..., None]:
    """Return a function that runs the model without its language-model head, which is wide and not needed."""
    body = getattr(model, "base_model", model)
    known = signatures.signature(body.forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    def run(**inputs: Any) -> None:
        body(**{name: x for name, x in inputs.items() if open_ended or name in known})

    return run


@contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    """Remove hooks at the end of the ``with`` block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replaced_inputs(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the first input x of ``module`` by ``change(x)`` inside the ``with`` block."""
    with hooked(module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))):
        yield


@contextmanager
def recorded_inputs(*modules: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the latest first input of each module inside the ``with`` block."""
    latest: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        latest[module] = (inputs[0] if inputs else next(iter(options.values()))).detach()

    with hooked(*(module.register_forward_pre_hook(record, with_kwargs=True) for module in modules)):
        yield latest


def matrix_of(module: nn.Module) -> Tensor | None:
    """Return the (inputs, outputs) matrix of a linear map, None for other modules."""
    if isinstance(module, nn.Linear):
        return module.weight.mT
    weight = getattr(module, "weight", None)
    return weight if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else None  # of GPT-2


@dataclass(frozen=True)
class InputBatch:
    """Arguments of a model for a few sequences."""

    inputs: dict[str, Any]
    labels: list[list[str]]
    """Text of each token of each sequence, without padding."""

    def __len__(self) -> int:
        return next(len(x) for x in self.inputs.values() if isinstance(x, Tensor))

    def real_positions(self, length: int) -> list[Positions]:
        """Return for each sequence of ``length`` tokens the positions that are not padding."""
        mask = self.inputs.get("attention_mask")
        if mask is None or mask.shape != (len(self), length):
            return [slice(None)] * len(self)
        return [slice(None) if bool(row.all()) else row.nonzero()[:, 0] for row in mask.bool()]

    def beginning(self, length: int) -> InputBatch:
        """Return the first sequence, cut to ``length`` tokens if there are only tokens and no padding."""
        first = {name: x[:1] if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        tensors = [x for x in first.values() if isinstance(x, Tensor)]
        mask = first.get("attention_mask", torch.ones(()))
        if "input_ids" in first and len({x.shape for x in tensors}) == 1 and bool(mask.all()):
            first |= {name: x[:, :length] for name, x in first.items() if isinstance(x, Tensor)}
        return InputBatch(first, self.labels[:1])

    def labels_of(self, item: int, length: int) -> list[str]:
        """Return the labels of a sequence of ``length`` real tokens; position numbers if it has none."""
        labels = self.labels[item] if item < len(self.labels) else []
        return labels if len(labels) == length else [str(position) for position in range(length)]


def batches(
    texts: Any,
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    device: torch.device,
    most: int | None = None,
) -> list[InputBatch]:
    """Split texts (str or several), token ids (batch, length), or a model's arguments into batches.

    Texts longer than ``max_length`` tokens are cut into several sequences. ``most`` limits the number of
    sequences.

    >>> [batch] = batches(torch.tensor([[5, 6, 7]]), None, 8, 512, torch.device("cpu"))
    >>> batch.labels, batch.real_positions(3)
    ([['5', '6', '7']], [slice(None, None, None)])
    """
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Tensor):
        texts = {"input_ids": texts}
    if isinstance(texts, Mapping):
        inputs = {name: value for name, value in texts.items() if name not in _NO_MODEL_INPUT}
    elif isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        inputs = _encode(list(texts), tokenizer, max_length)
    else:
        kind = type(texts).__name__
        if isinstance(texts, Sequence):
            kind = f"a {kind} of {', '.join(sorted({type(x).__name__ for x in texts})) or 'nothing'}"
        raise TypeError(
            "inspect: argument 'texts_or_batch' must be a text, a list of texts, a tensor of token numbers,"
            f" or a dict of the model's arguments, not {kind}"
        )
    sizes = {len(x) for x in inputs.values() if isinstance(x, Tensor)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"inspect: argument 'texts_or_batch' holds tensors for {sorted(sizes) or 'no'} sequences; they"
            " must agree on one number, at least 1"
        )
    size = min(sizes) if most is None else min(*sizes, most)
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    starts = range(0, size, batch_size)
    return [_slice(inputs, slice(at, min(at + batch_size, size)), tokenizer) for at in starts]


def _slice(inputs: dict[str, Any], rows: slice, tokenizer: Any) -> InputBatch:
    part = {name: x[rows] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    mask = part.get("attention_mask")
    if mask is not None and mask.dim() == 2:  # drop the columns at the end that are padding everywhere
        real = mask.bool().any(0).nonzero()[:, 0]
        size, length = mask.shape
        if len(real):
            part |= {
                name: x[:, : int(real[-1]) + 1]
                for name, x in part.items()
                if isinstance(x, Tensor) and x.shape == (size, length)
            }
            mask = part["attention_mask"]
    ids = part.get("input_ids")
    labels = [
        token_labels((row if mask is None else row[mask[item].bool()]).tolist(), tokenizer)
        for item, row in enumerate(() if ids is None else ids)
    ]
    return InputBatch(part, labels)


def _encode(texts: list[str], tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    if tokenizer is None:
        raise ValueError(
            "inspect: texts need argument 'tokenizer'; or give a dict such as tokenizer(texts,"
            " return_tensors='pt')"
        )
    encoded = tokenizer(texts, truncation=True, max_length=max_length, return_overflowing_tokens=True)
    columns = {name: rows for name, rows in encoded.items() if name not in _NO_MODEL_INPUT}
    columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
    longest = max(map(len, columns["input_ids"]))
    if not longest:
        raise ValueError("inspect: argument 'texts_or_batch' holds no tokens")
    fill = {"input_ids": tokenizer.pad_token_id or 0}
    return {
        name: torch.tensor([row + [fill.get(name, 0)] * (longest - len(row)) for row in rows])
        for name, rows in columns.items()
    }


def token_labels(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token; spaces are kept, since they mark the beginnings of words."""
    if tokenizer is None:
        return [str(number) for number in ids]
    return [tokenizer.decode([number], clean_up_tokenization_spaces=False) for number in ids]
