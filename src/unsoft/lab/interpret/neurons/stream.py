"""What the model computes on a text, kept for the analysis: streams,
activations and the words that came next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.walk import evaluating, runner
from unsoft.lab.interpret.neurons.parts import Parts, is_last, replaced_inputs, watched_inputs
from unsoft.lab.interpret.neurons.readout import Readout, check_readout

FIRST = 3
"""Positions at the start of a sequence that are left out: the first token's stream is unlike all others."""
LEAST = 32
"""Tokens below which nothing is measured."""


@dataclass(frozen=True)
class Text:
    """Sequences of tokens (sequences, length), all real, and the tokens of the whole text to count."""

    sequences: Tensor
    everything: Tensor


@dataclass(frozen=True)
class Stream:
    """At each token that is looked at: what one layer's neurons did and what the final norm was given."""

    residual: Tensor
    """(tokens, width), what enters the final norm."""
    activations: Tensor
    """(tokens, neurons) of the layer."""
    target: Tensor
    """(tokens,), the word that came next."""
    sequence: Tensor
    position: Tensor
    """(tokens,), where each stands: its sequence and its place there."""

    @property
    def means(self) -> Tensor:
        """(neurons,)."""
        return self.activations.mean(0)

    def deviations(self) -> Tensor:
        """(tokens, neurons): what mean ablation adds to each activation."""
        return self.means - self.activations


def read_text(given: Any, tokenizer: Any, length: int, tokens: int) -> Text:
    """A text (str, with a tokenizer) or token numbers (sequences, length), cut for at most ``tokens`` tokens.

    >>> read_text(torch.arange(80).view(2, 40), None, 256, 60).sequences.shape
    torch.Size([2, 40])
    """
    if isinstance(given, Tensor):
        if given.dim() != 2 or given.is_floating_point():
            raise TypeError(
                "neurons: argument 'text' as a tensor must hold token numbers (sequences, length), not"
                f" {given.dtype} of shape {tuple(given.shape)}"
            )
        rows, everything = given, given.flatten()
    elif isinstance(given, str):
        if tokenizer is None:
            raise ValueError("neurons: a text needs argument 'tokenizer'; or give token numbers as a tensor")
        everything = torch.tensor(tokenizer(given, verbose=False)["input_ids"], dtype=torch.long)
        size = min(length, len(everything))
        rows = everything[: len(everything) // max(size, 1) * size].view(-1, max(size, 1))
    else:
        raise TypeError(
            "neurons: argument 'text' must be a text or a tensor of token numbers, not"
            f" {type(given).__name__}"
        )
    usable = max(rows.shape[1] - FIRST - 1, 0)  # the last token of a sequence has no next one
    if usable * len(rows) < LEAST:
        raise ValueError(
            f"neurons: argument 'text' is too short: {everything.numel()} tokens leave {usable * len(rows)}"
            f" to look at, at least {LEAST} are needed"
        )
    return Text(rows[: -(-tokens // usable)], everything)


def read_stream(
    model: Any,
    parts: Parts,
    readout: Readout,
    text: Text,
    layer: int,
    tokens: int,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Stream:
    """Runs the model over the text, without its head, and keeps what is needed of each token."""
    down, residuals, activations = parts.downs[layer], [], []
    device = model.device
    with evaluating(model), watched_inputs(down, parts.norm) as seen:
        first = text.sequences[:1].to(device)
        logits = model(first).logits
        check_readout(model, readout, seen[parts.norm], logits)
        if is_last(layer, parts):
            _check_addition(model, parts, first, seen)
        run = runner(model)
        for at in range(0, len(text.sequences), batch_size):
            run(input_ids=text.sequences[at : at + batch_size].to(device))
            residuals.append(seen[parts.norm][:, FIRST:-1].flatten(0, 1).float())
            activations.append(in_rows(seen[down], seen[parts.norm])[:, FIRST:-1].flatten(0, 1).float())
            if progress is not None:
                progress(min(at + batch_size, len(text.sequences)), len(text.sequences))
    count, size = text.sequences.shape[0], text.sequences.shape[1] - FIRST - 1
    kept = slice(0, tokens)
    return Stream(
        torch.cat(residuals)[kept],
        torch.cat(activations)[kept],
        text.sequences[:, FIRST + 1 :].flatten().to(device)[kept],
        torch.arange(count).repeat_interleave(size)[kept],
        torch.arange(FIRST, FIRST + size).repeat(count)[kept],
    )


def in_rows(activations: Tensor, stream: Tensor) -> Tensor:
    """Activations as (sequences, length, neurons), also of OPT, which has all its tokens in one row."""
    return activations.reshape(*stream.shape[:2], -1)


def _check_addition(model: Any, parts: Parts, tokens: Tensor, seen: dict[Any, Tensor]) -> None:
    """Does a neuron of the last layer add its row of the map to the stream, and nothing else?

    Tried on one.
    """
    down = parts.downs[-1]
    before = seen[parts.norm].clone()
    activations = in_rows(seen[down], before).clone()
    neuron = int(activations.flatten(0, 1).float().std(0).argmax())

    def silence(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., neuron] = 0
        return x

    with replaced_inputs(down, silence):
        runner(model)(input_ids=tokens)
    expected = activations[..., neuron, None] * parts.writes(-1)[neuron]
    error = float((before - seen[parts.norm] - expected).abs().max())
    if not error <= 1e-3 * float(expected.abs().max()) + 1e-4 * float(before.abs().max()):
        between = [name for name, _ in parts.blocks[-1].named_children() if "post" in name and "feed" in name]
        reason = f"{between[0]} stands between them" if between else "something stands between them"
        raise ValueError(
            f"neurons: the last MLP of {type(model).__name__} does not write straight into the stream that"
            f" the final norm reads: {reason}"
        )
