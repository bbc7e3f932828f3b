"""Arrival weights of a stream of points with a state of fixed size: exact in a window, centres stand for all that came before.

The weight of a new point is (1 - what the points before predict at it) / (the variance of that prediction + eps), in the
language of Gaussian processes: every point is an observation of the value 1 with noise eps. The state is what is known of
the values at the centres, their mean and covariance; a chunk of points is one step of a Kalman filter. Within a chunk all
similarities are exact. After it every point that was near a centre moves the centre to the mean of its crowd, every other one
becomes a centre, and where there are too many the ones with the smallest crowds that have not been met for longest go.

If nothing is forgotten and no centre moves, the weights are the exact ones.

    points of the chunk x, centres c        alpha = K_cc^-1 mean        Q = K_cc^-1 (K_cc - covariance) K_cc^-1
    S = K_xx + eps - K_xc Q K_cx = L L^T    y = L^-1 (1 - K_xc alpha)   weight_i = y_i / L_ii
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.cholesky import matrix
from unsoft.magnitude.factor import congruence, halved, inverse_factor_of
from unsoft.magnitude.kernel import gaussian, gaussian_within
from unsoft.magnitude.untraced import untraced

CENTRES = 96
CHUNK = 256
NEAR = 0.5
"""Similarity from which a point belongs to the crowd of a centre."""
_JITTER = 1e-5
_FAR, _APART = 1e15, 1e12
_NOBODY = -1


@dataclass(frozen=True)
class Centres:
    """All that is remembered of the points before a chunk."""

    x: Tensor
    """(systems, centres, d); those that are not in use are so far away, and apart, that nothing resembles them."""
    there: Tensor
    """Bool (systems, centres): how many of them are in use."""
    crowd: Tensor
    """(systems, centres): how many points were near each."""
    idle: Tensor
    """(systems, centres): chunks since the last of them."""
    alpha: Tensor
    """(systems, centres): the prediction at x is K_xc alpha, and what the forgotten still predict."""
    explained: Tensor
    """(systems, centres, centres): Q; the variance at x is K_xx - K_xc Q K_cx."""
    forgotten: Tensor
    """(systems,): how many points were forgotten."""
    total: Tensor
    """(systems,): what they predicted together at the points of the chunk in which they were forgotten, on average."""
    level: Tensor
    """(systems,): what they predict at x is level exp(-|x - middle|^2)."""
    middle: Tensor
    """(systems, d): the mean of their places."""

    @staticmethod
    def none(x: Tensor, centres: int) -> Centres:
        """Before the first point, for points like ``x`` (systems, n, d)."""
        systems, _, d = x.shape
        zeros = x.new_zeros(systems, centres)
        there = torch.zeros_like(zeros, dtype=torch.bool)
        nowhere = _nowhere(x, centres).expand(systems, centres, d)
        number, place = x.new_zeros(systems), x.new_zeros(systems, d)
        return Centres(
            nowhere, there, zeros, zeros, zeros, x.new_zeros(systems, centres, centres), number, number, number, place
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def _nowhere(x: Tensor, centres: int) -> Tensor:
    """Places (centres, 1) that are unlike all points and each other."""
    return (_FAR + torch.arange(centres, dtype=x.dtype, device=x.device) * _APART)[:, None]


def similar_to_centres(x: Tensor, present: Tensor | None, state: Centres) -> Tensor:
    """K_xc (systems, n, centres); 0 for a point or a centre that is not there."""
    near = gaussian(x, state.x)
    return near if present is None else torch.where(present[..., None], near, 0.0)


@torch.no_grad()
def _choice(
    x: Tensor, present: Tensor | None, near: Tensor, among: Tensor, state: Centres
) -> tuple[Tensor, Tensor, Centres]:
    """Which of (centres, points of the chunk) are the next centres, how each is averaged, and their crowds.

    Returns the choice (systems, centres), indices into centres followed by points; the shares (systems, centres, points) with
    which points enter; and the state with its crowds counted, locations and values not yet moved.
    """
    size, n = near.shape[2], x.shape[1]
    before = among.tril(-1)
    closest, whose = near.max(-1)
    new = (before.amax(-1) < NEAR) & (
        closest < NEAR
    )  # unlike every centre, and every point of the chunk before it
    if present is not None:
        new = new & present
    likest, which = (before * new[:, None]).max(-1)  # of the new ones
    whose = torch.where(likest > closest, which + size, whose)
    joins = torch.maximum(likest, closest) >= NEAR
    whose = torch.where(
        new, torch.arange(size, size + n, device=x.device), torch.where(joins, whose, _NOBODY)
    )
    if present is not None:
        whose = torch.where(present, whose, _NOBODY)
    joined = torch.zeros(len(x), size + n, dtype=x.dtype, device=x.device)
    joined.scatter_add_(1, whose.clamp(min=0), (whose >= 0).to(x.dtype))
    none = joined.new_zeros(len(x), n)
    crowd, idle = torch.cat([state.crowd, none], -1) + joined, torch.cat([state.idle + 1, none], -1)
    idle = torch.where(joined > 0, 0.0, idle)
    there = torch.cat([state.there, new], -1)
    # Larger crowds first; among equals the one that was met last, with a weight that never outvotes a member.
    score = torch.where(there, crowd - idle / (idle + 1), -1.0)
    choice = score.topk(size, dim=-1).indices.sort(-1).values
    crowd, idle, there = (y.gather(-1, choice) for y in (crowd, idle, there))
    shares = (choice[..., None] == whose[:, None]) / crowd.clamp(min=1)[..., None]
    lost = torch.cat([state.there, new], -1).scatter(-1, choice, False)
    return choice, shares, lost.to(x.dtype), replace(state, crowd=crowd, idle=idle, there=there)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector; for a batch of small ones faster than bmm."""
    return (matrix * vector[:, None]).sum(-1)


