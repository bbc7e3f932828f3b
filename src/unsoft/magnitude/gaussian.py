"""Gaussian similarities Z_jl = exp(-|x_j - x_l|^2) of sets of points, with gradients: between points, as a
matrix to multiply with, its inverse Cholesky factor, and the systems Z + eps that are solved.

Points come scaled (x = k sqrt(t / d), see points.py), so that the kernel has no parameter and t learns
through the scaling. Gradients are written out: they exist where points coincide, where the gradient of a
distance does not. Compiled code (engines/native/gaussian.py) is used where it is available, torch elsewhere.

``torch.compile`` does not trace loops over systems and our own compiled code (:func:`untraced`), and autocast
does not change their precision (:func:`full_precision`): a matrix of similarities in bfloat16 is not positive
definite, and the compiled code takes float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.engines.gaussian import kernels_for
from unsoft.engines.native.gaussian import PackedGaussian
from unsoft.engines.triton.gaussian import TiledGaussian
from unsoft.errors import SolverError
from unsoft.tracing import constant_in_graph

_EXACT = "donot_use_mm_for_euclid_dist"  # near-clones lose all their digits in |x|^2 + |y|^2 - 2 x y

F = TypeVar("F", bound=Callable[..., Any])


def full_precision(function: F) -> F:
    """Disable autocast inside the function."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not kinds:
            return function(*arguments, **options)
        with ExitStack() as off:
            for kind in kinds:
                off.enter_context(torch.autocast(kind, enabled=False))
            return function(*arguments, **options)

    return run  # type: ignore[return-value]


def untraced(function: F) -> F:
    """Exclude the function from torch.compile. ``torch.compiler.disable`` imports all of dynamo, so it is
    called only when something is compiled."""

    name, function = function.__name__, full_precision(function)
    _functions[name] = function

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_exporting():
            raise ValueError(
                "export: magnitude solves systems by loops and compiled code, which torch.export and ONNX"
                " cannot write down; export a mechanism without it, such as the one after 'magnitude+'"
            )
        if torch.compiler.is_compiling() and _prepare(name):
            return _disabled[name](*arguments, **options)
        return function(*arguments, **options)

    return run  # type: ignore[return-value]


_functions: dict[str, Callable[..., Any]] = {}
_disabled: dict[str, Callable[..., Any]] = {}


@constant_in_graph
def _prepare(name: str) -> bool:
    if name not in _disabled:
        _disabled[name] = torch.compiler.disable(_functions[name])
    return True


def pull(x: Tensor, w: Tensor) -> Tensor:
    """Return -2 sum_l w_jl (x_j - x_l), the gradient that a symmetric w = Z (gradient of Z, both ways) puts
    on the points. Overwrites w."""
    w.diagonal(dim1=-2, dim2=-1).zero_()  # a point has no distance from itself
    return 2 * (w @ x - w.sum(-1, keepdim=True) * x)


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, diagonal: float, engine: str) -> Tensor:
        z = between(x, x, engine)
        z.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
        ctx.save_for_backward(x, z)
        return z

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, z = ctx.saved_tensors
        return pull(x, z * (grad + grad.mT)), None, None


def gaussian_within(x: Tensor, diagonal: float, engine: str) -> Tensor:
    """Return exp(-|x_j - x_l|^2), shape (systems, n, n), of points (systems, n, d), with another diagonal."""
    z: Tensor = _Within.apply(x, diagonal, engine)  # type: ignore[no-untyped-call]
    return z


def between(x: Tensor, y: Tensor, engine: str) -> Tensor:
    """Return :func:`gaussian` without a gradient."""
    kernels = kernels_for(x, engine)
    if kernels is not None:
        return kernels.between(x, y)
    return torch.cdist(x, y, compute_mode=_EXACT).square().neg().exp()


class _Gaussian(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, engine: str) -> Tensor:
        z = between(x, y, engine)
        ctx.save_for_backward(x, y, z)
        return z

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y, z = ctx.saved_tensors
        w = 2 * grad * z
        dx = w @ y - w.sum(2)[..., None] * x if ctx.needs_input_grad[0] else None
        dy = w.mT @ x - w.sum(1)[..., None] * y if ctx.needs_input_grad[1] else None
        return dx, dy, None


