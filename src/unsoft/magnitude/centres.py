"""State of streaming magnitude: centres of crowds (how they are chosen, moved and forgotten), and the
background of forgotten points.

Forgotten points predict little each, but they are many: together level exp(-|x - middle|^2) at x. middle is
the mean of their places; level is such that the points of the last chunk see, on average, what the forgotten
points predicted together when they were forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from unsoft.magnitude.gaussian import System, gaussian

NEAR = 0.5
"""Similarity from which a point belongs to the crowd of a centre."""
_FAR, _APART = 1e15, 1e12
_NOBODY = -1


@dataclass(frozen=True)
class Centres:
    """All that is remembered of the points before a chunk."""

    x: Tensor
    """(systems, centres, d); those that are not in use are so far away, and apart, that nothing resembles
    them.
    """
    there: Tensor
    """Bool (systems, centres): which of them are in use."""
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
    """(systems,): what they predicted together at the points of the chunk in which they were forgotten, on
    average.
    """
    level: Tensor
    """(systems,): what they predict at x is level exp(-|x - middle|^2)."""
    middle: Tensor
    """(systems, d): the mean of their places."""

    @staticmethod
    def none(x: Tensor, centres: int) -> Centres:
        """Return the state before the first point, for points like ``x`` (systems, n, d)."""
        systems, _, d = x.shape
        zeros = x.new_zeros(systems, centres)
        there = torch.zeros_like(zeros, dtype=torch.bool)
        nowhere = _nowhere(x, centres).expand(systems, centres, d)
        number, place = x.new_zeros(systems), x.new_zeros(systems, d)
        crowd = idle = alpha = zeros
        forgotten = total = level = number
        explained = x.new_zeros(systems, centres, centres)
        return Centres(nowhere, there, crowd, idle, alpha, explained, forgotten, total, level, place)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def _nowhere(x: Tensor, centres: int) -> Tensor:
    """Return places (centres, 1) that are unlike all points and each other."""
    return (_FAR + torch.arange(centres, dtype=x.dtype, device=x.device) * _APART)[:, None]


def similar_to_centres(system: System, state: Centres) -> Tensor:
    """Return K_xc (systems, n, centres) of points x; 0 for an absent point or centre."""
    near = gaussian(system.x, state.x, system.engine)
    return near if system.present is None else torch.where(system.present[..., None], near, 0.0)


@torch.no_grad()
def _choice(
    x: Tensor, present: Tensor | None, near: Tensor, among: Tensor, state: Centres
) -> tuple[Tensor, Tensor, Tensor, Centres]:
    """Choose the next centres among (centres, points of the chunk), how each is averaged, and their crowds.

    Returns the choice (systems, centres), indices into centres followed by points; the shares (systems,
    centres, points) with which points enter; who is lost, of (centres, points); and the state with its crowds
    counted, not yet moved.
    """
    size, n = near.shape[2], x.shape[1]
    before = among.tril(-1)
    closest, owner = near.max(-1)
    # A point founds a centre if it resembles neither a centre nor an earlier point of the chunk. Only earlier
    # points count, so the choice does not depend on how the rest of the stream continues.
    new = (before.amax(-1) < NEAR) & (closest < NEAR)
    if present is not None:
        new = new & present
    # All other points join the most similar centre, old or new, or none if all are too far.
    nearest_new, which = (before * new[:, None]).max(-1)
    owner = torch.where(nearest_new > closest, which + size, owner)
    joins = torch.maximum(nearest_new, closest) >= NEAR
    owner = torch.where(
        new, torch.arange(size, size + n, device=x.device), torch.where(joins, owner, _NOBODY)
    )
    if present is not None:
        owner = torch.where(present, owner, _NOBODY)
    joined = torch.zeros(len(x), size + n, dtype=x.dtype, device=x.device)
    joined.scatter_add_(1, owner.clamp(min=0), (owner >= 0).to(x.dtype))
    none = joined.new_zeros(len(x), n)
    crowd, idle = torch.cat([state.crowd, none], -1) + joined, torch.cat([state.idle + 1, none], -1)
    idle = torch.where(joined > 0, 0.0, idle)
    there = torch.cat([state.there, new], -1)
    # Larger crowds first; among equals the one that was met last, with a weight that never outvotes a member.
    score = torch.where(there, crowd - idle / (idle + 1), -1.0)
    choice = score.topk(size, dim=-1).indices.sort(-1).values
    crowd, idle, there = (y.gather(-1, choice) for y in (crowd, idle, there))
    shares = (choice[..., None] == owner[:, None]) / crowd.clamp(min=1)[..., None]
    lost = torch.cat([state.there, new], -1).scatter(-1, choice, False)
    return choice, shares, lost.to(x.dtype), replace(state, crowd=crowd, idle=idle, there=there)


def regrouped(
    chunk: System, among: Tensor, near: Tensor, state: Centres
) -> tuple[Centres, Tensor, Tensor, Tensor]:
    """Return the next centres, with alpha and Q still to be computed, their similarities to the old centres
    and to the chunk, and which are lost."""
    x, present = chunk.x, chunk.present
    choice, shares, lost, after = _choice(x, present, near.detach(), among.detach(), state)
    index = choice[..., None].expand(-1, -1, x.shape[-1])
    places = torch.cat([state.x, torch.zeros_like(x)], dim=1).gather(1, index)
    # What is not among the shares is what the centre was before.
    moved = torch.baddbmm((1 - shares.sum(-1, keepdim=True)) * places, shares, x)
    moved = torch.where(after.there[..., None], moved, _nowhere(x, len(choice[0])))
    old, new = (gaussian(moved, y, chunk.engine) for y in (state.x, x))
    new = new if present is None else torch.where(present[:, None], new, 0.0)
    return replace(after, x=moved), old, new, lost


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix times vector; faster than bmm for a batch of small ones."""
    return (matrix * vector[:, None]).sum(-1)


