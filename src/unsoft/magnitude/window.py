"""Arrival weights of points that come in pieces: the factor of their matrix grows, a row for each point (bordered update)."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.native.gaussian import WindowKernel
from unsoft.magnitude.background import background
from unsoft.magnitude.centres import Centres, similar_to_centres
from unsoft.magnitude.cholesky import matrix
from unsoft.magnitude.factor import check_done, inverse_factor_of
from unsoft.magnitude.kernel import gaussian, is_native

_FIRST_CAPACITY = 64
_FEW = 16
"""Up to so many new points are cheaper one by one than as a block."""


class Window:
    """Points, their matrix' factor M = L^-1 and y = M b; exact among themselves and, if there are centres, beside those.

    ``limit``: how many points it will hold, if that is known; else the buffers grow as long as points come.

    >>> window = Window()
    >>> torch.cat([window.add(torch.zeros(1, 1, 2), None, eps=1.0) for _ in range(3)], dim=1)      # three clones
    tensor([[0.5000, 0.3333, 0.2500]])
    """

    def __init__(self, limit: int | None = None) -> None:
        self.length, self.limit = 0, limit
        self.capacity = 0
        self._buffers: tuple[Tensor, ...] = ()
        self._kernel: WindowKernel | None = None

    @property
    def x(self) -> Tensor:
        """(systems, n, d)"""
        return self._buffers[0][:, : self.length]

    @property
    def seen(self) -> Tensor:
        """(systems, n): 1, or 0 for a point that is not there."""
        return self._buffers[1][:, : self.length]

    @property
    def m(self) -> Tensor:
        """(systems, n, n)"""
        return self._buffers[3][:, : self.length, : self.length]

    @property
    def y(self) -> Tensor:
        """(systems, n)"""
        return self._buffers[4][:, : self.length]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._buffers

    @torch.no_grad()
    def add(self, x: Tensor, present: Tensor | None, eps: float, state: Centres | None = None) -> Tensor:
        """Weights (systems, n) of new points (systems, n, d), in the dtype of the first ones.

        A point that is masked or not finite is not there. ``state``: what is remembered of the points before the window; it must not
        change while there are points in it.
        """
        self._reserve(x, state)
        x = x.to(self._buffers[0].dtype)
        end = self.length + x.shape[1]
        if is_native(x) and (x.shape[1] <= _FEW or state is not None):
            if self._kernel is None:
                self._kernel = self._new_kernel(state)
            weights, done = self._kernel.add(self.length, x, present, eps)
            if done < x.shape[1]:
                check_done(self.length + done, self._buffers[0][:, :end])
        else:
            weights = self._add_block(x, present, eps, state)
        self.length = end
        return weights

    def clear(self) -> None:
        """Forgets all points, and the state beside which they stood; keeps the memory."""
        self.length, self._kernel = 0, None

    def pick(self, index: Tensor) -> None:
        """Puts system ``index[s]`` in place s."""
        self._buffers = tuple(x[index] for x in self._buffers)
        self._kernel = None

    def _add_block(self, x: Tensor, present: Tensor | None, eps: float, state: Centres | None) -> Tensor:
        """By torch: what the compiled code does row by row."""
        start, end = self.length, self.length + x.shape[1]
        finite = x.isfinite().all(-1)
        present = finite if present is None else present & finite
        x = torch.where(present[..., None], x, 0.0)
        points, seen, near, m, y = self._buffers
        points[:, start:end], seen[:, start:end] = x, present.to(x.dtype)
        new, b = matrix(x, present, eps), present.to(x.dtype)
        old = gaussian(x, points[:, :start]) * b[..., None] * seen[:, None, :start]
        if state is not None:
            close = similar_to_centres(x, present, state)
            weighed = close @ state.explained
            new, old = new - weighed @ close.mT, old - weighed @ near[:, :start].mT
            b = torch.where(present, b - (close @ state.alpha[..., None])[..., 0] - background(x, state), 0.0)
            near[:, start:end] = close
        c = old @ self.m.mT
        own = inverse_factor_of(new - c @ c.mT)
        fresh = (own @ (b[..., None] - c @ self.y[..., None]))[..., 0]
        m[:, start:end, :start], m[:, start:end, start:end] = -(own @ (c @ self.m)), own
        y[:, start:end] = fresh
        return fresh * own.diagonal(dim1=-2, dim2=-1)

    def _reserve(self, x: Tensor, state: Centres | None) -> None:
        """Room for the points x after those that are there."""
        systems, new, width = x.shape
        end = self.length + new
        if self._buffers and (systems, width) != (len(self._buffers[0]), self._buffers[0].shape[2]):
            raise ValueError(
                f"magnitude: argument 'key' brings points {width} wide in {systems} systems; the cache holds points"
                f" {self._buffers[0].shape[2]} wide in {len(self._buffers[0])}"
            )
        if end <= self.capacity:
            return
        if self.limit is None:
            size = end + max(_FIRST_CAPACITY, end // 4)
        else:
            size = max(end, min(self.limit, max(2 * end, _FIRST_CAPACITY)))
        stride = -(-size // 16) * 16 + 16  # whole registers, and never a power of two apart, which caches do not like
        centres = 0 if state is None else state.x.shape[1]
        like = self._buffers[0] if self._buffers else x
        larger = (
            like.new_zeros(systems, size, width), like.new_zeros(systems, size), like.new_zeros(systems, size, centres),
            like.new_zeros(systems, size, stride), like.new_zeros(systems, size),
        )  # fmt: skip
        for into, was in zip(larger, self._buffers, strict=False):
            rows = into[:, : self.length]
            (rows if was.dim() == 2 else rows[..., : was.shape[2]])[:] = was[:, : self.length]
        self._buffers, self.capacity, self._kernel = larger, size, None

    def _new_kernel(self, state: Centres | None) -> WindowKernel:
        points, _, near, m, _ = self._buffers
        sizes = (points.shape[0], points.shape[2], near.shape[2], points.shape[1], m.shape[2])
        held = (
            () if state is None else (state.x, state.alpha, state.explained, state.level, state.middle)
        )
        return WindowKernel(sizes, self._buffers, held)