def background(x: Tensor, state: Centres) -> Tensor:
    """What the forgotten points still predict at x (systems, n): little each, but they are many."""
    return state.level[:, None] * gaussian(x, state.middle[:, None])[..., 0]


def _recalled(
    x: Tensor,
    ones: Tensor,
    among: Tensor,
    near: Tensor,
    lost: Tensor,
    beta: Tensor,
    before: Centres,
    after: Centres,
) -> Centres:
    """The state with those that are lost, of (centres, points of the chunk), among the forgotten.

    beta are the weights of the points in the prediction, so that those of the centres are alpha - Q K_cx beta.
    """
    size, count = near.shape[2], ones.sum(-1).clamp(min=2)
    weights = torch.cat([before.alpha - _times(before.explained, _times(near.mT, beta)), beta], dim=-1)
    alike = (
        torch.cat([near.sum(1), (among.sum(1) - among.diagonal(dim1=-2, dim2=-1)) * ones], dim=-1)
        / count[:, None]
    )
    total = before.total + (lost * weights * alike).sum(-1)
    forgotten = before.forgotten + lost.sum(-1)
    places = _times(x.mT, lost[:, size:]) + _times(
        torch.where(before.there[..., None], before.x, 0.0).mT, lost[:, :size]
    )
    middle = (before.forgotten[:, None] * before.middle + places) / forgotten.clamp(min=1)[:, None]
    mean = (gaussian(x, middle[:, None])[..., 0] * ones).sum(-1) / count
    level = torch.where(mean > 0, total / torch.where(mean > 0, mean, 1.0), 0.0)
    return replace(after, forgotten=forgotten, total=total, level=level, middle=middle)


def regrouped(
    x: Tensor, present: Tensor | None, among: Tensor, near: Tensor, state: Centres
) -> tuple[Centres, Tensor, Tensor, Tensor]:
    """The next centres, with what is known of them still to come; their similarities to the old ones and to the chunk x; who is lost."""
    choice, shares, lost, after = _choice(x, present, near.detach(), among.detach(), state)
    index = choice[..., None].expand(-1, -1, x.shape[-1])
    places = torch.cat([state.x, torch.zeros_like(x)], dim=1).gather(1, index)
    # What is not among the shares is what the centre was before.
    moved = torch.baddbmm((1 - shares.sum(-1, keepdim=True)) * places, shares, x)
    moved = torch.where(after.there[..., None], moved, _nowhere(x, len(choice[0])))
    old, new = gaussian(moved, state.x), gaussian(moved, x)
    new = new if present is None else torch.where(present[:, None], new, 0.0)
    return replace(after, x=moved), old, new, lost


