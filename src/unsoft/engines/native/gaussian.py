"""The Gaussian matrix of a set of points, held as half of its tiles by compiled code: products
and gradients.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.native.availability import failure
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.threads import thread_count

SIDE = 64
NO_MEMORY = "unsoft's magnitude kernel could not allocate its buffers"
_HEAD = struct.Struct("7q")


@lru_cache(maxsize=2)
def library(double: bool) -> ctypes.CDLL:
    """The compiled code for float32, or float64 if ``double``."""
    source = (KERNEL / "gaussian" / "library.cpp").read_text()
    (library,) = load_libraries({"gaussian": source}, "double" if double else "float")
    return library


def unavailable(double: bool) -> str | None:
    """Why there is no compiled code for float32, or float64 if ``double``; None if there is."""
    return failure(("gaussian", double), lambda: library(double))


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
        systems, points, _ = x.shape
        blocks = -(-points // SIDE)
        self.x, self.present = contiguous(x, present)
        if reuse is None:
            self.matrix = x.new_empty(systems, blocks * (blocks + 1) // 2 * SIDE * SIDE)
        else:
            self.matrix = reuse.matrix[:systems]
        self._library = library(x.dtype == torch.float64)
        self._head = head(self.x, self.present, self.matrix)
        self.first_product = x.new_empty(0) if first is None else torch.empty_like(first)
        run(
            self._library.unsoft_gaussian_build,
            self._head,
            None if first is None else first.contiguous(),
            None if first is None else self.first_product,
        )

    def product(self, x: Tensor) -> Tensor:
        """Z x for vectors (systems, n)."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        run(self._library.unsoft_gaussian_product, self._head, x.contiguous(), y)
        return y

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """The gradient of sum_r u_r Z v_r with respect to the points; u and v are (systems, rank, n)."""
        result = torch.empty_like(self.x)
        run(
            self._library.unsoft_gaussian_gradient,
            self._head,
            ctypes.c_int64(u.shape[1]),
            u.contiguous(),
            v.contiguous(),
            result,
        )
        return result


def gaussian_between(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_j - y_l|^2) for points (systems, n, d) and (systems, m, d): a tensor (systems, n, m).

    >>> gaussian_between(torch.zeros(1, 2, 3), torch.ones(1, 1, 3)).flatten()       # exp(-3)
    tensor([0.0498, 0.0498])
    """
    (systems, rows, width), columns = x.shape, y.shape[1]
    z = x.new_empty(systems, rows, columns)
    sizes = map(ctypes.c_int64, (thread_count(), systems, rows, columns, width))
    run(
        library(x.dtype == torch.float64).unsoft_gaussian_between,
        *sizes,
        x.detach().contiguous(),
        y.detach().contiguous(),
        z,
    )
    return z


def inverse_factors(a: Tensor) -> tuple[Tensor, int]:
    """L^-1 of each positive definite A = L L^T (systems, n, n), and how many rows could be done in all of
    them (n if all is well).

    >>> a = torch.tensor([[[4.0, 2.0], [2.0, 5.0]]])           # L = [[2, 0], [1, 2]]
    >>> inverse_factors(a)
    (tensor([[[ 0.5000,  0.0000],
             [-0.2500,  0.5000]]]), 2)
    """
    systems, n, _ = a.shape
    m, done = _room(a, systems, n), ctypes.c_int64()
    sizes = map(ctypes.c_int64, (thread_count(), systems, n))
    a = a.detach().contiguous()
    run(
        library(a.dtype == torch.float64).unsoft_inverse_factors,
        *sizes,
        a,
        m,
        ctypes.c_int64(m.stride(1)),
        ctypes.byref(done),
    )
    return m[:, :, :n], done.value


def congruences(m: Tensor, t: Tensor) -> Tensor:
    """The symmetric part of -M^T T M for lower triangular M and T (systems, n, n).

    >>> m, t = torch.tensor([[[1.0, 0.0], [2.0, 1.0]]]), torch.tensor([[[1.0, 0.0], [4.0, 1.0]]])
    >>> congruences(m, t)  # -[[13, 2], [6, 1]] before it is made symmetric
    tensor([[[-13.,  -4.],
             [ -4.,  -1.]]])
    """
    systems, n, _ = m.shape
    if m.stride(2) != 1 or m.stride(0) != n * m.stride(1):
        m = m.contiguous()
    result, t = t.new_empty(t.shape), t.contiguous()
    sizes = map(ctypes.c_int64, (thread_count(), systems, n))
    run(
        library(m.dtype == torch.float64).unsoft_congruences,
        *sizes,
        m,
        ctypes.c_int64(m.stride(1)),
        t,
        result,
    )
    return result


def pivoted(
    x: Tensor, present: Tensor | None, rank: int, tolerance: float, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """F (systems, rank, n), pivots (systems, rank; -1 where nothing was left) and what is left of the
    diagonal (systems, n).
    """
    systems, n, _ = x.shape
    x, present = contiguous(x, present)
    factor, left = x.new_empty(systems, rank, n), x.new_empty(systems, n)
    pivots = torch.empty(systems, rank, dtype=torch.int64)
    numbers = (ctypes.c_int64(rank), ctypes.c_double(tolerance), ctypes.c_double(least))
    run(library(x.dtype == torch.float64).unsoft_pivoted, head(x, present), *numbers, factor, pivots, left)
    return factor, pivots, left


def contiguous(x: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Points and which of them there are, 1 or 0, as the compiled code wants them."""
    present = x.new_ones(x.shape[:2]) if present is None else present.to(x.dtype).contiguous()
    return x.detach().contiguous(), present


def head(x: Tensor, present: Tensor, matrix: Tensor | None = None) -> bytes:
    """struct Gaussian; the tensors must outlive its use."""
    pointers = (x.data_ptr(), present.data_ptr(), 0 if matrix is None else matrix.data_ptr())
    return _HEAD.pack(thread_count(), *x.shape, *pointers)


def _room(like: Tensor, systems: int, n: int) -> Tensor:
    """Memory for factors: rows of whole strips, and never a power of two apart, which caches do not like."""
    return like.new_empty(systems, n, -(-n // SIDE) * SIDE + 16)


def run(function: Any, *arguments: object) -> None:
    """Calls compiled code; a tensor is handed over by its address."""
    dtypes = {x.dtype for x in arguments if isinstance(x, Tensor) and x.is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:  # it would write past their ends
        raise TypeError(f"magnitude: tensors of one dtype, float32 or float64, were expected, not {dtypes}")
    pointers = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
    if function(*pointers):
        raise MemoryError(NO_MEMORY)
