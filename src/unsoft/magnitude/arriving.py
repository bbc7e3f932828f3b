"""Decoding: arrival weights of points that come in pieces, equal to those of the whole sequence.

Both kinds have ``add(x, present, eps) -> weights`` for new scaled points (systems, n, d), ``tensors`` and ``pick(index)``.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from unsoft.magnitude.background import background
from unsoft.magnitude.centres import Centres, regrouped, similar_to_centres
from unsoft.magnitude.cholesky import matrix
from unsoft.magnitude.growing import GrowingFactor
from unsoft.magnitude.kernel import gaussian
from unsoft.magnitude.prefix import working_dtype
from unsoft.magnitude.streaming import advanced, learned


def _together(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new], dim=1)


def _old_rows(x: Tensor, present: Tensor, before: Tensor, were_present: Tensor) -> Tensor:
    return torch.where(present[:, :, None] & were_present[:, None], gaussian(x, before), 0.0)


class ExactArrival:
    """Remembers all points and the factor of their matrix."""

    def __init__(self) -> None:
        self.grown = GrowingFactor()
        self.x: Tensor | None = None
        self.present: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor, present: Tensor, eps: float) -> Tensor:
        dtype, x = x.dtype, x.to(working_dtype(x.dtype, eps))
        old = x[:, :, :0] if self.x is None else _old_rows(x, present, self.x, self.present)
        weights = self.grown.extend(old, matrix(x, present, eps), present.to(x.dtype))
        self.x, self.present = _together(self.x, x), _together(self.present, present)
        return weights.to(dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.x is None else (self.x, self.present, *self.grown.tensors)

    def pick(self, index: Tensor) -> None:
        if self.x is not None:
            self.x, self.present = self.x[index], self.present[index]
            self.grown.pick(index)


class StreamedArrival:
    """Remembers the centres and the unfinished chunk: a state of fixed size."""

    def __init__(self, centres: int, chunk: int) -> None:
        self.size, self.chunk = centres, chunk
        self.centres: Centres | None = None
        self.grown = GrowingFactor()
        self.points: list[Tensor] = []

    @torch.no_grad()
    def add(self, x: Tensor, present: Tensor, eps: float) -> Tensor:
        if self.centres is None:
            self.centres = Centres.none(x, self.size)
        weights, start = [], 0
        while start < x.shape[1]:
            end = min(start + self.chunk - self.grown.length, x.shape[1])
            weights.append(self._within(x[:, start:end], present[:, start:end], eps))
            start = end
        return torch.cat(weights, dim=1)

    def _within(self, x: Tensor, present: Tensor, eps: float) -> Tensor:
        near = similar_to_centres(x, present, self.centres)
        weighed = near @ self.centres.explained
        predicted = (near @ self.centres.alpha[..., None])[..., 0] + background(x, self.centres)
        surprise = torch.where(present, 1 - predicted, 0.0)
        new = matrix(x, present, eps) - weighed @ near.mT
        old = x[:, :, :0]
        if self.points:
            before, were_present, were_near, _ = self.points
            old = _old_rows(x, present, before, were_present) - weighed @ were_near.mT
        weights = self.grown.extend(old, new, surprise)
        self.points = [
            _together(was, now)
            for was, now in zip(self.points or [None] * 4, (x, present, near, weighed), strict=True)
        ]
        if self.grown.length == self.chunk:
            points, seen, near, weighed = self.points
            among = matrix(points, seen, eps)
            state = self.centres
            m, y = self.grown.m, self.grown.y
            after, old, new, lost = regrouped(points, seen, among, near, state)
            _, mean, _, inside = learned(old, new, weighed, m, y, state.alpha, state.explained)
            beta, ones = (m.mT @ y[..., None])[..., 0], seen.to(x.dtype)
            self.centres = advanced(points, ones, among, near, lost, beta, mean, inside, state, after)
            self.grown, self.points = GrowingFactor(), []
        return weights

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = () if self.centres is None else self.centres.tensors
        return (*held, *self.points, *self.grown.tensors)

    def pick(self, index: Tensor) -> None:
        if self.centres is not None:
            moved = {f.name: getattr(self.centres, f.name)[index] for f in fields(self.centres)}
            self.centres = replace(self.centres, **moved)
        self.points = [x[index] for x in self.points]
        self.grown.pick(index)