def learned(
    old: Tensor, new: Tensor, weighed: Tensor, m: Tensor, y: Tensor, alpha: Tensor, explained: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the values at the next centres, after a chunk with factor m and surprises y: gain, mean, old Q, explained covariance."""
    covariance = torch.baddbmm(
        new, old, weighed.mT, alpha=-1
    )  # of the values at the next centres and in the chunk
    gain = covariance @ m.mT
    mean = _times(gain, y) + _times(old, alpha)
    moved = old @ explained
    return gain, mean, moved, torch.baddbmm(gain @ gain.mT, moved, old.mT)


def advanced(
    x: Tensor, ones: Tensor, among: Tensor, near: Tensor, lost: Tensor, beta: Tensor, mean: Tensor, inside: Tensor,
    before: Centres, after: Centres,
) -> Centres:  # fmt: skip
    """The state after a chunk, from weights of its points and mean and explained covariance at the next centres."""
    after = _recalled(x, ones, among, near, lost, beta, before, after)
    mean = mean + background(after.x, before) - background(after.x, after)
    alpha, explained = _Solved.apply(gaussian_within(after.x, 1 + _JITTER), mean, inside)
    return replace(after, alpha=alpha, explained=explained)


class _Solved(torch.autograd.Function):
    """A^-1 b and A^-1 H A^-1 for positive definite A and symmetric H."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        m = inverse_factor_of(a)
        inverse = m.mT @ m
        solved, sandwich = _times(inverse, b), inverse @ h @ inverse
        ctx.save_for_backward(inverse, solved, sandwich)
        return solved, sandwich

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsolved: Tensor, dsandwich: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse, solved, sandwich = ctx.saved_tensors
        db = _times(inverse, dsolved)
        half = (dsandwich + dsandwich.mT) @ inverse  # twice the symmetric part
        da = torch.baddbmm(db[..., None] * solved[:, None], sandwich, half, beta=-1, alpha=-1)
        return (da + da.mT) / 2, db, inverse @ half / 2


class _Chunk(torch.autograd.Function):
    """Arrival weights of the points of a chunk, their weights in the prediction, and mean and explained covariance at the next centres.

    Inputs: K_xx + eps, K_xc, what is expected of each point (1 less the background); alpha and Q; old and new similarities of
    the next centres.
    The gradient is written out: autograd would take twice as many products.
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weighed = near @ explained
        m = inverse_factor_of(torch.baddbmm(among, weighed, near.mT, alpha=-1))
        y = _times(m, expected - _times(near, alpha))
        beta = _times(m.mT, y)
        gain, mean, moved, inside = learned(old, new, weighed, m, y, alpha, explained)
        ctx.save_for_backward(near, alpha, explained, old, weighed, m, y, beta, gain, moved)
        return y * m.diagonal(dim1=-2, dim2=-1), beta, mean, inside

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dw: Tensor, dbeta: Tensor, dmean: Tensor, dinside: Tensor
    ) -> tuple[Tensor | None, ...]:
        near, alpha, explained, old, weighed, m, y, beta, gain, moved = ctx.saved_tensors
        diagonal = m.diagonal(dim1=-2, dim2=-1)
        both = dinside + dinside.mT
        dgain = torch.baddbmm(dmean[..., None] * y[:, None], both, gain)
        dy = dw * diagonal + _times(gain.mT, dmean)
        slope = torch.baddbmm(dy[..., None] * y[:, None], dgain.mT, gain)
        slope.diagonal(dim1=-2, dim2=-1).add_(dw * y * diagonal)
        through = _times(m.mT, _times(m, dbeta))  # beta = S^-1 surprise
        cross = through[..., None] * beta[:, None]
        damong = congruence(m, halved(slope)).sub_(cross, alpha=0.5).sub_(cross.mT, alpha=0.5)
        dcovariance, dsurprise = dgain @ m, _times(m.mT, dy) + through
        dold = torch.baddbmm(dmean[..., None] * alpha[:, None], both, moved).baddbmm_(
            dcovariance, weighed, alpha=-1
        )
        dweighed = -(dcovariance.mT @ old)
        pulled = damong @ near
        dnear = torch.baddbmm(
            dsurprise[..., None] * alpha[:, None], dweighed - 2 * pulled, explained, beta=-1
        )
        dexplained = torch.baddbmm(near.mT @ (dweighed - pulled), old.mT @ dinside, old)
        dalpha = _times(old.mT, dmean) - _times(near.mT, dsurprise)
        return damong, dnear, dsurprise, dalpha, dexplained, dold, dcovariance


@untraced
def streamed_weights(
    x: Tensor, present: Tensor | None, eps: float, state: Centres, chunk: int = CHUNK
) -> tuple[Tensor, Centres]:
    """Weights (systems, n) of scaled points (systems, n, d), and the state after the last whole chunk.

    The state after an unfinished chunk is the one before it: give those points again, together with those that follow.
    """
    weights = []
    # split and not slices: the gradient of a slice is as long as the whole
    chunks = x.split(chunk, dim=1)
    presences = [None] * len(chunks) if present is None else present.split(chunk, dim=1)
    for points, seen in zip(chunks, presences, strict=True):
        among = matrix(points, seen, eps)
        near = similar_to_centres(points, seen, state)
        ones = points.new_ones(points.shape[:2]) if seen is None else seen.to(points.dtype)
        last = points.shape[1] < chunk
        if last:  # nothing follows that would need to know
            old, new = near[:, :0], near.mT[:, :0]
        else:
            after, old, new, lost = regrouped(points, seen, among, near, state)
        expected = ones - background(points, state) * ones
        found, beta, mean, inside = _Chunk.apply(
            among, near, expected, state.alpha, state.explained, old, new
        )
        weights.append(found)
        if not last:
            state = advanced(points, ones, among, near, lost, beta, mean, inside, state, after)
    return torch.cat(weights, dim=-1) if weights else x.new_zeros(x.shape[:2]), state
