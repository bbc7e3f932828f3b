"""Arrival weights of a stream of points with a state of fixed size: exact in a window, centres stand for all
that came before.

The weight of a new point is (1 - what the points before predict at it) / (the variance of that prediction +
eps), in the language of Gaussian processes: every point is an observation of the value 1 with noise eps. The
state is what is known of the values at the centres, their mean and covariance; a chunk of points is one step
of a Kalman filter. Within a chunk all similarities are exact. After it every point that was near a centre
moves the centre to the mean of its crowd, every other one becomes a centre, and where there are too many the
ones with the smallest crowds that have not been met for longest go.

If nothing is forgotten and no centre moves, the weights are the exact ones.

With x the points of the chunk and c the centres:

    alpha = K_cc^-1 mean                    Q = K_cc^-1 (K_cc - covariance) K_cc^-1
    S = K_xx + eps - K_xc Q K_cx = L L^T    y = L^-1 (1 - K_xc alpha)    weight_i = y_i / L_ii
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.autograd import apply
from unsoft.magnitude.gaussian.factor import congruence, halved, inverse_factor_of
from unsoft.magnitude.gaussian.similarity import gaussian_within
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.streaming.background import background, recalled, times
from unsoft.magnitude.streaming.centres import Centres, regrouped, similar_to_centres
from unsoft.magnitude.untraced import full_precision, untraced

CENTRES = 96
CHUNK = 192
_JITTER = 1e-5


def learned(
    old: Tensor, new: Tensor, weighed: Tensor, m: Tensor, y: Tensor, alpha: Tensor, explained: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a chunk with factor m and surprises y tells about the values at the next centres: gain, mean,
    old Q, explained covariance.
    """
    # of the values at the next centres and in the chunk
    covariance = torch.baddbmm(new, old, weighed.mT, alpha=-1)
    gain = covariance @ m.mT
    mean = times(gain, y) + times(old, alpha)
    moved = old @ explained
    return gain, mean, moved, torch.baddbmm(gain @ gain.mT, moved, old.mT)


def advanced(
    chunk: System,
    among: Tensor,
    near: Tensor,
    lost: Tensor,
    beta: Tensor,
    mean: Tensor,
    inside: Tensor,
    before: Centres,
    after: Centres,
) -> Centres:
    """The state after a chunk, from weights of its points and mean and explained covariance at the next
    centres.
    """
    after = recalled(chunk.x, chunk.ones, among, near, lost, beta, before, after)
    mean = mean + background(after.x, before) - background(after.x, after)
    similar = gaussian_within(after.x, 1 + _JITTER, chunk.engine)
    alpha, explained = apply(_Solved, similar, mean, inside, chunk.engine)
    return replace(after, alpha=alpha, explained=explained)


