"""Arrival weights of points that come in pieces: the factor of their matrix grows, a row for each point
(bordered update).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from unsoft.engines.gaussian import kernels_for
from unsoft.engines.native.gaussian import WindowKernel
from unsoft.magnitude.centres import Centres, background, similar_to_centres
from unsoft.magnitude.gaussian import System, check_done, gaussian, inverse_factor_of

_FIRST_CAPACITY = 64
_FEW = 16
"""Up to so many new points are cheaper one by one than as a block."""


class Window:
    """Points, their matrix' factor M = L^-1 and y = M b; exact among themselves and, if there are centres,
    beside those.

    ``most``: how many points it will hold at most, if that is known; else the buffers grow as long as points
    come.

    >>> window = Window()
    >>> clone = System(torch.zeros(1, 1, 2), None, eps=1.0)
    >>> torch.cat([window.add(clone) for _ in range(3)], dim=1)
    tensor([[0.5000, 0.3333, 0.2500]])
    """

    def __init__(self, most: int | None = None) -> None:
        self.length, self.most = 0, most
        self.capacity = 0
        self._buffers: tuple[Tensor, ...] = ()
        self._kernel: WindowKernel | None = None
        self._engine = "auto"
        """The one that the kernel was chosen for."""

    @property
    def x(self) -> Tensor:
        """Points (systems, n, d)."""
        return self._buffers[0][..., : self.length].mT

    @property
    def seen(self) -> Tensor:
        """(systems, n): 1, or 0 for an absent point."""
        return self._buffers[1][:, : self.length]

    @property
    def m(self) -> Tensor:
        """Factor M (systems, n, n)."""
        return self._buffers[3][:, : self.length, : self.length]

    @property
    def y(self) -> Tensor:
        """y = M b (systems, n)."""
        return self._buffers[4][:, : self.length]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._buffers

    def add(self, new: System, state: Centres | None = None) -> Tensor:
        """Return weights (systems, n) of new points that need no gradient, in the dtype of the first ones.

        A point that is masked or not finite is not there. ``state``: what is remembered of the points before
        the window; it must not change while there are points in it.
        """
        x, start, end = new.x, self.length, self.length + new.x.shape[1]
        if end > self.capacity or x.shape[::2] != self._buffers[0].shape[:2]:
            self._reserve(x, state)
        new = new.to(self._buffers[0].dtype)
        if x.shape[1] > _FEW and state is None:
            weights = self._add_block(new, state)
        elif (kernel := self._kernel_for(new, state)) is not None:
            weights, done = kernel.add(start, new.x, new.present, new.eps)
            if done < x.shape[1]:
                check_done(start + done, self._buffers[3][:, :end])
        else:
            weights = self._add_block(new, state)
        self.length = end
        return weights

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...], engine: str
    ) -> tuple[Tensor, Tensor] | None:
        """Return gates (batch, heads, n) of a few new keys, not yet scaled, and values times those, by one
        call of compiled code.

        None where that is not possible (yet): then add() does it.
        """
        start, new = self.length, key.shape[2]
        if self._kernel is None or engine != self._engine or start + new > self.capacity or new > _FEW:
            return None
        systems, width, _ = self._buffers[0].shape
        same = key.dtype == value.dtype == self._buffers[0].dtype and key.shape[:3] == value.shape[:3]
        if not same or (key.shape[0] * key.shape[1], key.shape[3]) != (systems, width):
            return None
        gates, gated, done = self._kernel.gate(start, key, value, eps, constants)
        if done < new:
            check_done(start + done, self._buffers[3][:, : start + new])
        self.length += new
        return gates, gated

    def clear(self) -> None:
        """Drop all points, and the state they were added to; keep the memory."""
        self.length, self._kernel = 0, None

    def pick(self, index: Tensor) -> None:
        """Move system ``index[s]`` to position s."""
        self._buffers = tuple(x[index] for x in self._buffers)
        self._kernel = None

    def _add_block(self, added: System, state: Centres | None) -> Tensor:
        """Add points by torch, as the compiled code does row by row."""
        finite = added.x.isfinite().all(-1)
        present = finite if added.present is None else added.present & finite
        x = torch.where(present[..., None], added.x, 0.0)
        added = replace(added, x=x, present=present)
        start, end = self.length, self.length + x.shape[1]
        points, seen, near, m, y = self._buffers
        points[..., start:end], seen[:, start:end] = x.mT, present.to(x.dtype)
        new, b = added.matrix(), added.ones
        old = gaussian(x, points[..., :start].mT, added.engine) * b[..., None] * seen[:, None, :start]
        if state is not None:
            close = similar_to_centres(added, state)
            weighed = close @ state.explained
            new, old = new - weighed @ close.mT, old - weighed @ near[..., :start]
            b = torch.where(present, b - (close @ state.alpha[..., None])[..., 0] - background(x, state), 0.0)
            near[..., start:end] = close.mT
        # Bordered update: with A = [[A1, B^T], [B, C]] and M1 = L1^-1, the new rows of L are B M1^T and the
        # factor of C - (B M1^T)(B M1^T)^T; old rows of M never change, so neither do old weights.
        c = old @ self.m.mT
        own = inverse_factor_of(new - c @ c.mT, added.engine)
        fresh = (own @ (b[..., None] - c @ self.y[..., None]))[..., 0]
        m[:, start:end, :start], m[:, start:end, start:end] = -(own @ (c @ self.m)), own
        y[:, start:end] = fresh
        return fresh * own.diagonal(dim1=-2, dim2=-1)

    def _reserve(self, x: Tensor, state: Centres | None) -> None:
        """Make room for the points x after the present ones."""
        systems, new, width = x.shape
        end = self.length + new
        if self._buffers and (systems, width) != self._buffers[0].shape[:2]:
            raise ValueError(
                f"magnitude: argument 'key' brings points {width} wide in {systems} systems; the cache holds"
                f" points {self._buffers[0].shape[1]} wide in {len(self._buffers[0])}"
            )
        if end <= self.capacity:
            return
        if self.most is None:
            size = end + max(_FIRST_CAPACITY, end // 4)
        else:
            size = max(end, min(self.most, max(2 * end, _FIRST_CAPACITY)))
        row = _whole(size)
        centres = 0 if state is None else state.x.shape[1]
        like = self._buffers[0] if self._buffers else x
        shapes = ((width, row), (row,), (centres, row), (size, row), (row,))
        larger = tuple(like.new_zeros(systems, *shape) for shape in shapes)
        for into, was in zip(larger, self._buffers, strict=False):
            part = was[:, : self.length] if was is self._buffers[3] else was
            into.narrow(-1, 0, part.shape[-1])[tuple(map(slice, part.shape[:-1]))] = part
        self._buffers, self.capacity, self._kernel = larger, size, None

    def _kernel_for(self, new: System, state: Centres | None) -> WindowKernel | None:
        """Return the compiled code, or None where torch has to be used."""
        if self._kernel is not None and self._engine == new.engine:
            return self._kernel
        kernels, known = kernels_for(new.x, new.engine), tuple[Tensor, ...]()
        if kernels is None or kernels.window is None:
            return None
        if state is not None:
            more = _whole(state.x.shape[1]) - state.x.shape[1]
            places, explained = (pad(y, (0, more)) for y in (state.x.mT, state.explained))
            known = (places, state.alpha, explained, state.level, state.middle)
        self._kernel, self._engine = kernels.window(self.capacity, self._buffers, known), new.engine
        return self._kernel


def _whole(size: int) -> int:
    """Return the length of a row of whole registers; never a power of two, which conflicts in CPU caches."""
    return -(-size // 16) * 16 + 16
