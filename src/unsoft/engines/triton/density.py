"""Attention with weights and masses divided by the densities of keys, by Triton kernels with gradients.

The kernels of the formula compute the densities of every tile beside its logits (kernel/density.py). Of the
size of rows times keys they hold only the densities of keys before each block of 64 rows.
"""

from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call, Gradients, Rows, Upstream, compute_dtype
from unsoft.engines.native.density import DensityKernels, KeyDensities, NotFinite, attend
from unsoft.engines.triton import availability, binding, launch
from unsoft.engines.triton.binding import Near
from unsoft.engines.triton.launch import Launch, TileSizes, interpreted, on_device, padded, precision, view
from unsoft.engines.triton.structures import NO_VIEW, DensityGradients, KernelDensity, Shape

SIZES = tuple(TileSizes(64, keys, 4, 1) for keys in (64, 32, 16))
"""All kernels of a call have the same rows in a tile, since densities are kept for blocks of rows."""


def density_unsupported(call: Call, densities: KeyDensities) -> str | None:
    """Return why the kernels cannot run this call; None if they can."""
    if reason := availability.unsupported(call):
        return reason
    if call.spans is not None:
        return "densities are those of all keys before a row, and the call has a window"
    if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
        return "it has no gradient for a float mask"
    if (
        call.causal_offset not in (None, 0)
        or call.q.shape[2] > call.k.shape[2]
        or densities.before is not None
    ):
        return "rows and keys must begin at the same position"
    if densities.points.shape[-1] > availability.WIDEST:
        return f"points are wider than {availability.WIDEST}"
    return availability.unavailable(call.q.device.type, call.q.device.index)


def density_attention(call: Call, densities: KeyDensities) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the densities (B, Hk, S) of keys in the last row.

    Raises :class:`NotFinite` if there is NaN or Inf in an input, or no kernel for the call.
    """
    return attend(DensityKernels(_forward, _backward), call, densities)


def _forward(call: Call, densities: KeyDensities) -> tuple[Rows, Tensor, Tensor]:
    rows = Rows.empty(call.q, call.v)
    try:
        with on_device(call.q):
            prepared = _Prepared(call, densities)
            common = binding.run_forward(call, rows, prepared.near)
    except launch.KernelError as error:
        binding.warn_or_raise(call, error)
        raise NotFinite from error
    if not bool(common.flag.sum().isfinite()):
        raise NotFinite
    last = prepared.carry[:, :, -1].clone()
    if call.causal_offset is not None:
        last[..., call.q.shape[2] :] = 0.0  # not seen by the last row
    return rows, prepared.carry, last


def _backward(
    call: Call, densities: KeyDensities, upstream: Upstream, carry: Tensor
) -> tuple[Gradients, Tensor, Tensor]:
    with on_device(call.q):
        return _Prepared(call, densities, carry).gradients(call, upstream)


class _Prepared:
    """Arguments of the kernels, and the densities of keys before each block of rows."""

    def __init__(self, call: Call, densities: KeyDensities, carry: Tensor | None = None) -> None:
        dtype = compute_dtype(call.q.dtype)
        self.points = densities.points.detach().to(dtype)
        squares = self.points.square().sum(-1)
        if densities.present is not None:
            squares = torch.where(densities.present, squares, torch.inf)
        self.causal = call.causal_offset is not None
        batch, self.kv_heads, keys, width = self.points.shape
        self.sizes = (launch.INTERPRETED_SIZES,) if interpreted() else SIZES
        self.rows = self.sizes[0].rows
        self.shape = Shape(self.kv_heads, call.q.shape[2], keys, 0)
        self.blocks = -(-call.q.shape[2] // self.rows)
        self.power = densities.power.detach().to(dtype).contiguous()
        density = KernelDensity(view(self.points), view(squares), NO_VIEW, self.power)
        fixed = {"density": True, "point_precision": precision(dtype)}
        fixed |= {"point_width": width, "point_padded": padded(width)}
        self.near = Near(density, fixed, self.sizes)
        if carry is None:
            carry = self.points.new_empty(batch, self.kv_heads, self.blocks + 1 if self.causal else 1, keys)
            self._start("densities", call, out=view(carry))
        self.carry = carry
        self.near = Near(density._replace(carry=view(carry)), fixed, self.sizes)

    def _start(self, name: str, call: Call, **arguments: Any) -> None:
        """Start a kernel of densities alone: a program for each block of keys and each key head."""
        from unsoft.engines.triton.kernel import density

        common = binding.CallArguments(call, self.near)
        given = {"density": self.near.density, **arguments, "shape": self.shape, "FIXED": common.fixed}
        batch, keys, of_rows = len(self.points), self.shape.keys, name == "density_gradients"

        def grid(sizes: TileSizes) -> tuple[int]:
            return (-(-keys // (sizes.rows if of_rows else sizes.keys)) * batch * self.kv_heads,)

        kernel = getattr(density, f"{name}_kernel")
        launch.start(Launch(name, kernel, given, grid, "", self.points.dtype, self.sizes))

    def gradients(self, call: Call, upstream: Upstream) -> tuple[Gradients, Tensor, Tensor]:
        """Return the gradients of the call, of the points and of the power."""
        (batch, heads, length, _), new = call.q.shape, self.points.new_zeros
        keys, width = self.points.shape[2:]
        group = heads // self.kv_heads
        dpoints = new(self.points.shape)
        of_rows = new(batch, heads, length, width) if self.causal else new(batch, heads, 1, 1)
        sums, dpower = new(batch, heads, self.blocks, keys), new(batch, heads, self.blocks)
        by_density = DensityGradients(view(of_rows), view(sums), view(dpower))
        ours = binding.run_backward(call, upstream, self.near, view(dpoints), by_density)
        later = sums.unflatten(1, (self.kv_heads, group)).sum(2)
        if self.causal:
            dpoints[:, :, :length] += of_rows.unflatten(1, (self.kv_heads, group)).sum(2)
            later = later.flip(2).cumsum(2).flip(2) - later  # rows after the block
        else:
            later = later.sum(2, keepdim=True)
        self._start("density_gradients", call, later=view(later), out=view(dpoints))
        return ours, dpoints, dpower.sum((0, 2))
