"""Gaussian matrices by compiled code: products and gradients, factors, and the weights that points have when
they arrive.

The matrix of a set of points is symmetric and held as half of its tiles.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.native import availability
from unsoft.engines.native.binding import Prepared, address
from unsoft.engines.threads import thread_count

SIDE = 64
_HEAD, _WINDOW, _GATE = struct.Struct("7q"), struct.Struct("16q"), struct.Struct("7q")


def library(x: Tensor) -> ctypes.CDLL:
    """Return the compiled code for the dtype of ``x``, float32 or float64."""
    return availability.library("gaussian", x.dtype == torch.float64)


class PackedGaussian:
    """Z_jl = exp(-|x_j - x_l|^2) for points (systems, n, d); points that are not present have rows and
    columns of 0.

    Memory: half of n^2 numbers for each system. One system runs on one thread unless there are fewer systems
    than threads.

    >>> x = torch.randn(2, 100, 3, dtype=torch.float64)
    >>> z, ones = PackedGaussian(x), torch.ones(2, 100, dtype=torch.float64)
    >>> dense = (-torch.cdist(x, x).square()).exp()
    >>> torch.allclose(z.product(ones), dense.sum(-1))
    True
    """

    def __init__(
        self,
        x: Tensor,
        present: Tensor | None = None,
        first: Tensor | None = None,
        reuse: PackedGaussian | None = None,
    ) -> None:
        """``first`` (systems, n): its product with Z is computed while Z is built, and kept as
        ``first_product``.

        ``reuse``: a matrix of as many points that is not needed any more, and whose memory is taken.
        """
        self.x, self.present = _contiguous(x, present)
        self.matrix: Tensor = _half_matrix(x) if reuse is None else reuse.matrix[: len(x)]
        self._library = library(x)
        self._head = _head(self.x, self.present, self.matrix)
        self.first_product = x.new_empty(0) if first is None else torch.empty_like(first)
        vectors = (None, None) if first is None else (first.contiguous(), self.first_product)
        _run(self._library.unsoft_gaussian_build, self._head, *vectors)

    def product(self, x: Tensor) -> Tensor:
        """Return Z x for vectors (systems, n)."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _run(self._library.unsoft_gaussian_product, self._head, x.contiguous(), y)
        return y

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of sum_r u_r Z v_r by the points, for u and v (systems, rank, n)."""
        result = torch.empty_like(self.x)
        vectors = (u.shape[1], u.contiguous(), v.contiguous())
        _run(self._library.unsoft_gaussian_gradient, self._head, *vectors, result)
        return result


def gaussian_between(x: Tensor, y: Tensor) -> Tensor:
    """Return exp(-|x_j - y_l|^2) (systems, n, m) for points (systems, n, d) and (systems, m, d).

    >>> gaussian_between(torch.zeros(1, 2, 3), torch.ones(1, 1, 3)).flatten()       # exp(-3)
    tensor([0.0498, 0.0498])
    """
    (systems, rows, width), columns = x.shape, y.shape[1]
    z = x.new_empty(systems, rows, columns)
    sizes = (thread_count(), systems, rows, columns, width)
    points = (x.detach().contiguous(), y.detach().contiguous())
    _run(library(x).unsoft_gaussian_between, *sizes, *points, z)
    return z


def inverse_factors(a: Tensor) -> tuple[Tensor, int]:
    """Return L^-1 of each positive definite A = L L^T (systems, n, n), and how many rows could be done in all
    of them (n if all is well).

    >>> a = torch.tensor([[[4.0, 2.0], [2.0, 5.0]]])           # L = [[2, 0], [1, 2]]
    >>> inverse_factors(a)
    (tensor([[[ 0.5000,  0.0000],
             [-0.2500,  0.5000]]]), 2)
    """
    systems, n, _ = a.shape
    # Rows of whole strips, and never a power of two apart, which would map them to the same cache lines.
    m, done = a.new_empty(systems, n, -(-n // SIDE) * SIDE + 16), ctypes.c_int64()
    function = library(a).unsoft_inverse_factors
    sizes = (thread_count(), systems, n)
    _run(function, *sizes, a.detach().contiguous(), m, m.stride(1), ctypes.byref(done))
    return m[:, :, :n], done.value


def congruences(m: Tensor, t: Tensor) -> Tensor:
    """Return the symmetric part of -M^T T M for lower triangular M and T (systems, n, n).

    >>> m, t = torch.tensor([[[1.0, 0.0], [2.0, 1.0]]]), torch.tensor([[[1.0, 0.0], [4.0, 1.0]]])
    >>> congruences(m, t)  # -[[13, 2], [6, 1]] before it is made symmetric
    tensor([[[-13.,  -4.],
             [ -4.,  -1.]]])
    """
    systems, n, _ = m.shape
    if m.stride(2) != 1 or m.stride(0) != n * m.stride(1):
        m = m.contiguous()
    result, t = t.new_empty(t.shape), t.contiguous()
    function = library(m).unsoft_congruences
    _run(function, thread_count(), systems, n, m, m.stride(1), t, result)
    return result


def pivoted(
    x: Tensor, present: Tensor | None, rank: int, tolerance: float, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return F (systems, rank, n), pivots (systems, rank; -1 where nothing was left) and what is left of the
    diagonal (systems, n)."""
    systems, n, _ = x.shape
    x, present = _contiguous(x, present)
    factor, left = x.new_empty(systems, rank, n), x.new_empty(systems, n)
    pivots = torch.empty(systems, rank, dtype=torch.int64)
    function = library(x).unsoft_pivoted
    _run(function, _head(x, present), rank, float(tolerance), float(least), factor, pivots, left)
    return factor, pivots, left


