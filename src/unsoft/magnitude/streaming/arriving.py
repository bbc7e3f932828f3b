"""Decoding: arrival weights of points that come in pieces, equal to those of the whole sequence.

Both kinds have ``add(system) -> weights`` for new points that need no gradient, ``tensors`` and
``pick(index)``; and ``gate(key, value, eps, constants, engine)``, see :meth:`Window.gate`, for a token in one
call.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.streaming.centres import Centres
from unsoft.magnitude.streaming.chunk import chunk_step
from unsoft.magnitude.streaming.window import Window
from unsoft.magnitude.untraced import full_precision


class ExactArrival:
    """Remembers all points and the factor of their matrix."""

    def __init__(self) -> None:
        self.window = Window()

    @full_precision
    def add(self, new: System) -> Tensor:
        return self.window.add(new.to_working_dtype()).to(new.x.dtype)

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...], engine: str
    ) -> tuple[Tensor, Tensor] | None:
        return self.window.gate(key, value, eps, constants, engine)

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

    @full_precision
    def add(self, new: System) -> Tensor:
        dtype, new = new.x.dtype, new.to_working_dtype()
        if self.state is None:
            self.state = Centres.none(new.x, self.size)
        weights, start = [], 0
        while start < new.x.shape[1]:
            part = slice(start, start + self.limit - self.window.length)
            seen = None if new.present is None else new.present[:, part]
            weights.append(self._piece(self.state, replace(new, x=new.x[:, part], present=seen)))
            start = part.stop
        return (weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)).to(dtype)

    def gate(
        self, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...], engine: str
    ) -> tuple[Tensor, Tensor] | None:
        window = self.window
        if window.length + key.shape[2] >= self.limit:  # the end of a chunk is for add()
            return None
        return window.gate(key, value, eps, constants, engine, self.state)

    def _piece(self, state: Centres, new: System) -> Tensor:
        """Points that are no more than there is room for."""
        window = self.window
        if window.length + new.x.shape[1] < self.limit:
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
