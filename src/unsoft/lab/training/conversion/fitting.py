"""The output projections of swapped attention, fitted to the original's output by least squares.

Outputs of a mechanism whose weights do not sum to one have another size, which a projection can undo at once,
while gradient steps take long. Layers are fitted one after the other in a single pass of the copy, each to
the input that it gets after the fitted layers before it. Fitted to the original's inputs instead, SmolLM2
with relu2 had a perplexity of 22 million, not 873 (sigmoid: 109, not 121).

A projection is first scaled head by head, then changed by ridge regression around that. Three quarters of the
texts are fitted; the last quarter selects the candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.hf.architecture import attention_modules
from unsoft.lab.interpret.models import matrix_of
from unsoft.lab.training.conversion.matching import Pair, first_output

_RIDGES = (1.0, 0.1, 0.01)
"""Ridge strengths in units of the mean square of the inputs."""
FEWEST = 4
"""Fewest texts: the last quarter checks the fit."""
_TINY = 1e-9


class _Sums:
    """Sufficient statistics of least squares from inputs x to targets y: x^T x, x^T y and |y|^2."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        # In float64, since the products are inverted later and :meth:`error` subtracts nearly equal terms.
        x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
        self.xx, self.xy, self.yy = x.mT @ x, x.mT @ y, float(y.square().sum())

    def error(self, matrix: Tensor) -> float:
        """Return |x matrix - y|^2 / |y|^2, expanded so that x and y need not be kept."""
        change = (matrix * (self.xx @ matrix - 2 * self.xy)).sum()
        return (float(change) + self.yy) / self.yy


@torch.no_grad()
def fit(pair: Pair, windows: Tensor) -> int:
    """Fit the projections of ``pair.student`` and return how many changed.

    windows
        Texts (count, tokens), at least four; all go through the original once, then through the copy. A layer
        whose output is not that of a linear map, or that is best unchanged, stays unchanged.
    """
    targets = _outputs(pair, windows)
    heads = {one.name: one.layer_spec.heads for one in attention_modules(pair.student)}
    last = len(windows) - len(windows) // FEWEST
    changed = []

    def improve(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(projection: nn.Module, args: tuple[Any, ...]) -> None:
            matrix, bias = matrix_of(projection), getattr(projection, "bias", None)
            assert matrix is not None
            x, y = args[0], targets[name][1] if bias is None else targets[name][1] - bias
            fitted, checked = _Sums(x[:last], y[:last]), _Sums(x[last:], y[last:])
            best = _best(matrix.double(), heads[name], fitted, checked)
            if best is not None:
                matrix.copy_(best)
                changed.append(name)

        return before

    pair.student.eval()
    with ExitStack() as hooks:
        for name, (path, _) in targets.items():
            projection = pair.student.get_submodule(path)
            hooks.callback(projection.register_forward_pre_hook(improve(name)).remove)
        pair.student.base_model(input_ids=windows, use_cache=False)
    return len(changed)


def _outputs(pair: Pair, windows: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Return, for each changed attention module, the path of its output projection and the original's
    output.
    """
    assert pair.teacher is not None
    calls: list[tuple[str, Tensor]] = []
    outputs: dict[str, tuple[str, Tensor]] = {}

    def record_call(path: str) -> Callable[..., None]:
        return lambda module, args, output: calls.append((path, output))

    def find_projection(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            whole = first_output(output)
            for path, part in calls:
                if part.shape == whole.shape and torch.equal(part, whole):
                    outputs[name] = path, whole
            calls.clear()

        return after

    with ExitStack() as hooks:
        for name in pair.changed:
            module = pair.teacher.get_submodule(name)
            for path, inner in module.named_modules(prefix=name):
                if matrix_of(inner) is not None:
                    hooks.callback(inner.register_forward_hook(record_call(path)).remove)
            hooks.callback(module.register_forward_hook(find_projection(name)).remove)
        pair.teacher.base_model(input_ids=windows, use_cache=False)
    return outputs


def _best(matrix: Tensor, heads: int, fitted: _Sums, checked: _Sums) -> Tensor | None:
    """Return the candidate with the smallest error on held-out texts; None if it is the unchanged matrix."""
    scaled = _scaled(matrix, heads, fitted)
    size = fitted.xx.diagonal().mean()  # makes the ridges independent of the scale and number of inputs
    candidates = [matrix, scaled]
    for ridge in _RIDGES:
        system = fitted.xx + ridge * size * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        # Ridge on the change, not on the matrix: a large ridge gives back the scaled matrix, never zero.
        candidates.append(scaled + torch.linalg.solve(system, fitted.xy - fitted.xx @ scaled))
    errors = [checked.error(candidate) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    return candidates[best] if best else None


def _scaled(matrix: Tensor, heads: int, fitted: _Sums) -> Tensor:
    """Return the matrix with the rows of each head scaled by the best factor."""
    by_head = torch.block_diag(*matrix.new_ones(heads, len(matrix) // heads, 1)).mT
    parts = by_head[:, :, None] * matrix
    products = torch.einsum("hio,ij,gjo->hg", parts, fitted.xx, parts)
    target = torch.einsum("hio,io->h", parts, fitted.xy)
    # A head whose output is always 0 would make the system singular.
    products.diagonal().add_(_TINY * products.diagonal().mean())
    return torch.einsum("h,hio->io", torch.linalg.solve(products, target), parts)