class ArrivalFactors:
    """The weights y_i M_ii that points (systems, n, d) have when they arrive, with M = L^-1 of Z + eps = L
    L^T and y = M b.

    ``done``: how many rows could be computed in all systems (n if all is well). The lower halves of M and Z
    are kept for the gradient.
    """

    def __init__(self, x: Tensor, present: Tensor | None, b: Tensor, eps: float) -> None:
        self.x, self.present = _contiguous(x, present)
        self._factor, self._matrix = _half_matrix(x), _half_matrix(x)
        self._head = _head(self.x, self.present, self._matrix)
        self._library = library(x)
        self._y, self.weights, done = x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2]), ctypes.c_int64()
        outputs = (self._factor, self._y, self.weights, ctypes.byref(done))
        _run(self._library.unsoft_arrival_factors, self._head, float(eps), b.contiguous(), *outputs)
        self.done = done.value

    def gradient(self, slope: Tensor) -> Tensor:
        """Return the gradient of the sum of slope_i y_i M_ii with respect to the points."""
        result = torch.empty_like(self.x)
        inputs = (self._factor, self._y, slope.contiguous())
        _run(self._library.unsoft_arrival_gradient, self._head, *inputs, result)
        return result


class WindowKernel(Prepared):
    """Adds points to the buffers of a :class:`unsoft.magnitude.window.Window`; made again whenever
    a buffer is replaced."""

    def __init__(self, capacity: int, buffers: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> None:
        """``buffers`` as in kernel/gaussian/window.h. ``state``: slots and Q in rows of whole registers,
        alpha, level and middle; or nothing."""
        points, _, near, _, _ = buffers
        systems, room, width = points.shape
        self._kept = tuple(x.contiguous() for x in state)
        kept = [x.data_ptr() for x in self._kept] or [0] * 5
        slots = self._kept[0].shape[2] if state else 0
        addresses = (x.data_ptr() for x in buffers)
        self._head = _WINDOW.pack(systems, room, near.shape[1], capacity, width, *addresses, slots, *kept)
        self._add = library(points).unsoft_window_add

    def add(self, length: int, x: Tensor, present: Tensor | None, eps: float) -> tuple[Tensor, int]:
        """Return the weights (systems, n) of new points after ``length`` others, and how many of them could
        be done in all systems."""
        weights = x.new_empty(x.shape[:2])
        return weights, self._run(length, x, present, eps, None, weights)

    def gate(
        self, length: int, key: Tensor, value: Tensor, eps: float, constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, int]:
        """Return the gates (batch, heads, n) of new keys (batch, heads, n, d), values times the gates, and
        how many could be done.

        ``constants``: sqrt(t / d), beta and gamma of each head.
        """
        gates, value = key.new_empty(key.shape[:3]), value.contiguous()
        gated = torch.empty_like(value)
        addresses = (x.data_ptr() for x in (*constants, value, gated))
        head = _GATE.pack(key.shape[1], value.shape[3], *addresses)
        return gates, gated, self._run(length, key, None, eps, head, gates)

    def _run(
        self, length: int, x: Tensor, present: Tensor | None, eps: float, gate: bytes | None, weights: Tensor
    ) -> int:
        x, done = x.contiguous(), ctypes.c_int64()
        present = None if present is None else present.contiguous()
        sizes = (length, x.shape[-2], float(eps))
        _run(self._add, thread_count(), self._head, *sizes, x, present, gate, weights, ctypes.byref(done))
        return done.value


def _half_matrix(x: Tensor) -> Tensor:
    """Return memory for the tiles of one half of a matrix of the points (systems, n, d)."""
    blocks = -(-x.shape[1] // SIDE)
    return x.new_empty(len(x), blocks * (blocks + 1) // 2 * SIDE * SIDE)


def _contiguous(x: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the points, and 1 or 0 for whether each is present, as the compiled code takes them."""
    present = x.new_ones(x.shape[:2]) if present is None else present.to(x.dtype).contiguous()
    return x.detach().contiguous(), present


def _head(x: Tensor, present: Tensor, matrix: Tensor | None = None) -> bytes:
    """Return struct Gaussian; the tensors must outlive its use."""
    return _HEAD.pack(thread_count(), *x.shape, *map(address, (x, present, matrix)))


def _run(function: Any, *arguments: object) -> None:
    """Call compiled code with tensors by their address, and whole numbers and floats as 64 bits."""
    dtypes = {x.dtype for x in arguments if isinstance(x, Tensor) and x.is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:  # it would write past their ends
        raise TypeError(f"magnitude: tensors of one dtype, float32 or float64, were expected, not {dtypes}")
    if function(*map(_as_argument, arguments)):
        raise MemoryError("unsoft's magnitude kernel could not allocate its buffers")


def _as_argument(x: object) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, float):
        return ctypes.c_double(x)
    return ctypes.c_int64(x) if isinstance(x, int) else x
