"""Effects of ablating neurons of the last layer on the model's predictions.

The model need not run again. Setting neuron i to its mean adds ``delta * write_i`` to the
stream. With the scale s of the final norm before and s' after, logits move by

    shift = (s/s' - 1) * raw + delta/s' * reach_i
    raw = unembedding @ stream / s        reach_i = unembedding @ write_i

and with the scale frozen by ``delta/s * reach_i`` alone. So the logits of a token and the reach of a neuron
determine everything, and no matrix is multiplied per neuron. A sum of exponentials over 50,000 words for each
of 1,500 neurons and 4,000 tokens would still be too slow; :mod:`unsoft.lab.interpret.neurons.tail` avoids
most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.parts import Readout
from unsoft.lab.interpret.neurons.tail import Shift, Tail, TailMoments
from unsoft.lab.interpret.neurons.weights import Unigram

TOP = 128
"""Most likely words of a token, which are always summed one by one."""
TOLERANCE = 5e-5
"""In nats: pairs of neuron and token whose expansion may be off by more are computed over all words."""
_TOKENS = 128
_NUMBERS = 80_000_000
"""Size of the reach of neurons that are processed together: 320 MB."""
_CACHED_ROWS = 8
"""Rows of logits at a time, few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class Effects:
    """Changes by ablation (tokens, neurons), after minus before; ``frozen``: with the norm's scale held;
    ``held``: with the logits' component along word frequency held."""

    loss: Tensor
    loss_frozen: Tensor
    loss_held: Tensor
    entropy: Tensor
    entropy_frozen: Tensor
    kl: Tensor
    """Change of the divergence of the model from the unigram distribution."""
    kl_held: Tensor
    changed: Tensor
    """1 where another word became the most likely, else 0."""
    changed_frozen: Tensor


NAMES = tuple(field.name for field in fields(Effects))


@dataclass(frozen=True)
class NeuronAblation:
    """Tokens, neurons and the change ``delta`` (tokens, neurons) of each activation."""

    residual: Tensor
    target: Tensor
    writes: Tensor
    delta: Tensor


