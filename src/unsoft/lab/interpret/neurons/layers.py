"""Neurons of other layers than the last: the model itself runs with each of them ablated, several at a time.

Only the blocks from the layer on run again, on what they were given the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret.inspection.walk import evaluating, runner
from unsoft.lab.interpret.neurons.effects import NAMES, Effects
from unsoft.lab.interpret.neurons.frequency import Unigram
from unsoft.lab.interpret.neurons.parts import Parts, replaced_inputs, watched_inputs
from unsoft.lab.interpret.neurons.readout import Readout
from unsoft.lab.interpret.neurons.records import likeness, place_of
from unsoft.lab.interpret.neurons.roles import TOP
from unsoft.lab.interpret.neurons.statistics import matched_controls
from unsoft.lab.interpret.neurons.stream import FIRST, Stream, Text
from unsoft.lab.interpret.neurons.weights import Weights
from unsoft.lab.interpret.neurons.whole import changes

_COPIES = 8
"""Ablations that run together."""
_ROWS = 64
_CONTROLS = 4
"""Drawn for each candidate; all of them together serve every candidate."""


def choose_neurons(weights: Weights, activations: Tensor, candidates: int, seed: int) -> Tensor:
    """Numbers of the strongest candidates by weights for both roles, and controls like them, in order."""
    count = min(candidates, len(weights.norm))
    best = [figure.abs().topk(count).indices for figure in (weights.rho, weights.frequency_cosine)]
    named = torch.cat(best).unique()
    ordinary = (place_of(weights.rho) >= TOP) & (place_of(weights.frequency_cosine) >= TOP)
    ordinary[named] = False
    if int(ordinary.sum()) <= _CONTROLS:
        return torch.arange(len(weights.norm))
    drawn = matched_controls(likeness(weights.norm, activations), ordinary, _CONTROLS, seed)
    chosen: Tensor = torch.cat([named, drawn[named].flatten()]).unique()
    return chosen


def ablate_layer(
    model: Any,
    parts: Parts,
    readout: Readout,
    unigram: Unigram,
    text: Text,
    stream: Stream,
    layer: int,
    chosen: Tensor,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """Effects of setting each of the chosen neurons, alone, to its mean."""
    results = {name: torch.zeros(len(stream.target), len(chosen)) for name in NAMES}
    means = stream.means.to(model.dtype)
    done = 0
    with evaluating(model):
        for sequence, row in enumerate(text.sequences.to(model.device)):
            places = (stream.sequence == sequence).nonzero()[:, 0]
            if not len(places):
                break
            calls, final = _first_run(model, parts, layer, row)
            for start in range(0, len(chosen), _COPIES):
                part = chosen[start : start + _COPIES]
                ablated = _again(parts, layer, calls, part, means[part])
                for place, states in enumerate(ablated):
                    found = _compare(readout, unigram, final, states.float(), stream.target[places])
                    for name, value in found.items():
                        results[name][places, start + place] = value.cpu()
            done += 1
            if progress is not None:
                progress(done, len(text.sequences))
    return Effects(**results)


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _first_run(model: Any, parts: Parts, layer: int, row: Tensor) -> tuple[list[Call], Tensor]:
    """What each block from ``layer`` on was called with, and the stream (length, width) that the norm was
    given."""
    calls: list[Call] = []

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((module, given, named))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in parts.blocks[layer:]]
    try:
        with watched_inputs(parts.norm) as seen:
            runner(model)(input_ids=row[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    again = _run(calls, 1)
    if not torch.allclose(again[0], seen[parts.norm][0], rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"neurons: the blocks of {type(model).__name__} cannot be run one after the other from layer"
            f" {layer} on: the stream does not come out as before; only the last layer can be looked at"
        )
    return calls, seen[parts.norm][0].float()


def _run(calls: list[Call], copies: int) -> Tensor:
    """Runs the blocks one after the other on copies of what the first was given; (copies, length, width)."""
    _, given, named = calls[0]
    states: Tensor = (given[0] if given else named["hidden_states"]).expand(copies, -1, -1)
    for block, given, named in calls:
        rest = {name: value for name, value in named.items() if name != "hidden_states"}
        output = block(states, *given[1:], **rest)
        states = output if isinstance(output, Tensor) else output[0]
    return states


def _again(parts: Parts, layer: int, calls: list[Call], neurons: Tensor, means: Tensor) -> Tensor:
    """The same with another neuron at its mean in each copy."""
    rows = torch.arange(len(neurons))

    def silence(x: Tensor) -> Tensor:
        flat = x.view(len(neurons), -1, x.shape[-1]).clone()  # OPT has its tokens in one row
        flat[rows, :, neurons] = means[:, None]
        return flat.view(x.shape)

    with replaced_inputs(parts.downs[layer], silence):
        return _run(calls, len(neurons))


def _compare(
    readout: Readout, unigram: Unigram, before: Tensor, after: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Effects at the tokens of one sequence, with the norm's scale its own and frozen."""
    before, after = (x[FIRST:][: len(target)] for x in (before, after))
    pieces: dict[str, list[Tensor]] = {}
    for start in range(0, len(target), _ROWS):
        part = slice(start, start + _ROWS)
        square = readout.norm.square(before[part])
        logits = readout.logits(before[part])
        found = changes(unigram, logits, readout.logits(after[part]), target[part])
        frozen = changes(unigram, logits, readout.logits(after[part], square), target[part])
        found |= {f"{name}_frozen": frozen[name] for name in ("loss", "entropy", "changed")}
        for name, value in found.items():
            pieces.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in pieces.items()}