def gaussian(x: Tensor, y: Tensor, engine: str = "auto") -> Tensor:
    """Return exp(-|x_j - y_l|^2), shape (systems, n, m), of points (systems, n, d) and (systems, m, d).

    >>> x = torch.zeros(1, 2, 3, requires_grad=True)
    >>> gaussian(x, x).sum().backward()
    >>> x.grad.abs().max()                                                  # coinciding points: 0, not NaN
    tensor(0.)
    """
    z: Tensor = _Gaussian.apply(x, y, engine)  # type: ignore[no-untyped-call]
    return z


def working_dtype(dtype: torch.dtype, eps: float) -> torch.dtype:
    """Return float64 where float32 could fail. It depends on nothing but eps: a choice by the points would
    not be causal."""
    return torch.float64 if eps < 1e-3 else dtype


class DenseGaussian:
    """The whole matrix of each system, by torch, on any device; the counterpart of
    :class:`PackedGaussian`."""

    def __init__(self, x: Tensor, present: Tensor | None = None, first: Tensor | None = None) -> None:
        self.x = x.detach()
        self.matrix = between(self.x, self.x, "torch")
        if present is not None:
            self.matrix = self.matrix * (present[:, :, None] & present[:, None, :])
        self.first_product = x.new_empty(0) if first is None else self.product(first)

    def product(self, x: Tensor) -> Tensor:
        """Return Z x for vectors (systems, n)."""
        return (self.matrix @ x[..., None])[..., 0]

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of sum_r u_r Z v_r with respect to the points; u and v are (systems, rank,
        n)."""
        return pull(self.x, self.matrix * (u.mT @ v + v.mT @ u))


Matrix = PackedGaussian | TiledGaussian | DenseGaussian


_BLOCK = 128


@untraced
def inverse_factor(a: Tensor, engine: str = "auto") -> Tensor:
    """Return the lower triangular M with M A M^T = 1 for positive definite A (systems, n, n), of which the
    lower half is read.

    The gradient is the symmetric one.

    >>> inverse_factor(torch.tensor([[[4.0, 2.0], [2.0, 5.0]]]))                # L = [[2, 0], [1, 2]]
    tensor([[[ 0.5000,  0.0000],
             [-0.2500,  0.5000]]])
    """
    m: Tensor = _InverseFactor.apply(a, engine)  # type: ignore[no-untyped-call]
    return m


def inverse_factor_of(a: Tensor, engine: str) -> Tensor:
    """Return :func:`inverse_factor` without a gradient."""
    kernels = kernels_for(a, engine)
    factors = None if kernels is None else kernels.inverse_factors
    m, done = _by_blocks(a) if factors is None else factors(a)
    check_done(done, a)
    return m


class _InverseFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, engine: str) -> Tensor:
        m = inverse_factor_of(a, engine)
        ctx.save_for_backward(m)
        ctx.engine = engine
        return m

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (m,) = ctx.saved_tensors
        return congruence(m, halved(grad @ m.mT), ctx.engine), None


def congruence(m: Tensor, t: Tensor, engine: str) -> Tensor:
    """Return the symmetric part of -M^T T M for lower triangular M and T: the gradient of A if T is that of M
    times M^T, halved."""
    kernels = kernels_for(m, engine)
    if kernels is not None and kernels.congruences is not None:
        return kernels.congruences(m, t)
    product = m.mT @ (t @ m)
    return -(product + product.mT) / 2


def check_done(done: int, x: Tensor) -> None:
    """Raise SolverError unless all rows of a factor of x (systems, n, ...) could be computed."""
    if done < x.shape[1]:
        raise SolverError(
            f"magnitude: the matrix of similarities is not positive definite in {x.dtype} from point {done}"
            " on; points that coincide need a larger eps, or float64"
        )


def halved(x: Tensor) -> Tensor:
    """Return the lower half, with half of the diagonal."""
    return x.tril() - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1) / 2)


def _by_blocks(a: Tensor) -> tuple[Tensor, int]:
    """Compute the factor as the compiled code does, block row by block row; also return the number of rows
    before the first that fails."""
    n = a.shape[-1]
    m = torch.zeros_like(a)
    for start in range(0, n, _BLOCK):
        new = slice(start, min(start + _BLOCK, n))
        b = a[:, new, :start] @ m[:, :start, :start].mT
        c, failed = torch.linalg.cholesky_ex(a[:, new, new] - b @ b.mT)
        if bool(failed.any()):
            return m, start + int(failed[failed > 0].min()) - 1
        own = torch.linalg.solve_triangular(
            c, torch.eye(c.shape[-1], dtype=a.dtype, device=a.device).expand_as(c), upper=False
        )
        m[:, new, new] = own
        m[:, new, :start] = -(own @ (b @ m[:, :start, :start]))
    return m, n


@dataclass(frozen=True)
class System:
    """The operator Z + eps, Z_jl = exp(-|x_j - x_l|^2), of several sets of points side by side."""

    x: Tensor
    """(systems, n, d), scaled; see points.py"""
    present: Tensor | None
    """Bool (systems, n), or None if all points are there."""
    eps: float
    engine: str = "auto"
    """Which engine of attention computes with Z; see :mod:`unsoft.engines.gaussian`."""

    @property
    def ones(self) -> Tensor:
        """The right-hand side (systems, n): 1 for every point that is present."""
        if self.present is None:
            return self.x.new_ones(self.x.shape[:2])
        return self.present.to(self.x.dtype)

    def matrix(self) -> Tensor:
        """Return Z + eps (systems, n, n), differentiable; an absent point is a row of the identity."""
        z = gaussian_within(self.x, 1 + self.eps, self.engine)
        if self.present is None:
            return z
        unit = torch.eye(self.x.shape[1], dtype=torch.bool, device=self.x.device)
        return torch.where(self.present[:, :, None] & self.present[:, None, :] | unit, z, 0.0)

    def similarities(self, first: Tensor, reuse: Matrix | None = None) -> Matrix:
        """Return Z, without eps, as an operator that also holds its product with ``first`` (systems, n).

        ``reuse`` is an earlier operator whose memory may be overwritten.
        """
        kernels = kernels_for(self.x, self.engine)
        if kernels is None:
            return DenseGaussian(self.x, self.present, first)
        reused = reuse if isinstance(reuse, PackedGaussian) else None
        return kernels.matrix(self.x, self.present, first, reused)

    def to(self, dtype: torch.dtype) -> System:
        return replace(self, x=self.x.to(dtype))

    def detach(self) -> System:
        """Return the system without a gradient, as the forward pass of an autograd function needs it."""
        return replace(self, x=self.x.detach())

    def to_working_dtype(self) -> System:
        """Return the system in float64 where float32 could fail."""
        return self.to(working_dtype(self.x.dtype, self.eps))

    def split(self, sizes: list[int]) -> list[System]:
        """Return the points in pieces of these sizes; not slices, whose gradients are as long as the
        whole."""
        presences = [None] * len(sizes) if self.present is None else self.present.split(sizes, dim=1)
        parts = zip(self.x.split(sizes, dim=1), presences, strict=True)
        return [replace(self, x=x, present=present) for x, present in parts]

    def groups(self, *more: Tensor, numbers: int = 0) -> Iterator[tuple[System, list[Tensor]]]:
        """Yield as many systems at a time as there are threads (all at once on other devices), or as have
        ``numbers`` numbers in their matrices, with their parts of ``more``."""
        x, present = self.x, self.present
        small = numbers // max(x.shape[1] ** 2, 1)
        size = max(torch.get_num_threads(), small) if x.device.type == "cpu" else max(len(x), 1)
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            group = replace(self, x=x[part], present=None if present is None else present[part])
            yield group, [y[part] for y in more]