class _Solved(torch.autograd.Function):
    """A^-1 b and A^-1 H A^-1 for positive definite A and symmetric H."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor, engine: str) -> tuple[Tensor, Tensor]:
        m = inverse_factor_of(a, engine)
        inverse = m.mT @ m
        solved, sandwich = times(inverse, b), inverse @ h @ inverse
        ctx.save_for_backward(inverse, solved, sandwich)
        return solved, sandwich

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, dsolved: Tensor, dsandwich: Tensor) -> tuple[Tensor | None, ...]:
        inverse, solved, sandwich = ctx.saved_tensors
        db = times(inverse, dsolved)
        half = (dsandwich + dsandwich.mT) @ inverse  # twice the symmetric part
        da = torch.baddbmm(db[..., None] * solved[:, None], sandwich, half, beta=-1, alpha=-1)
        return (da + da.mT) / 2, db, inverse @ half / 2, None


class _Chunk(torch.autograd.Function):
    """Arrival weights of the points of a chunk, their weights in the prediction, and mean and explained
    covariance at the next centres.

    Inputs: K_xx + eps, K_xc, what is expected of each point (1 less the background); alpha and Q; old and new
    similarities of the next centres. The gradient is written out: autograd would take twice as many products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        among: Tensor,
        near: Tensor,
        expected: Tensor,
        alpha: Tensor,
        explained: Tensor,
        old: Tensor,
        new: Tensor,
        engine: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weighed = near @ explained
        m = inverse_factor_of(torch.baddbmm(among, weighed, near.mT, alpha=-1), engine)
        y = times(m, expected - times(near, alpha))
        beta = times(m.mT, y)
        gain, mean, moved, inside = learned(old, new, weighed, m, y, alpha, explained)
        ctx.save_for_backward(near, alpha, explained, old, weighed, m, y, beta, gain, moved)
        ctx.engine = engine
        return y * m.diagonal(dim1=-2, dim2=-1), beta, mean, inside

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(
        ctx: Any, dw: Tensor, dbeta: Tensor, dmean: Tensor, dinside: Tensor
    ) -> tuple[Tensor | None, ...]:
        near, alpha, explained, old, weighed, m, y, beta, gain, moved = ctx.saved_tensors
        diagonal = m.diagonal(dim1=-2, dim2=-1)
        both = dinside + dinside.mT
        dgain = torch.baddbmm(dmean[..., None] * y[:, None], both, gain)
        dy = dw * diagonal + times(gain.mT, dmean)
        slope = torch.baddbmm(dy[..., None] * y[:, None], dgain.mT, gain)
        slope.diagonal(dim1=-2, dim2=-1).add_(dw * y * diagonal)
        through = times(m.mT, times(m, dbeta))  # beta = S^-1 surprise
        cross = through[..., None] * beta[:, None]
        damong = congruence(m, halved(slope), ctx.engine).sub_(cross, alpha=0.5).sub_(cross.mT, alpha=0.5)
        dcovariance, dsurprise = dgain @ m, times(m.mT, dy) + through
        dold = torch.baddbmm(dmean[..., None] * alpha[:, None], both, moved).baddbmm_(
            dcovariance, weighed, alpha=-1
        )
        dweighed = -(dcovariance.mT @ old)
        pulled = damong @ near
        dnear = torch.baddbmm(
            dsurprise[..., None] * alpha[:, None], dweighed - 2 * pulled, explained, beta=-1
        )
        dexplained = torch.baddbmm(near.mT @ (dweighed - pulled), old.mT @ dinside, old)
        dalpha = times(old.mT, dmean) - times(near.mT, dsurprise)
        return damong, dnear, dsurprise, dalpha, dexplained, dold, dcovariance, None


def chunk_step(chunk: System, state: Centres, followed: bool = True) -> tuple[Tensor, Centres]:
    """Weights (systems, n) of the points of one chunk, and what is remembered after it; training and decoding
    both take this step.

    If nothing follows, nothing need be remembered: the state is then the one before.
    """
    among = chunk.matrix()
    near = similar_to_centres(chunk, state)
    if followed:
        after, old, new, lost = regrouped(chunk, among, near, state)
    else:
        old, new = near[:, :0], near.mT[:, :0]
    expected = chunk.ones - background(chunk.x, state) * chunk.ones
    weights, beta, mean, inside = apply(
        _Chunk, among, near, expected, state.alpha, state.explained, old, new, chunk.engine
    )
    if not followed:
        return weights, state
    return weights, advanced(chunk, among, near, lost, beta, mean, inside, state, after)


@untraced
def streamed_weights(
    system: System, *, centres: int = CENTRES, chunk: int = CHUNK, first: int | None = None
) -> Tensor:
    """Weights (systems, n) of points that arrive, differentiable. ``first``: the size of the first
    chunk, if it is another.

    As long as there is no more than the first chunk, these are the exact arrival weights.
    """
    dtype, system = system.x.dtype, system.to_working_dtype()
    n, first = system.x.shape[1], first or chunk
    sizes = [min(first, n), *(min(chunk, n - start) for start in range(first, n, chunk))]
    weights, state, done = [], Centres.none(system.x, centres), 0
    for part in system.split(sizes):
        done += part.x.shape[1]
        found, state = chunk_step(part, state, followed=done < n)
        weights.append(found)
    return torch.cat(weights, dim=-1).to(dtype)
