"""Residual streams, activations and next words of a model on a text, kept for the analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.models import body_runner, evaluating, recorded_inputs, replaced_inputs
from unsoft.lab.interpret.neurons.parts import ModelParts, check_readout

FIRST = 3
"""Positions at the start of a sequence that are skipped: the first token's stream is unlike all others."""
LEAST = 32
"""Smallest number of tokens to measure on."""


@dataclass(frozen=True)
class TokenSequences:
    """Sequences of tokens (sequences, length) without padding, and the tokens of the whole text to count."""

    sequences: Tensor
    all_tokens: Tensor


@dataclass(frozen=True)
class Stream:
    """Activations of one layer's neurons and input of the final norm at each measured token."""

    text: TokenSequences
    layer: int
    residual: Tensor
    """(tokens, width), the input of the final norm."""
    activations: Tensor
    """(tokens, neurons) of the layer."""
    target: Tensor
    """(tokens,), the next word."""
    sequence: Tensor
    position: Tensor
    """(tokens,), the sequence of each token and its position there."""

    @property
    def means(self) -> Tensor:
        """Mean activations (neurons,)."""
        return self.activations.mean(0)

    def deviations(self) -> Tensor:
        """Return (tokens, neurons): what mean ablation adds to each activation."""
        return self.means - self.activations


def read_text(text: Any, tokenizer: Any, length: int, tokens: int) -> TokenSequences:
    """Cut a text (str, with a tokenizer) or token ids (sequences, length) for at most ``tokens`` tokens.

    >>> read_text(torch.arange(80).view(2, 40), None, 256, 60).sequences.shape
    torch.Size([2, 40])
    """
    if isinstance(text, Tensor):
        if text.dim() != 2 or text.is_floating_point():
            raise TypeError(
                "neurons: argument 'text' as a tensor must hold token numbers (sequences, length), not"
                f" {text.dtype} of shape {tuple(text.shape)}"
            )
        rows, all_tokens = text, text.flatten()
    elif isinstance(text, str):
        if tokenizer is None:
            raise ValueError("neurons: a text needs argument 'tokenizer'; or give token numbers as a tensor")
        all_tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
        size = max(min(length, len(all_tokens)), 1)
        rows = all_tokens[: len(all_tokens) // size * size].view(-1, size)
    else:
        raise TypeError(
            f"neurons: argument 'text' must be a text or a tensor of token numbers, not {type(text).__name__}"
        )
    usable = max(rows.shape[1] - FIRST - 1, 0)  # the last token of a sequence has no next one
    if usable * len(rows) < LEAST:
        raise ValueError(
            f"neurons: argument 'text' is too short: {all_tokens.numel()} tokens leave {usable * len(rows)}"
            f" to look at, at least {LEAST} are needed"
        )
    return TokenSequences(rows[: -(-tokens // usable)], all_tokens)


def read_stream(
    parts: ModelParts,
    text: TokenSequences,
    layer: int,
    tokens: int,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Stream:
    """Run the model over the text, without its head, and keep what is needed of each token."""
    model, down, rows = parts.model, parts.downs[layer], text.sequences
    residuals, activations = [], []
    with evaluating(model), recorded_inputs(down, parts.norm) as seen:
        first = rows[:1].to(model.device)
        logits = model(first).logits
        check_readout(parts, seen[parts.norm], logits)
        if layer == parts.last:
            _check_addition(parts, first, seen)
        run = body_runner(model)
        for at in range(0, len(rows), batch_size):
            run(input_ids=rows[at : at + batch_size].to(model.device))
            residuals.append(seen[parts.norm][:, FIRST:-1].flatten(0, 1).float())
            activations.append(by_sequence(seen[down], seen[parts.norm])[:, FIRST:-1].flatten(0, 1).float())
            if progress is not None:
                progress(min(at + batch_size, len(rows)), len(rows))
    count, size = len(rows), rows.shape[1] - FIRST - 1
    return Stream(
        text,
        layer,
        torch.cat(residuals)[:tokens],
        torch.cat(activations)[:tokens],
        rows[:, FIRST + 1 :].flatten().to(model.device)[:tokens],
        torch.arange(count).repeat_interleave(size)[:tokens],
        torch.arange(FIRST, FIRST + size).repeat(count)[:tokens],
    )


def by_sequence(activations: Tensor, stream: Tensor) -> Tensor:
    """Return activations as (sequences, length, neurons), also for OPT, which flattens its tokens."""
    return activations.reshape(*stream.shape[:2], -1)


def _check_addition(parts: ModelParts, tokens: Tensor, seen: dict[Any, Tensor]) -> None:
    """Raise ValueError unless a neuron of the last layer only adds its row of the map to the stream.

    Tested on the neuron with the largest spread.
    """
    down, model = parts.downs[-1], parts.model
    before = seen[parts.norm].clone()
    activations = by_sequence(seen[down], before).clone()
    neuron = int(activations.flatten(0, 1).float().std(0).argmax())

    def silence(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., neuron] = 0
        return x

    with replaced_inputs(down, silence):
        body_runner(model)(input_ids=tokens)
    expected = activations[..., neuron, None] * parts.writes(-1)[neuron]
    error = float((before - seen[parts.norm] - expected).abs().max())
    if not error <= 1e-3 * float(expected.abs().max()) + 1e-4 * float(before.abs().max()):
        between = [name for name, _ in parts.blocks[-1].named_children() if "post" in name and "feed" in name]
        raise ValueError(
            f"neurons: the last MLP of {type(model).__name__} does not write straight into the stream that"
            f" the final norm reads: {between[0] if between else 'something'} stands between them"
        )
