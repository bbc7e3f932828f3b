"""The weights that points have when they arrive, by compiled code: of all points at once, or of one after the
other.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from unsoft.engines.native.binding import Prepared
from unsoft.engines.native.gaussian import NO_MEMORY, SIDE, contiguous, head, library, run
from unsoft.engines.threads import thread_count

_WINDOW, _GATE = struct.Struct("16q"), struct.Struct("7q")


class ArrivalFactors:
    """The weights y_i M_ii that points (systems, n, d) have when they arrive, with M = L^-1 of Z + eps = L
    L^T and y = M b.

    ``done``: how many rows could be computed in all systems (n if all is well). The lower halves of M and Z
    are kept for the gradient.
    """

    def __init__(self, x: Tensor, present: Tensor | None, b: Tensor, eps: float) -> None:
        systems, n, _ = x.shape
        blocks = -(-n // SIDE)
        half = systems, blocks * (blocks + 1) // 2 * SIDE * SIDE
        self.x, self.present = contiguous(x, present)
        self._factor, self._matrix = x.new_empty(half), x.new_empty(half)
        self._head = head(self.x, self.present, self._matrix)
        self._library = library(x.dtype == torch.float64)
        self._y, self.weights, done = x.new_empty(systems, n), x.new_empty(systems, n), ctypes.c_int64()
        run(
            self._library.unsoft_arrival_factors,
            self._head,
            ctypes.c_double(eps),
            b.contiguous(),
            self._factor,
            self._y,
            self.weights,
            ctypes.byref(done),
        )
        self.done = done.value

    def gradient(self, slope: Tensor) -> Tensor:
        """The gradient of the sum of slope_i y_i M_ii with respect to the points."""
        result = torch.empty_like(self.x)
        run(
            self._library.unsoft_arrival_gradient,
            self._head,
            self._factor,
            self._y,
            slope.contiguous(),
            result,
        )
        return result


class WindowKernel(Prepared):
    """Adds points to the buffers of a :class:`unsoft.magnitude.window.Window`;
    made again whenever a buffer is another one.
    """

    def __init__(self, capacity: int, buffers: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> None:
        """``buffers`` as in kernel/gaussian/window.h. ``state``: places and Q in rows of whole registers,
        alpha, level and middle; or nothing.
        """
        points, _, near, _, _ = buffers
        sizes = (
            points.shape[0],
            points.shape[1],
            near.shape[1],
            capacity,
            points.shape[2],
        )
        self._kept = tuple(x.contiguous() for x in state)
        remembered = [x.data_ptr() for x in self._kept] or [0] * 5
        places = self._kept[0].shape[2] if state else 0
        self._head = _WINDOW.pack(*sizes, *(x.data_ptr() for x in buffers), places, *remembered)
        self._add = library(points.dtype == torch.float64).unsoft_window_add

    def add(self, length: int, x: Tensor, present: Tensor | None, eps: float) -> tuple[Tensor, int]:
        """Weights (systems, n) of new points after ``length`` others, and how many of them could be done in
        all systems.
        """
        weights = x.new_empty(x.shape[:2])
        return weights, self._run(length, x, present, eps, None, weights)

    def gate(
        self, length: int, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, int]:
        """Gates (batch, heads, n) of new keys (batch, heads, n, d), values times the gates, and how many
        could be done.

        ``constants``: sqrt(t / d), beta and gamma of each head.
        """
        gates, value = key.new_empty(key.shape[:3]), value.contiguous()
        gated = torch.empty_like(value)
        pointers = [x.data_ptr() for x in (*constants, value, gated)]
        head = _GATE.pack(key.shape[1], value.shape[3], *pointers)
        return gates, gated, self._run(length, key, None, eps, head, gates)

    def _run(
        self, length: int, x: Tensor, present: Tensor | None, eps: float, gate: bytes | None, weights: Tensor
    ) -> int:
        x, done = x.contiguous(), ctypes.c_int64()
        if present is not None:
            present = present.contiguous()
        status = self._add(
            ctypes.c_int64(thread_count()),
            self._head,
            ctypes.c_int64(length),
            ctypes.c_int64(x.shape[-2]),
            ctypes.c_double(eps),
            ctypes.c_void_p(x.data_ptr()),
            None if present is None else ctypes.c_void_p(present.data_ptr()),
            gate,
            ctypes.c_void_p(weights.data_ptr()),
            ctypes.byref(done),
        )
        if status:
            raise MemoryError(NO_MEMORY)
        return done.value
