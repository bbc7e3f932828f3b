"""The tiled engine: any formula, any device, torch operations only, memory linear in the sequence length.

The attention matrix exists only as tiles, and tiles that the mask or causality hides are never computed. The
forward pass (:mod:`unsoft.engines.forward_pass`) saves two numbers per row, the peak and the summed mass; the
backward pass (:mod:`unsoft.engines.backward_pass`) recomputes each tile from them. Both functions here are
pure and run eagerly; ``operator.py`` makes them differentiable.
"""

import torch
from torch import Tensor

from unsoft.engines.backward_pass import BackwardPass
from unsoft.engines.forward_pass import forward_pass
from unsoft.engines.tiles import Grid
from unsoft.formula import Formula


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    positions: Tensor | None,
    params: Tensor,
    seed: Tensor | None,
    *,
    formula: str,
    causal_offset: int | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, L, Dv), peak m and total z (B, H, L); arguments as in :class:`~unsoft.engines.Call`."""
    content = Formula.from_key(formula)
    grid = Grid(
        q, k, v, visible, bias, counts, positions, params, seed, content, causal_offset, scale, dropout_p
    )
    if grid.all_finite:
        return forward_pass(grid)
    out, peak, total = forward_pass(grid.cleaned())
    return out + grid.poison(), peak, total


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    positions: Tensor | None,
    params: Tensor,
    seed: Tensor | None,
    out: Tensor,
    peak: Tensor,
    total: Tensor,
    *,
    formula: str,
    causal_offset: int | None,
    scale: float,
    dropout_p: float,
    need_bias: bool,
    need_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and params; the last two are empty unless needed."""
    content = Formula.from_key(formula)
    grid = Grid(
        q, k, v, visible, bias, counts, positions, params, seed, content, causal_offset, scale, dropout_p
    )
    if grid.all_finite:
        return BackwardPass(grid, grad_out, out, peak, total, need_bias, need_params).run()
    clean = grid.cleaned()
    dq, dk, dv, dbias, dparams = BackwardPass(
        clean, grad_out, *forward_pass(clean), need_bias, need_params
    ).run()
    # A non-finite entry counts as the constant 0, with NaN added to what sees it, so its own gradient is 0.
    dq, dk, dv = (torch.where(x.isfinite(), dx, 0.0) for x, dx in ((q, dq), (k, dk), (v, dv)))
    if bias is not None and need_bias:
        dbias = torch.where(bias.isfinite(), dbias, 0.0)
    return dq, dk, dv, dbias, dparams
