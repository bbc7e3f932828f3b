"""The tiled engine: any formula, any device, torch operations only, memory linear in the sequence length.

The attention matrix exists only as tiles, and tiles that the mask or causality hides are never computed. The
forward pass saves two numbers per row, the peak and the summed mass; the backward pass recomputes each tile
from them (passes.py). Both functions here are pure and run eagerly; ``operator.py`` makes them
differentiable.
"""

from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.tiled.passes import BackwardPass, run_forward
from unsoft.engines.tiled.tiles import MAY_BE_NONFINITE, Grid

__all__ = ["backward", "forward"]


def forward(call: Call) -> Rows:
    """Return the output and row statistics."""
    grid = Grid(call)
    if grid.all_finite:
        return run_forward(grid)
    rows = run_forward(grid.cleaned())
    return rows._replace(out=rows.out + grid.poison())


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k and v, and of what else is needed."""
    grid = Grid(call)
    if grid.all_finite:
        return BackwardPass(grid, upstream).run()
    clean = grid.cleaned()
    gradients = BackwardPass(clean, upstream._replace(rows=run_forward(clean))).run()
    return gradients.where_finite(call, MAY_BE_NONFINITE)
