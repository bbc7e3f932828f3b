"""Sums of exponentials over the vocabulary for many neurons at once.

For each token the most likely words are summed one by one. The others, the tail, have little probability, and
ablating one neuron moves their logits little, so their sum is expanded around its mean shift:
with y = x - E x,

    sum p exp(x) = m exp(E x) (1 + E y^2 / 2 + E y^3 / 6 + error)        |error| <= E y^4 exp(max y) / 24

E is over the tail. A shift x combines the token's logits, the neuron's reach and word frequency, so its
moments come from a few matrix products for all neurons together. Of the third moments only that of the reach
is used; the others count as error. The error is bounded for every pair of token and neuron, so that the few
pairs where it is not small can be computed in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORDS = 4096


@dataclass(frozen=True)
class Shift:
    """Logits move by ``scale * raw + reach * reach of the neuron + along * frequency``;
    all (tokens, neurons)."""

    scale: Tensor
    reach: Tensor
    along: Tensor | None = None


@dataclass(frozen=True)
class Sums:
    """``total`` is log sum p exp(x); all (tokens, neurons)."""

    total: Tensor
    entropy: Tensor
    """Change of the entropy."""
    changed: Tensor
    """1 where another word becomes the most likely."""
    error: Tensor
    """Bound of the error, in nats. Infinite where a word of the tail might be the most likely."""


class Tail:
    """Everything independent of the token. ``by_word`` is (words, neurons), the reach of each neuron."""

    def __init__(self, words: Tensor, writes: Tensor, by_word: Tensor, direction: Tensor) -> None:
        self.words, self.writes, self.by_word, self.direction = words, writes, by_word, direction
        self.largest = by_word.abs().amax(0)

    def powers(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return ``weights @ reach**k`` for k = 2, 3, 4, some words at a time to save memory."""
        results = [p.new_zeros(len(p), self.by_word.shape[1]) for p in weights]
        for start in range(0, len(self.by_word), _WORDS):
            part = slice(start, start + _WORDS)
            reach = self.by_word[part]
            power = reach
            for result, p in zip(results, weights, strict=True):
                power = power * reach
                result.addmm_(p[:, part], power)
        return results


