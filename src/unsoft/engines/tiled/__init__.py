"""The tiled engine: any formula, any device, torch operations only, memory linear in the sequence length.

The attention matrix exists only as tiles, and tiles that the mask or causality hides are never computed. The
forward pass (:mod:`unsoft.engines.tiled.forward_pass`) saves two numbers per row, the peak and the summed
mass; the backward pass (:mod:`unsoft.engines.tiled.backward_pass`) recomputes each tile from them. Both
functions here are pure and run eagerly; ``operator.py`` makes them differentiable.
"""

import torch

from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.tiled.backward_pass import BackwardPass, shared_heads
from unsoft.engines.tiled.forward_pass import run_forward
from unsoft.engines.tiled.tiles import Grid

__all__ = ["backward", "forward", "shared_heads"]


def forward(call: Call) -> Rows:
    """Output and row statistics."""
    grid = Grid(call)
    if grid.all_finite:
        return run_forward(grid)
    rows = run_forward(grid.cleaned())
    return rows._replace(out=rows.out + grid.poison())


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Gradients of q, k and v, and of what else is needed."""
    grid = Grid(call)
    if grid.all_finite:
        return BackwardPass(grid, upstream).run()
    clean = grid.cleaned()
    found = BackwardPass(clean, upstream._replace(rows=run_forward(clean))).run()
    # A non-finite entry counts as the constant 0, with NaN added to what sees it, so its own gradient is 0.
    for name in ("q", "k", "v", "bias", "query_fields", "key_fields"):
        given, gradient = getattr(call, name), getattr(found, name)
        if given is not None and gradient.numel():
            found = found._replace(**{name: torch.where(given.isfinite(), gradient, 0.0)})
    return found
