"""A factor that grows: the arrival weights of points that come one after the other (bordered update)."""

from __future__ import annotations

from torch import Tensor

from unsoft.magnitude.factor import inverse_factor

_FIRST_CAPACITY = 64


class GrowingFactor:
    """M = L^-1 and y = M b of a matrix that gets new rows; O(n^2) for each, in buffers that double when they are full.

    >>> import torch
    >>> grown, a = GrowingFactor(), torch.ones(1, 3, 3) + torch.eye(3)              # three clones, eps = 1
    >>> torch.cat([grown.extend(a[:, [i], :i], a[:, [i], i : i + 1], torch.ones(1, 1)) for i in range(3)], dim=1)
    tensor([[0.5000, 0.3333, 0.2500]])
    """

    def __init__(self) -> None:
        self.length = 0
        self._m: Tensor | None = None
        self._y: Tensor | None = None

    @property
    def m(self) -> Tensor:
        """(systems, n, n)"""
        return self._m[:, : self.length, : self.length]

    @property
    def y(self) -> Tensor:
        """(systems, n)"""
        return self._y[:, : self.length]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self._m is None or self._y is None else (self._m, self._y)

    def extend(self, old: Tensor, new: Tensor, b: Tensor) -> Tensor:
        """Adds rows [old, new] of the matrix, (systems, r, n) and (systems, r, r), with right-hand sides (systems, r).

        Returns the arrival weights of the new rows.
        """
        start, end = self.length, self.length + new.shape[1]
        self._reserve(new, end)
        if start:
            c = old @ self.m.mT
            own = inverse_factor(new - c @ c.mT)
            y = (own @ (b[..., None] - c @ self.y[..., None]))[..., 0]
            self._m[:, start:end, :start] = -(own @ (c @ self.m))
        else:
            own = inverse_factor(new)
            y = (own @ b[..., None])[..., 0]
        self._m[:, start:end, start:end] = own
        self._y[:, start:end] = y
        self.length = end
        return y * own.diagonal(dim1=-2, dim2=-1)

    def _reserve(self, like: Tensor, end: int) -> None:
        if self._m is not None and self._m.shape[1] >= end:
            return
        size = max(2 * end, _FIRST_CAPACITY)
        m, y = like.new_zeros(len(like), size, size), like.new_zeros(len(like), size)
        if self._m is not None:
            m[:, : self.length, : self.length], y[:, : self.length] = self.m, self.y
        self._m, self._y = m, y

    def pick(self, index: Tensor) -> None:
        """Puts system ``index[s]`` in place s."""
        if self._m is not None and self._y is not None:
            self._m, self._y = self._m[index], self._y[index]
