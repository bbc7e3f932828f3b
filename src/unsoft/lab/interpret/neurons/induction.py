"""Texts that repeat themselves: does a neuron become more active the second time,
and does that hold the model back?

A model that has seen a text before can copy it, and its entropy falls. Neurons that rise then and whose
clipping lowers the entropy further keep the model from being too sure (Stolfo et al. 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.walk import evaluating, runner
from unsoft.lab.interpret.neurons.effects import Question, ablate
from unsoft.lab.interpret.neurons.frequency import Unigram
from unsoft.lab.interpret.neurons.parts import Parts, watched_inputs
from unsoft.lab.interpret.neurons.readout import Readout
from unsoft.lab.interpret.neurons.roles import ENTROPY
from unsoft.lab.interpret.neurons.statistics import Bootstrap
from unsoft.lab.interpret.neurons.stream import FIRST, LEAST, Text, in_rows
from unsoft.lab.interpret.neurons.whole import entropies

_SEQUENCES = 8
_CANDIDATES = 6
_CONTROLS = 3
_ROWS = 64


def induction_check(
    model: Any,
    parts: Parts,
    readout: Readout,
    unigram: Unigram,
    text: Text,
    records: list[dict[str, Any]],
    controls: Tensor,
    seed: int,
) -> list[dict[str, Any]]:
    """A record for each entropy neuron, candidate and some of their controls;
    none if sequences are too short.

    The first half of each sequence is read twice. In the second reading an activation is clipped at the
    neuron's mean of the first, on the side to which it rose.
    """
    half = text.sequences.shape[1] // 2
    if (half - FIRST - 1) * min(len(text.sequences), _SEQUENCES) < LEAST:
        return []
    groups = _groups(records, controls)
    places = list(groups)
    once = text.sequences[:_SEQUENCES, :half].to(model.device)
    with evaluating(model), watched_inputs(parts.downs[-1], parts.norm) as seen:
        runner(model)(input_ids=torch.cat([once, once], 1))
    residual = seen[parts.norm].float()
    activations = in_rows(seen[parts.downs[-1]], residual)[..., places].float()
    # The same words in both readings, each with the same word after it.
    first, second = slice(FIRST, half - 1), slice(half + FIRST, 2 * half - 1)
    target = once[:, FIRST + 1 :].flatten()
    before, after = activations[:, first].flatten(0, 1), activations[:, second].flatten(0, 1)
    streams = [residual[:, part].flatten(0, 1) for part in (first, second)]
    rise = after - before
    mean = before.mean(0)
    clipped = torch.where(rise.mean(0) > 0, after.minimum(mean), after.maximum(mean))
    writes = parts.writes(-1)[places]
    effects = ablate(readout, unigram, Question(streams[1], target, writes, clipped - after))
    bootstrap = Bootstrap(len(target), seed)
    rises = bootstrap.mean(rise / before.std(0).clamp_min(1e-12))
    changes, frozen = bootstrap.mean(effects.entropy), bootstrap.mean(effects.entropy_frozen)
    losses = bootstrap.mean(effects.loss)
    entropy = [
        float(torch.cat([entropies(readout.logits(x)) for x in stream.split(_ROWS)]).mean())
        for stream in streams
    ]
    return [
        {
            "layer": records[number]["layer"],
            "neuron": records[number]["neuron"],
            "group": groups[number],
            "activation_first": float(mean[place]),
            "activation_second": float(after[:, place].mean()),
            "rise": float(rises.value[place]),
            "rise_low": float(rises.low[place]),
            "rise_high": float(rises.high[place]),
            "entropy_first": entropy[0],
            "entropy_second": entropy[1],
            "clipping": float(changes.value[place]),
            "clipping_low": float(changes.low[place]),
            "clipping_high": float(changes.high[place]),
            "clipping_frozen": float(frozen.value[place]),
            "clipping_loss": float(losses.value[place]),
        }
        for place, number in enumerate(places)
    ]


def _groups(records: list[dict[str, Any]], controls: Tensor) -> dict[int, str]:
    """Places of neurons in the records, with what they are looked at for."""
    place = {record["neuron"]: at for at, record in enumerate(records)}
    found: dict[int, str] = {}
    for record in ENTROPY.members(records):
        found[place[record["neuron"]]] = "entropy"
    for record in ENTROPY.candidates(records)[:_CANDIDATES]:
        found.setdefault(place[record["neuron"]], "candidate")
    for at in list(found):
        for control in controls[at, :_CONTROLS].tolist():
            found.setdefault(control, "control")
    return found
