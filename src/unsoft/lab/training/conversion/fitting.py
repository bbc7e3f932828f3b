"""The output projections of swapped attention, fitted to the original's output by least squares.

A mechanism whose weights do not sum to one gives outputs of another size, which a projection can undo at
once, where gradient steps take long. Layers are fitted one after the other in a single pass of the copy, each
to the input that it really gets after the ones before it: fitted to the original's inputs, SmolLM2 with relu2
had a perplexity of 22 million, fitted so 873 (sigmoid: 109 and 121).

Three quarters of the texts make the fit, the last quarter decides how far it may move: a projection is first
scaled head by head, then changed by ridge regression around that.
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
"""In units of the mean square of the inputs."""
FEWEST = 4
"""Texts: the last quarter of them checks the fit."""
_TINY = 1e-9


class _Sums:
    """What least squares needs to know of inputs x and wanted outputs y: x^T x, x^T y, and |y|^2."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
        self.xx, self.xy, self.yy = x.mT @ x, x.mT @ y, float(y.square().sum())

    def error(self, matrix: Tensor) -> float:
        """|x matrix - y|^2 / |y|^2."""
        apart = (matrix * (self.xx @ matrix - 2 * self.xy)).sum()
        return (float(apart) + self.yy) / self.yy


@torch.no_grad()
def fit(pair: Pair, windows: Tensor) -> int:
    """Changes the projections of ``pair.student``; how many of them.

    windows
        Texts (count, tokens), at least four; all go through the original once, then through the copy. A layer
        whose output is not that of a linear map, or that does best as it is, is left as it is.
    """
    wanted = _outputs(pair, windows)
    heads = {found.name: found.layer_spec.heads for found in attention_modules(pair.student)}
    last = len(windows) - len(windows) // FEWEST
    changed = []

    def improve(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(projection: nn.Module, args: tuple[Any, ...]) -> None:
            matrix, bias = matrix_of(projection), getattr(projection, "bias", None)
            assert matrix is not None
            x, y = args[0], wanted[name][1] if bias is None else wanted[name][1] - bias
            fitted, checked = _Sums(x[:last], y[:last]), _Sums(x[last:], y[last:])
            found = _best(matrix.double(), heads[name], fitted, checked)
            if found is not None:
                matrix.copy_(found)
                changed.append(name)

        return before

    pair.student.eval()
    with ExitStack() as hooks:
        for name, (path, _) in wanted.items():
            projection = pair.student.get_submodule(path)
            hooks.callback(projection.register_forward_pre_hook(improve(name)).remove)
        pair.student.base_model(input_ids=windows, use_cache=False)
    return len(changed)


def _outputs(pair: Pair, windows: Tensor) -> dict[str, tuple[str, Tensor]]:
    """For each attention module that changed: the path of its output projection, the original's output."""
    assert pair.teacher is not None
    calls: list[tuple[str, Tensor]] = []
    found: dict[str, tuple[str, Tensor]] = {}

    def hear(path: str) -> Callable[..., None]:
        return lambda module, args, output: calls.append((path, output))

    def see(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            whole = first_output(output)
            for path, part in calls:
                if part.shape == whole.shape and torch.equal(part, whole):
                    found[name] = path, whole
            calls.clear()

        return after

    with ExitStack() as hooks:
        for name in pair.changed:
            module = pair.teacher.get_submodule(name)
            for path, inner in module.named_modules(prefix=name):
                if matrix_of(inner) is not None:
                    hooks.callback(inner.register_forward_hook(hear(path)).remove)
            hooks.callback(module.register_forward_hook(see(name)).remove)
        pair.teacher.base_model(input_ids=windows, use_cache=False)
    return found


def _best(matrix: Tensor, heads: int, fitted: _Sums, checked: _Sums) -> Tensor | None:
    """The candidate that does best on texts it has not seen; None if that is the matrix as it is."""
    scaled = _scaled(matrix, heads, fitted)
    size = fitted.xx.diagonal().mean()
    candidates = [matrix, scaled]
    for ridge in _RIDGES:
        system = fitted.xx + ridge * size * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        candidates.append(scaled + torch.linalg.solve(system, fitted.xy - fitted.xx @ scaled))
    errors = [checked.error(candidate) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    return candidates[best] if best else None


def _scaled(matrix: Tensor, heads: int, fitted: _Sums) -> Tensor:
    """Each head's rows times the number of its own that fits best."""
    by_head = torch.block_diag(*matrix.new_ones(heads, len(matrix) // heads, 1)).mT
    parts = by_head[:, :, None] * matrix
    products = torch.einsum("hio,ij,gjo->hg", parts, fitted.xx, parts)
    wanted = torch.einsum("hio,io->h", parts, fitted.xy)
    products.diagonal().add_(_TINY * products.diagonal().mean())
    return torch.einsum("h,hio->io", torch.linalg.solve(products, wanted), parts)
