"""Decoding: arrival weights of points that come in pieces, equal to those of the whole sequence.

Both kinds have ``add(x, present, eps) -> weights`` for new scaled points (systems, n, d) that need no
gradient, ``tensors`` and
``pick(index)``; and ``gate(key, value, eps, constants)``, see :meth:`Window.gate`, for a token in one call.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.matrix import working_dtype
from unsoft.magnitude.streaming.centres import Centres
from unsoft.magnitude.streaming.chunk import chunk_step
from unsoft.magnitude.streaming.window import Window


class ExactArrival:
    """Remembers all points and the factor of their matrix."""

    def __init__(self) -> None:
        self.window = Window()

    def add(self, x: Tensor, present: Tensor | None, eps: float) -> Tensor:
        return self.window.add(x.to(working_dtype(x.dtype, eps)), present, eps).to(x.dtype)

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor] | None:
        return self.window.gate(key, value, eps, constants)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.window.tensors

    def pick(self, index: Tensor) -> None:
        self.window.pick(index)


class StreamedArrival:
    """Remembers the centres and the unfinished chunk: a state of fixed size. ``first``: the size of the first
    chunk.
    """

    def __init__(self, centres: int, chunk: int, first: int | None = None) -> None:
        self.size, self.chunk = centres, chunk
        self.state: Centres | None = None
        self.limit = first or chunk
        """The size of the chunk that is being filled."""
        self.window = Window(most=max(self.limit, chunk))

    def add(self, x: Tensor, present: Tensor | None, eps: float) -> Tensor:
        dtype, x = x.dtype, x.to(working_dtype(x.dtype, eps))
        if self.state is None:
            self.state = Centres.none(x, self.size)
        weights, start = [], 0
        while start < x.shape[1]:
            new = slice(start, start + self.limit - self.window.length)
            seen = None if present is None else present[:, new]
            weights.append(self._piece(self.state, x[:, new], seen, eps))
            start = new.stop
        return (weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)).to(dtype)

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor] | None:
        window = self.window
        if window.length + key.shape[2] >= self.limit:  # the end of a chunk is for add()
            return None
        return window.gate(key, value, eps, constants, self.state)

    def _piece(self, state: Centres, x: Tensor, present: Tensor | None, eps: float) -> Tensor:
        """Points that are no more than there is room for."""
        window = self.window
        if window.length + x.shape[1] < self.limit:
            return window.add(x, present, eps, state)
        if window.length == 0:  # a whole chunk, as in training
            finite = x.isfinite().all(-1)
            if not bool(finite.all()):
                present = finite if present is None else present & finite
                x = torch.where(finite[..., None], x, 0.0)
            weights, self.state = chunk_step(x, present, eps, state)
        else:
            weights = window.add(x, present, eps, state)
            seen = window.seen.bool()
            _, self.state = chunk_step(window.x, None if bool(seen.all()) else seen, eps, state)
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