def ablate(
    readout: Readout,
    unigram: Unigram,
    ablation: NeuronAblation,
    *,
    exactly: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """Return the effects of changing each last-layer neuron, alone, by ``delta`` at each token.

    ``exactly`` sums over all words everywhere, as is always done for logits with a soft-cap.
    """
    tokens, neurons = ablation.delta.shape
    kinds = {"changed": torch.int8, "changed_frozen": torch.int8}
    results = {name: torch.empty(tokens, neurons, dtype=kinds.get(name, torch.float32)) for name in NAMES}
    block = max(1, _NUMBERS // len(readout.unembedding))
    done, total = 0, -(-neurons // block) * tokens
    for first in range(0, neurons, block):
        part = slice(first, first + block)
        reach = _Reach(readout, unigram, ablation.writes[part], exactly)
        for start in range(0, tokens, _TOKENS):
            rows = slice(start, min(start + _TOKENS, tokens))
            inputs = ablation.residual[rows], ablation.target[rows], ablation.delta[rows, part]
            for name, value in reach.effects(*inputs).items():
                results[name][rows, part] = value.to(results[name].dtype).cpu()
            done += rows.stop - start
            if progress is not None:
                progress(done, total)
    return Effects(**results)


class _Reach:
    """A block of neurons with their effect on the logits of all words."""

    def __init__(self, readout: Readout, unigram: Unigram, writes: Tensor, exactly: bool) -> None:
        self.readout, self.unigram = readout, unigram
        self.exactly = exactly or readout.softcap is not None
        words = readout.unembedding
        # Without a soft-cap logits are defined up to a constant; centred numbers are the smaller ones.
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
        if self.exactly:
            everywhere = torch.ones_like(delta, dtype=torch.bool)
            effects: dict[str, Any] = {name: torch.empty_like(delta) for name in NAMES}
            self._in_full(effects, raw, target, ((total, everywhere, ""), (frozen, everywhere, "_frozen")))
            return effects
        log_p = self.readout.finish(raw).log_softmax(-1)
        moments = TailMoments(self.tail, raw, log_p, min(TOP, raw.shape[1]))
        direction, likely = self.unigram.direction, self.unigram.log_share.exp()
        along = -(total.scale * (raw @ direction)[:, None] + total.reach * self.along)
        held = moments.sums(Shift(total.scale, total.reach, along), entropy=False)
        sums, sums_frozen = moments.sums(total), moments.sums(frozen)
        at_target = self.by_neuron[:, target].mT
        shift_target = total.scale * raw.gather(1, target[:, None]) + total.reach * at_target
        shift_expected = total.scale * (raw @ likely)[:, None] + total.reach * self.expected
        effects = {
            "loss": sums.total - shift_target,
            "loss_frozen": sums_frozen.total - frozen.reach * at_target,
            "loss_held": held.total - shift_target - along * direction[target][:, None],
            "entropy": sums.entropy,
            "entropy_frozen": sums_frozen.entropy,
            "kl": sums.total - shift_expected,
            "kl_held": held.total - shift_expected - along * (direction @ likely),
            "changed": sums.changed,
            "changed_frozen": sums_frozen.changed,
        }
        unsure, still = torch.maximum(sums.error, held.error) > TOLERANCE, sums_frozen.error > TOLERANCE
        self._in_full(effects, raw, target, ((total, unsure, ""), (frozen, still, "_frozen")))
        return effects

    def _in_full(
        self,
        effects: dict[str, Any],
        raw: Tensor,
        target: Tensor,
        shifts: Iterable[tuple[Shift, Tensor, str]],
    ) -> None:
        """Replace the effects of each shift, where chosen, by sums over the whole vocabulary.

        Shifts come with the pairs of tokens and neurons that are chosen, and the ending of names of effects.
        """
        for token, logits in enumerate(raw):
            before = self.readout.finish(logits)
            for shift, chosen, ending in shifts:
                for neurons in chosen[token].nonzero()[:, 0].split(_CACHED_ROWS):
                    moved = torch.addcmul(
                        (1 + shift.scale[token, neurons, None]) * raw[token],
                        shift.reach[token, neurons, None],
                        self.by_neuron[neurons],
                    )
                    same = target[token].expand(len(neurons))
                    exact = changes(self.unigram, before[None], self.readout.finish(moved), same)
                    for name, value in exact.items():
                        if (name + ending) in effects:
                            effects[name + ending][token, neurons] = value.to(effects[name + ending].dtype)


def changes(unigram: Unigram, before: Tensor, after: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the changes (rows,) of loss, entropy, divergence and best word, summed over every word.

    ``held`` means with the component along word frequency held. Logits ``after`` are (rows, words),
    ``before`` too or (1, words); ``target`` is (rows,).

    >>> from unsoft.lab.interpret.neurons.weights import unigram
    >>> after = torch.tensor([[0.0, 0.0, 2.0]])
    >>> moved = changes(unigram(torch.tensor([5, 2, 1])), torch.zeros(1, 3), after, torch.tensor([2]))
    >>> bool(moved["loss"] < 0), bool(moved["entropy"] < 0), float(moved["changed"])
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
    """Return the entropy of the prediction of each row of logits, in nats.

    >>> round(float(entropies(torch.zeros(1, 8)).exp()), 4)
    8.0
    """
    return _sums(logits)["entropy"]


def _sums(logits: Tensor, entropy: bool = True) -> dict[str, Tensor]:
    """Return log-sum-exp, entropy and most likely word of rows of logits."""
    best = logits.max(-1)
    below = logits - best.values[:, None]  # small where the probability is, so that sums are accurate
    weights = below.exp()
    sums = weights.sum(-1)
    result = {"total": sums.log() + best.values}
    if entropy:
        result |= {"entropy": sums.log() - weights.mul_(below).sum(-1) / sums, "best": best.indices}
    return result
