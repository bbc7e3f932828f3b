"""Attention with weights and masses divided by the densities of keys, by compiled code with gradients.

Forward and backward pass compute densities tile by tile beside the logits (kernel/density), so nothing of the
size of rows times keys is ever held. The density of every key in the last row that sees it is an output: a
cache continues with them, and the backward pass goes back from them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from unsoft.engines.call import Call, Gradients, Rows, Upstream, compute_dtype
from unsoft.engines.native import binding
from unsoft.engines.native.availability import formula_failure, library, library_failure
from unsoft.engines.native.step import Step, prepare_step
from unsoft.formula import Formula

_DENSITY, _STEP = struct.Struct("12q"), struct.Struct("30q")
_WIDTH = 16
"""Points have rows of whole registers, of up to this many numbers."""


@dataclass(frozen=True)
class KeyDensities:
    """Inputs of the densities, for the key heads of a call."""

    points: Tensor
    """(B, Hk, S, width): keys scaled so that their similarity is exp(-|x - y|^2)."""
    present: Tensor | None
    """Bool (B, Hk, S): False for keys that do not count; None = all do."""
    power: Tensor
    """(H,): p of every head."""
    before: Tensor | None = None
    """(B, Hk, up to S): densities among the keys that the row before the first sees; None = they are
    computed."""
    window: tuple[int, int] | None = None
    """(a, b): row i sees the keys i + a to i + b, as far as there are such, as the call's spans say. None =
    all keys, or those that the causal rule shows."""


class NotFinite(Exception):
    """Raised if the output has NaN or Inf: the caller has other code with rules for them."""


def watched() -> bool:
    """Return True if a tracer or a mode has to see torch's own operations."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
    )


def density_failure(call: Call) -> str | None:
    """Return why compiled code cannot run this call; None if it can."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {call.q.device}"
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (call.q, call.k, call.v)):
        return "it takes plain tensors"
    if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
        return "it has no gradient for a float mask"
    double = call.q.dtype == torch.float64
    return library_failure("density", double) or formula_failure(call.formula.key, double)


def density_attention(call: Call, densities: KeyDensities) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the density (B, Hk, S) of each key in the last row that sees it, in
    float64; it is 0 for keys after the last row. Raises :class:`NotFinite` if there is NaN or Inf in a
    visible input.

    >>> from unsoft.formula import Formula
    >>> softmax = Formula(weight="exp(s - m)", mass="exp(s - m)", peak="s")
    >>> q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [1.0], [7.0]]]])
    >>> k[:, :, 2] = 9.0                                       # two clones, and a key far from them
    >>> call = Call(q, k, v, softmax, torch.zeros(0, 1))
    >>> out, rho = density_attention(call, KeyDensities(k, None, torch.ones(1)))
    >>> out.item(), rho.flatten().tolist()                     # (1/2 + 1/2 + 7) / 2
    (4.0, [2.0, 2.0, 1.0])
    """
    points = densities.points
    if points.shape[-1] % _WIDTH:
        points = pad(points, (0, -points.shape[-1] % _WIDTH))
    return attend(DensityKernels(_forward, _backward), call, replace(densities, points=points))


def _forward(call: Call, densities: KeyDensities) -> tuple[Rows, Tensor, Tensor]:
    code, packed = binding.kernel(call.formula.key, call.q.dtype), _Packed(call, densities)
    rows = Rows.empty(call.q, call.v)
    common = binding.Common(code, call)
    if packed.run("unsoft_density_forward", common.pack(*rows)) != binding.FINITE:
        raise NotFinite
    return rows, packed.rho, packed.rho


def _backward(
    call: Call, densities: KeyDensities, upstream: Upstream, rho: Tensor
) -> tuple[Gradients, Tensor, Tensor]:
    code, packed = binding.kernel(call.formula.key, call.q.dtype), _Packed(call, densities, rho)
    run = partial(packed.run, "unsoft_density_backward")
    return binding.gradients(code, call, upstream, run)[0], packed.dx, packed.dpower


class DensityKernels(NamedTuple):
    """Compiled code of one engine."""

    forward: Callable[[Call, KeyDensities], tuple[Rows, Tensor, Tensor]]
    """Returns the rows, what the backward pass needs besides, and the densities to return."""
    backward: Callable[[Call, KeyDensities, Upstream, Tensor], tuple[Gradients, Tensor, Tensor]]
    """Returns the gradients of the call, of the points and of the power."""


def attend(kernels: DensityKernels, call: Call, densities: KeyDensities) -> tuple[Tensor, Tensor]:
    """Return output and densities by the code of one engine, with the gradients of all inputs."""
    tensors = (call.q, call.k, call.v, call.params, call.query_fields, call.key_fields)
    out, rho = _Attention.apply(  # type: ignore[no-untyped-call]
        kernels, call, densities, *tensors, densities.points, densities.power
    )
    return out, rho


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: DensityKernels, call: Call, densities: KeyDensities, *tensors: Tensor | None
    ) -> Any:
        rows, kept, rho = kernels.forward(call, densities)
        # Inputs are kept as saved tensors only: those are checked for changes in place, and hooks see them.
        none = call.params.new_empty(0)
        ctx.call = replace(call, q=none, k=none, v=none, params=none, query_fields=None, key_fields=None)
        ctx.densities, ctx.kernels = replace(densities, points=none, power=none), kernels
        ctx.save_for_backward(*tensors, *rows, kept)
        ctx.mark_non_differentiable(rho)
        return rows.out, rho

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> Any:
        *tensors, out, peak, total, kept = ctx.saved_tensors
        q, k, v, params, query_fields, key_fields, points, power = tensors
        needed = ctx.needs_input_grad[3:]
        fields = {"query_fields": query_fields, "key_fields": key_fields}
        call = replace(ctx.call, q=q, k=k, v=v, params=params, **fields)
        optional = ("params", "query_fields", "key_fields")
        needs = {f"need_{name}": need for name, need in zip(optional, needed[3:6], strict=True)}
        upstream = Upstream(grad_out, Rows(out, peak, total), need_bias=False, **needs)
        densities = replace(ctx.densities, points=points, power=power)
        ours, dpoints, dpower = ctx.kernels.backward(call, densities, upstream, kept)
        given = (getattr(ours, name) if needs[f"need_{name}"] else None for name in optional)
        return None, None, None, ours.q, ours.k, ours.v, *given, dpoints, dpower.to(power.dtype)


