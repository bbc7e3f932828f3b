"""What ablating neurons of the last layer does to the model's predictions, without running the model again.

Setting neuron i to its mean adds ``delta * write_i`` to the stream. With the scale s of the final norm before
and s' after, logits move by

    shift = (s/s' - 1) * raw + delta/s' * reach_i
    raw = unembedding @ stream / s        reach_i = unembedding @ write_i

and with the scale frozen by ``delta/s * reach_i`` alone. So the logits of a token and the reach of a neuron
give everything, and no matrix is multiplied per neuron. Even so a sum of exponentials over 50,000 words for
each of 1,500 neurons and 4,000 tokens is too much: see :mod:`unsoft.lab.interpret.neurons.tail` for how most
of it is avoided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.frequency import Unigram
from unsoft.lab.interpret.neurons.readout import Readout
from unsoft.lab.interpret.neurons.tail import Shift, Tail
from unsoft.lab.interpret.neurons.whole import ROWS, changes

TOP = 128
"""Words of a token that are always summed one by one: its most likely."""
TOLERANCE = 5e-5
"""In nats: a pair of neuron and token whose expansion may be off by more is computed over all words."""
_TOKENS = 128
_NUMBERS = 80_000_000
"""In the reach of neurons that are looked at together: 320 MB."""


@dataclass(frozen=True)
class Effects:
    """Changes by ablation (tokens, neurons), after less before; ``frozen``: with the norm's scale held;
    ``held``: with the logits' component along word frequency held."""

    loss: Tensor
    loss_frozen: Tensor
    loss_held: Tensor
    entropy: Tensor
    entropy_frozen: Tensor
    kl: Tensor
    """Of the divergence of the model from the unigram distribution."""
    kl_held: Tensor
    changed: Tensor
    """1 where the most likely word became another one, else 0."""
    changed_frozen: Tensor


NAMES = tuple(field.name for field in fields(Effects))


@dataclass(frozen=True)
class Question:
    """Tokens, neurons and how each of them is to be changed: ``delta`` is (tokens, neurons)."""

    residual: Tensor
    target: Tensor
    writes: Tensor
    delta: Tensor