def background(x: Tensor, state: Centres) -> Tensor:
    """Return what the forgotten points still predict at x (systems, n)."""
    return state.level[:, None] * _bump(x, state.middle)


def _bump(x: Tensor, middle: Tensor) -> Tensor:
    return (x - middle[:, None]).square().sum(-1).neg().exp()


def recalled(
    x: Tensor,
    ones: Tensor,
    among: Tensor,
    near: Tensor,
    lost: Tensor,
    beta: Tensor,
    before: Centres,
    after: Centres,
) -> Centres:
    """Return the state with the lost ones, of (centres, points of the chunk), among the forgotten.

    beta are the weights of the points in the prediction, so that those of the centres are alpha - Q K_cx
    beta.
    """
    size, count = near.shape[2], ones.sum(-1).clamp(min=2)
    weights = torch.cat([before.alpha - times(before.explained, times(near.mT, beta)), beta], dim=-1)
    alike = (
        torch.cat([near.sum(1), (among.sum(1) - among.diagonal(dim1=-2, dim2=-1)) * ones], dim=-1)
        / count[:, None]
    )
    total = before.total + (lost * weights * alike).sum(-1)
    forgotten = before.forgotten + lost.sum(-1)
    places = times(x.mT, lost[:, size:]) + times(
        torch.where(before.there[..., None], before.x, 0.0).mT, lost[:, :size]
    )
    middle = (before.forgotten[:, None] * before.middle + places) / forgotten.clamp(min=1)[:, None]
    # Far from all forgotten points the mean underflows to 0; then they predict nothing here.
    mean = (_bump(x, middle) * ones).sum(-1) / count
    level = torch.where(mean > 0, total / torch.where(mean > 0, mean, 1.0), 0.0)
    return replace(after, forgotten=forgotten, total=total, level=level, middle=middle)