class _Packed:
    """struct Density, and the tensors that its addresses point to."""

    def __init__(self, call: Call, densities: KeyDensities, rho: Tensor | None = None) -> None:
        dtype = compute_dtype(call.q.dtype)
        self.double = dtype == torch.float64
        self.points = densities.points.detach().to(dtype).contiguous()
        shape = self.points.shape[:3]
        self.present = None if densities.present is None else densities.present.to(dtype).contiguous()
        self.power = densities.power.detach().to(dtype).contiguous()
        before = densities.before
        if before is not None:
            before = pad(before.detach().double(), (0, shape[2] - before.shape[-1])).contiguous()
        self.before = before
        self.rho = torch.empty(shape, dtype=torch.float64) if rho is None else rho
        backward = rho is not None
        self.dx = torch.empty_like(self.points) if backward else self.points.new_empty(0)
        self.dpower = torch.zeros(len(self.power), dtype=torch.float64)
        additive = call.formula.bias == "logit"
        tensors = (self.power, self.before, self.rho, self.dx, self.dpower)
        window = densities.window
        points = (self.points.data_ptr(), binding.address(self.present), self.points.shape[-1])
        ends = (window is not None, *(window or (0, 0)))
        self._packed = _DENSITY.pack(*points, additive, *map(binding.address, tensors), *ends)

    def run(self, name: str, call: bytes) -> int:
        status: int = getattr(library("density", self.double), name)(call, self._packed)
        return binding.check_status(status)


class DensityStep(binding.Prepared):
    """Prepared decoding steps of one token, for the buffers of one cache; see native/step.py."""

    def __init__(self, step: Step, query: Tensor, geometry: Tensor | None) -> None:
        keys, heads = step.buffers[0], query.shape[1]
        self.step, self.geometry = step, geometry
        self._double = query.dtype == torch.float64
        self._function = library("density", self._double).unsoft_density_step
        dtype = compute_dtype(query.dtype)
        self._bias = torch.empty(keys.shape[0], heads, keys.shape[2], dtype=dtype)
        step.set_mask(self._bias)

    @classmethod
    def prepare(
        cls,
        tokens: tuple[Tensor, Tensor, Tensor],
        formula: Formula,
        options: tuple[float | None, bool],
        buffers: tuple[Tensor | None, Tensor | None],
        geometry: Tensor | None,
    ) -> DensityStep | None:
        """Return steps for tokens like these, or None if they have to take the general path. ``options``:
        scale and enable_gqa; ``geometry``: the buffer of points other than the keys."""
        query, key, _ = tokens
        if key.dim() != 4 or key.shape[2] != 1 or query.shape[2] != 1:
            return None
        step = prepare_step(*tokens, formula, *options, buffers)
        if step is None or library_failure("density", query.dtype == torch.float64) is not None:
            return None
        return cls(step, query, geometry)

    def serves(self, formula: Formula, buffers: Any, options: object, geometry: Tensor | None) -> bool:
        """Return True if it was prepared for this formula, these very buffers and these options."""
        return self.geometry is geometry and self.step.serves(formula, buffers, options)

    def run(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        point: Tensor | None,
        before: Tensor,
        constants: tuple[Tensor, Tensor],
        window: tuple[int, int | None] = (0, None),
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output and the densities of all keys; None if the step has to take the general path.

        ``point``: the new one, if points are not the keys; ``before``: densities (B, Hk, length) so far;
        ``constants``: t / d of every key head, and p of every head; ``window``: the first key that the token
        sees, and the key that the last one saw and it does not.
        """
        points, before, length = self.step.buffers[0], before.double().contiguous(), before.shape[2]
        appended: tuple[int, ...] = (0,) * 15
        if self.geometry is not None:
            points = self.geometry
            if point is None or type(point) is not Tensor or point.is_neg() or length >= points.shape[2]:
                return None
            if point.shape[3] != points.shape[3] or point.dtype is not points.dtype or not point.is_cpu:
                return None
            to, size = points.data_ptr() + length * points.stride(2) * points.element_size(), points.shape
            numbers = (size[0], size[1], 1, size[3], points.element_size())
            appended = (*numbers, to, *points.stride(), point.data_ptr(), *point.stride())
        after = before.new_empty(*before.shape[:2], length + 1)
        addresses = (x.data_ptr() for x in (*constants, before, after, self._bias))
        source = (points.data_ptr(), *points.stride(), binding.TYPES[points.dtype], points.shape[3])
        first, leaving = window
        ends = (first, -1 if leaving is None else leaving)
        density = _STEP.pack(*appended, *source, *addresses, self._bias.shape[2], *ends)
        self.step.function = lambda memory, token: self._function(memory, token, density)
        out = self.step.run(*tokens, length)
        return None if out is None else (out, after)