class TailMoments:
    """Moments of the tails of some tokens; ``raw`` and ``log_p`` are (tokens, words).

    Names: z logits, l logarithms of probabilities, q reach, v frequency.
    """

    def __init__(self, tail: Tail, raw: Tensor, log_p: Tensor, top: int) -> None:
        self.tail = tail
        # In single precision the probabilities of 50,000 words sum to 1 within 3e-5 only, and that error
        # would appear in every effect.
        log_p = log_p - log_p.exp().sum(1, keepdim=True, dtype=torch.float64).log().float()
        best = log_p.topk(top, dim=1)
        self.top_l, self.top = best.values, best.indices
        self.top_z = raw.gather(1, self.top)
        p = log_p.exp()
        self.entropy = -(p * log_p).sum(1, keepdim=True)
        p.scatter_(1, self.top, 0.0)
        mass = p.sum(1, keepdim=True)
        self.mass = mass
        p = p / mass.clamp_min(1e-30)
        v = tail.direction

        def mean(x: Tensor) -> Tensor:
            return (p * x).sum(1, keepdim=True)

        self.z, self.l, self.v = mean(raw), mean(log_p), (p @ v)[:, None]
        z, low = raw - self.z, log_p - self.l
        pz, pl = p * z, p * low
        plz = pl * z
        first = torch.cat([p, pz, p * v, pl, plz]) @ tail.words @ tail.writes.mT
        q, zq, vq, lq, lzq = first.chunk(5)
        both = torch.cat([p, pl])
        second, third, qqqq = tail.powers([both, both, p])
        (qq, lqq), (qqq, lqqq) = second.chunk(2), third.chunk(2)
        self.q, self.zq, self.vq, self.lq = q, zq, vq - self.v * q, lq
        self.qq = (qq - q**2).clamp_min(0.0)
        self.zz = (pz * z).sum(1, keepdim=True)
        self.zv = (pz @ v)[:, None]
        self.vv = (p @ v**2)[:, None] - self.v**2
        self.lz = (pl * z).sum(1, keepdim=True)
        self.lzz = (plz * z).sum(1, keepdim=True)
        self.lzq = lzq - q * self.lz
        self.lqq = lqq - 2 * q * lq
        self.qqq = qqq - 3 * q * qq + 2 * q**3
        self.lqqq = lqqq - 3 * q * lqq + 3 * q**2 * lq
        # For the bound: fourth-order norms over the tail, and largest distances from the mean.
        inside = p > 0
        self.z_norm = (pz * z**3).sum(1, keepdim=True) ** 0.25
        self.z_high = torch.where(inside, z, 0.0).amax(1, keepdim=True)
        self.z_low = torch.where(inside, z, 0.0).amin(1, keepdim=True)
        self.q_norm = (qqqq - 4 * q * qqq + 6 * q**2 * qq - 3 * q**4).clamp_min(0.0) ** 0.25
        self.q_far = tail.largest + q.abs()
        self.v_far = float(v.abs().max()) + self.v.abs()

    def sums(self, shift: Shift, entropy: bool = True) -> Sums:
        """Return the sums for one kind of shift; without ``entropy`` only ``total`` and its error."""
        a, b, c = shift.scale, shift.reach, shift.along
        mean = a * self.z + b * self.q
        variance = a**2 * self.zz + b**2 * self.qq + 2 * a * b * self.zq
        third = b**3 * self.qqq
        q_norm = b.abs() * self.q_norm
        other = a.abs() * self.z_norm
        far = torch.maximum(a * self.z_high, a * self.z_low) + b.abs() * self.q_far
        if c is not None:
            mean = mean + c * self.v
            variance = variance + c**2 * self.vv + 2 * c * (a * self.zv + b * self.vq)
            other = other + c.abs() * (self.vv.clamp_min(0.0) * self.v_far**2) ** 0.25
            far = far + c.abs() * self.v_far
        weight = self.mass * mean.exp()
        grown = 1 + variance / 2 + third / 6
        tail = weight * grown
        # Norms increase with their order, so those of order four also bound the omitted third moments.
        norm = q_norm + other
        error = weight * ((norm**3 - q_norm**3) / 6 + norm**4 * far.exp() / 24)
        top_sum, top_l, peak, moved = self._most_likely(shift, entropy)
        total = top_sum + tail
        if not entropy:
            return Sums(total.log(), total, total, error / total)
        linear = a * self.lz + b * self.lq
        square = a**2 * self.lzz + b**2 * self.lqq + 2 * a * b * self.lzq
        cube = b**3 * self.lqqq
        tail_l = weight * ((self.l + mean) * grown + variance + third / 2 + linear + square / 2 + cube / 6)
        log = total.log()
        # log p is far below zero in the tail, which multiplies an error of the sum in the entropy.
        error = error * (1 + self.l.abs()) / total
        within = self.top_l[:, -1:] + mean + far < peak
        error = torch.where(within | (self.mass <= 0), error, torch.inf)
        return Sums(log, log - (top_l + tail_l) / total - self.entropy, moved, error)

    def _most_likely(self, shift: Shift, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return for the most likely words: sum p exp(x), sum p exp(x) log p', the largest log p', and
        whether it belongs to another word than before."""
        results = [torch.empty_like(shift.reach) for _ in range(4)]
        for token in range(len(self.top)):
            words = self.tail.by_word[self.top[token]]
            x = torch.addcmul(self.top_z[token, :, None] * shift.scale[token], words, shift.reach[token])
            if shift.along is not None:
                x += self.tail.direction[self.top[token]][:, None] * shift.along[token]
            x += self.top_l[token, :, None]
            if entropy:
                results[2][token], best = x.max(0)
                results[3][token] = best != 0
                p = x.exp()
                results[0][token] = p.sum(0)
                results[1][token] = p.mul_(x).sum(0)
            else:
                results[0][token] = x.exp_().sum(0)
        return results[0], results[1], results[2], results[3]
