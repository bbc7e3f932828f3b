"""Arrival weights of a stream of points with a state of fixed size, in training (:func:`streamed_weights`)
and in decoding (:class:`Arrival`, which can also remember all points instead).

Similarities are exact within a chunk, and centres stand for all points before it. The weight of a new point
is (1 - what the points before predict at it) / (the variance of that prediction + eps), in the language of
Gaussian processes: every point is an observation of the value 1 with noise eps. The state is what is known of
the values at the centres, their mean and covariance; a chunk of points is one step of a Kalman filter. After
a chunk, every point that was near a centre moves the centre to the mean of its crowd, and every other point
becomes a centre. Where there are too many centres, those with the smallest crowds that have not been met for
longest are forgotten. If nothing is forgotten and no centre moves, the weights are the exact ones.

With x the points of the chunk and c the centres:

    alpha = K_cc^-1 mean                    Q = K_cc^-1 (K_cc - covariance) K_cc^-1
    S = K_xx + eps - K_xc Q K_cx = L L^T    y = L^-1 (1 - K_xc alpha)    weight_i = y_i / L_ii
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.centres import Centres, background, recalled, regrouped, similar_to_centres, times
from unsoft.magnitude.gaussian import (
    System,
    congruence,
    full_precision,
    gaussian_within,
    halved,
    inverse_factor_of,
    untraced,
)
from unsoft.magnitude.window import Window

CENTRES = 96
CHUNK = 192
_JITTER = 1e-5
"""Added to the diagonal of the centres' matrix: two centres may move close together."""


def learned(
    old: Tensor, new: Tensor, weighed: Tensor, m: Tensor, y: Tensor, alpha: Tensor, explained: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gain, mean, old Q and explained covariance of the values at the next centres, given a chunk with
    factor m and surprises y."""
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
    """Return the state after a chunk, from weights of its points and mean and explained covariance at the
    next centres."""
    after = recalled(chunk.x, chunk.ones, among, near, lost, beta, before, after)
    # alpha explains only what the background does not; the background has just changed.
    mean = mean + background(after.x, before) - background(after.x, after)
    similar = gaussian_within(after.x, 1 + _JITTER, chunk.engine)
    alpha, explained = _Solved.apply(similar, mean, inside, chunk.engine)  # type: ignore[no-untyped-call]
    return replace(after, alpha=alpha, explained=explained)


class _Solved(torch.autograd.Function):
    """A^-1 b and A^-1 H A^-1 for positive definite A and symmetric H."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor, engine: str) -> tuple[Tensor, Tensor]:
        m = inverse_factor_of(a, engine)
        inverse = m.mT @ m  # needed whole: both results and the gradient multiply with it
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
    """Return weights (systems, n) of the points of one chunk, and the state after it; training and decoding
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
    weights, beta, mean, inside = _Chunk.apply(  # type: ignore[no-untyped-call]
        among, near, expected, state.alpha, state.explained, old, new, chunk.engine
    )
    if not followed:
        return weights, state
    return weights, advanced(chunk, among, near, lost, beta, mean, inside, state, after)


@untraced
def streamed_weights(
    system: System, *, centres: int = CENTRES, chunk: int = CHUNK, first: int | None = None
) -> Tensor:
    """Return weights (systems, n) of points that arrive, differentiable. ``first``: the size of the first
    chunk, if it differs.

    As long as there is no more than the first chunk, these are the exact arrival weights.
    """
    dtype, system = system.x.dtype, system.to_working_dtype()
    n, first = system.x.shape[1], first or chunk
    sizes = [min(first, n), *(min(chunk, n - start) for start in range(first, n, chunk))]
    weights, state, done = [], Centres.none(system.x, centres), 0
    for part in system.split(sizes):
        done += part.x.shape[1]
        new, state = chunk_step(part, state, followed=done < n)
        weights.append(new)
    return torch.cat(weights, dim=-1).to(dtype)


class Arrival:
    """Weights of points that come in pieces, without gradients.

    ``Arrival()`` is exact: it remembers all points and the factor of their matrix. With ``centres`` and
    ``chunk`` it remembers the centres and the unfinished chunk, a state of fixed size; ``first`` is the size
    of the first chunk, if it differs.
    """

    def __init__(self, centres: int = 0, chunk: int | None = None, first: int | None = None) -> None:
        self.size, self.chunk = centres, chunk
        self.state: Centres | None = None
        self.limit = first or chunk
        """The size of the chunk that is being filled; None if there is only one."""
        self.window = Window(most=None if chunk is None else max(first or 0, chunk))

    @full_precision
    def add(self, new: System) -> Tensor:
        """Return the weights (systems, n) of new points."""
        dtype, new = new.x.dtype, new.to_working_dtype()
        if self.limit is None:
            return self.window.add(new).to(dtype)
        if self.state is None:
            self.state = Centres.none(new.x, self.size)
        weights, start = [], 0
        while start < new.x.shape[1]:
            part = slice(start, start + self.limit - self.window.length)
            seen = None if new.present is None else new.present[:, part]
            piece = replace(new, x=new.x[:, part], present=seen)
            weights.append(self._piece(self.state, piece, self.limit))
            start = part.stop
        return (weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)).to(dtype)

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...], engine: str
    ) -> tuple[Tensor, Tensor] | None:
        """Return :meth:`Window.gate` of new keys, unless they end a chunk, which is for :meth:`add`."""
        if self.limit is not None and self.window.length + key.shape[2] >= self.limit:
            return None
        return self.window.gate(key, value, eps, constants, engine)

    def _piece(self, state: Centres, new: System, limit: int) -> Tensor:
        """Add points for which the current chunk has room."""
        window = self.window
        if window.length + new.x.shape[1] < limit:
            return window.add(new, state)
        if window.length == 0:  # a whole chunk, as in training
            finite = new.x.isfinite().all(-1)
            if not bool(finite.all()):
                present = finite if new.present is None else new.present & finite
                new = replace(new, x=torch.where(finite[..., None], new.x, 0.0), present=present)
            weights, self.state = chunk_step(new, state)
        else:
            weights = window.add(new, state)
            seen = window.seen.bool()
            chunk = replace(new, x=window.x, present=None if bool(seen.all()) else seen)
            _, self.state = chunk_step(chunk, state)
        window.clear()
        self.limit = self.chunk
        return weights

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*(() if self.state is None else self.state.tensors), *self.window.tensors)

    def pick(self, index: Tensor) -> None:
        if self.state is not None:
            moved = {f.name: getattr(self.state, f.name)[index] for f in fields(self.state)}
            self.state = replace(self.state, **moved)
        self.window.pick(index)