def ablate(
    readout: Readout,
    unigram: Unigram,
    question: Question,
    *,
    exactly: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """All effects of changing each neuron, alone, by ``delta`` at each token.

    ``exactly`` sums over all words everywhere, as is done anyway where logits have a soft-cap.
    """
    tokens, neurons = question.delta.shape
    kinds = {"changed": torch.int8, "changed_frozen": torch.int8}
    results = {name: torch.empty(tokens, neurons, dtype=kinds.get(name, torch.float32)) for name in NAMES}
    block = max(1, _NUMBERS // len(readout.unembedding))
    done, everything = 0, -(-neurons // block) * tokens
    for first in range(0, neurons, block):
        part = slice(first, first + block)
        reach = _Reach(readout, unigram, question.writes[part], exactly)
        for start in range(0, tokens, _TOKENS):
            rows = slice(start, min(start + _TOKENS, tokens))
            found = reach.effects(question.residual[rows], question.target[rows], question.delta[rows, part])
            for name, value in found.items():
                results[name][rows, part] = value.to(results[name].dtype).cpu()
            done += rows.stop - start
            if progress is not None:
                progress(done, everything)
    return Effects(**results)


class _Reach:
    """A block of neurons with what they reach in the vocabulary."""

    def __init__(self, readout: Readout, unigram: Unigram, writes: Tensor, exactly: bool) -> None:
        self.readout, self.unigram = readout, unigram
        self.exactly = exactly or readout.softcap is not None
        words = readout.unembedding
        # Logits have no zero of their own unless a cap gives them one; centred numbers are the smaller ones.
        self.words = words if readout.softcap is not None else words - words.mean(0)
        self.writes = readout.norm.centre(writes)
        self.by_neuron = self.writes @ self.words.mT
        if not self.exactly:
            self.tail = Tail(self.words, self.writes, self.by_neuron.mT.contiguous(), unigram.direction)
        self.along = self.by_neuron @ unigram.direction
        self.expected = self.by_neuron @ unigram.log_share.exp()

    def effects(self, residual: Tensor, target: Tensor, delta: Tensor) -> dict[str, Tensor]:
        norm, width = self.readout.norm, residual.shape[1]
        stream = norm.centre(residual)
        square = norm.square(residual)[:, None]
        moved = (
            square + (2 * delta * (stream @ self.writes.mT) + delta**2 * self.writes.square().sum(1)) / width
        )
        before, after = square.sqrt(), moved.sqrt()
        raw = stream @ self.words.mT / before
        total = Shift(before / after - 1, delta / after)
        frozen = Shift(torch.zeros_like(delta), delta / before)
        everywhere = torch.ones_like(delta, dtype=torch.bool)
        if self.exactly:
            found: dict[str, Any] = {name: torch.empty_like(delta) for name in NAMES}
            self._in_full(found, raw, target, total, frozen, everywhere, everywhere)
            return found
        chunk = self.tail.chunk(raw, self.readout.finish(raw).log_softmax(-1), min(TOP, raw.shape[1]))
        held = Shift(total.scale, total.reach, -self._component(raw, total))
        sums, sums_frozen, sums_held = chunk.sums(total), chunk.sums(frozen), chunk.sums(held, entropy=False)
        at_target = self.by_neuron[:, target].mT
        raw_target = raw.gather(1, target[:, None])
        likely = self.unigram.log_share.exp()
        raw_expected = (raw @ likely)[:, None]
        direction = self.unigram.direction
        shift_target = total.scale * raw_target + total.reach * at_target
        shift_expected = total.scale * raw_expected + total.reach * self.expected
        along = held.along
        assert along is not None
        found = {
            "loss": sums.total - shift_target,
            "loss_frozen": sums_frozen.total - frozen.reach * at_target,
            "loss_held": sums_held.total - shift_target - along * direction[target][:, None],
            "entropy": sums.entropy,
            "entropy_frozen": sums_frozen.entropy,
            "kl": sums.total - shift_expected,
            "kl_held": sums_held.total - shift_expected - along * (direction @ likely),
            "changed": sums.changed,
            "changed_frozen": sums_frozen.changed,
        }
        unsure = torch.maximum(sums.error, sums_held.error) > TOLERANCE
        self._in_full(found, raw, target, total, frozen, unsure, sums_frozen.error > TOLERANCE)
        return found

    def _component(self, raw: Tensor, shift: Shift) -> Tensor:
        """Of the shift along the direction of frequency."""
        return shift.scale * (raw @ self.unigram.direction)[:, None] + shift.reach * self.along

    def _in_full(
        self,
        found: dict[str, Any],
        raw: Tensor,
        target: Tensor,
        total: Shift,
        frozen: Shift,
        moving: Tensor,
        still: Tensor,
    ) -> None:
        """Replaces the effects of chosen pairs of tokens and neurons by those over the whole vocabulary."""
        for token in (moving | still).any(1).nonzero()[:, 0].tolist():
            before = self.readout.finish(raw[token])
            for shift, chosen, ending in ((total, moving, ""), (frozen, still, "_frozen")):
                for neurons in chosen[token].nonzero()[:, 0].split(ROWS):
                    moved = torch.addcmul(
                        (1 + shift.scale[token, neurons, None]) * raw[token],
                        shift.reach[token, neurons, None],
                        self.by_neuron[neurons],
                    )
                    same = target[token].expand(len(neurons))
                    exact = changes(self.unigram, before[None], self.readout.finish(moved), same)
                    for name, value in exact.items():
                        if (name + ending) in found:
                            found[name + ending][token, neurons] = value.to(found[name + ending].dtype)
