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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unsoft.magnitude.cholesky import matrix
from unsoft.magnitude.factor import inverse_factor
from unsoft.magnitude.kernel import gaussian

CENTRES = 128
CHUNK = 256
NEAR = 0.5
"""Similarity from which a point belongs to the crowd of a centre."""
_JITTER = 1e-4


@dataclass(frozen=True)
class Centres:
    """All that is remembered of the points before a chunk."""

    x: Tensor
    """(systems, centres, d)"""
    there: Tensor
    """Bool (systems, centres): how many of them are in use."""
    crowd: Tensor
    """(systems, centres): how many points were near each."""
    idle: Tensor
    """(systems, centres): chunks since the last of them."""
    alpha: Tensor
    """(systems, centres): the prediction at x is K_xc alpha."""
    explained: Tensor
    """(systems, centres, centres): Q; the variance at x is K_xx - K_xc Q K_cx."""

    @staticmethod
    def none(x: Tensor, centres: int) -> Centres:
        """Before the first point, for points like ``x`` (systems, n, d)."""
        systems, _, d = x.shape
        zeros = x.new_zeros(systems, centres)
        there = torch.zeros_like(zeros, dtype=torch.bool)
        return Centres(
            x.new_zeros(systems, centres, d),
            there,
            zeros,
            zeros,
            zeros,
            x.new_zeros(systems, centres, centres),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.there, self.crowd, self.idle, self.alpha, self.explained)


def similar_to_centres(x: Tensor, present: Tensor | None, state: Centres) -> Tensor:
    """K_xc (systems, n, centres); 0 for a point or a centre that is not there."""
    near = torch.where(state.there[:, None], gaussian(x, state.x), 0.0)
    return near if present is None else torch.where(present[..., None], near, 0.0)


@torch.no_grad()
def _regrouped(
    x: Tensor, present: Tensor | None, near: Tensor, among: Tensor, state: Centres
) -> tuple[Tensor, Tensor, Centres]:
    """Which of (centres, points of the chunk) are the next centres, how each is averaged, and their crowds.

    Returns the choice (systems, centres), indices into centres followed by points; the shares (systems, centres, points) with
    which points enter; and the state with its crowds counted, locations and values not yet moved.
    """
    size, n = near.shape[2], x.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    alike = among.tril(-1).amax(-1)
    new = (alike < NEAR) & (
        near.amax(-1) < NEAR
    )  # unlike every centre and every point of the chunk before it
    if present is not None:
        new = new & present
    closeness = torch.cat([near, torch.where(new[:, None] & earlier, among, 0.0)], dim=-1)
    closest, whose = closeness.max(-1)
    joins = torch.zeros_like(closeness).scatter_(
        -1, whose[..., None], (closest >= NEAR).to(x.dtype)[..., None]
    )
    if present is not None:
        joins = joins * present[..., None]
    joined = joins.sum(1)
    none = joined.new_zeros(len(x), n)
    crowd, idle = torch.cat([state.crowd, none], -1) + joined, torch.cat([state.idle + 1, none], -1)
    idle = torch.where(joined > 0, 0.0, idle)
    there = torch.cat([state.there, new], -1)
    # Larger crowds first; among equals the one that was met last, with a weight that never outvotes a member.
    score = torch.where(there, crowd - idle / (idle + 1), -1.0)
    choice = score.topk(size, dim=-1).indices.sort(-1).values
    crowd, idle, there = (y.gather(-1, choice) for y in (crowd, idle, there))
    shares = joins.mT.gather(1, choice[..., None].expand(-1, -1, n)) / crowd.clamp(min=1)[..., None]
    return choice, shares, replace(state, crowd=crowd, idle=idle, there=there)


def advanced(
    x: Tensor, present: Tensor | None, among: Tensor, near: Tensor, weighed: Tensor, m: Tensor, y: Tensor, state: Centres
) -> Centres:  # fmt: skip
    """The state after a chunk of points x; near is K_xc, weighed K_xc Q, m and y are L^-1 and y of the chunk."""
    choice, shares, after = _regrouped(x, present, near.detach(), among.detach(), state)
    index = choice[..., None].expand(-1, -1, x.shape[-1])
    places = torch.cat([state.x, torch.zeros_like(x)], dim=1).gather(1, index)
    # What is not among the shares is what the centre was before.
    moved = torch.baddbmm((1 - shares.sum(-1, keepdim=True)) * places, shares, x)
    moved = torch.where(after.there[..., None], moved, 0.0)
    old = torch.where(after.there[:, :, None] & state.there[:, None], gaussian(moved, state.x), 0.0)
    new = torch.where(after.there[..., None], gaussian(moved, x), 0.0)
    if present is not None:
        new = torch.where(present[:, None], new, 0.0)
    covariance = torch.baddbmm(
        new, old, weighed.mT, alpha=-1
    )  # of the values at the new centres and in the chunk
    gain = covariance @ m.mT
    mean = torch.baddbmm(gain @ y[..., None], old, state.alpha[..., None])
    inside = torch.baddbmm(gain @ gain.mT, old @ state.explained, old.mT)
    inverse = inverse_factor(matrix(moved, after.there, _JITTER))
    solve = inverse.mT @ inverse
    return replace(after, x=moved, alpha=(solve @ mean)[..., 0], explained=solve @ inside @ solve)


def streamed_weights(
    x: Tensor, present: Tensor | None, eps: float, state: Centres, chunk: int = CHUNK
) -> tuple[Tensor, Centres]:
    """Weights (systems, n) of scaled points (systems, n, d), and the state after the last whole chunk.

    The state after an unfinished chunk is the one before it: give those points again, together with those that follow.
    """
    weights = []
    for start in range(0, x.shape[1], chunk):
        points = x[:, start : start + chunk]
        seen = None if present is None else present[:, start : start + chunk]
        among = matrix(points, seen, eps)
        near = similar_to_centres(points, seen, state)
        weighed = near @ state.explained
        m = inverse_factor(torch.baddbmm(among, weighed, near.mT, alpha=-1))
        surprise = 1 - near @ state.alpha[..., None]
        if seen is not None:
            surprise = torch.where(seen[..., None], surprise, 0.0)
        y = (m @ surprise)[..., 0]
        weights.append(y * m.diagonal(dim1=-2, dim2=-1))
        if points.shape[1] == chunk:
            state = advanced(points, seen, among, near, weighed, m, y, state)
    return torch.cat(weights, dim=-1) if weights else x.new_zeros(x.shape[:2]), state
