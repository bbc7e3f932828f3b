"""Find the attention layers of a model by observing one forward pass; no architecture is known by name.

The pass also verifies the computation: the weights that inspection computes, times the values, must give the
output of each call. Otherwise ValueError is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret.inspection.observe import AttentionCall, observe
from unsoft.lab.interpret.inspection.sequence import sequences, swapped_in
from unsoft.lab.interpret.models import InputBatch, hooked, matrix_of

_TOLERANCE = {4: 1e-3, 8: 1e-3, 2: 5e-2}
"""Allowed error of an output relative to it, both as root mean squares, by bytes of the dtype."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention call of a forward pass."""

    number: int
    name: str
    heads: int
    mechanism: str
    """``softmax`` for stock attention."""
    out_proj: Tensor | None
    """(heads, head dim, width): the output projection by head, None if there is none."""
    projection: nn.Module | None = None
    """The module of the output projection."""


@dataclass(frozen=True)
class Layout:
    layers: dict[int, AttentionLayer]
    blocks: dict[str, nn.Module]
    """The blocks that contain attention, by name."""
    skipped: list[str]
    """Attention that is not inspected, with the reason."""


def find_layout(model: nn.Module, run: Callable[..., None], batch: InputBatch) -> Layout:
    """Find the attention layers; ``run`` calls the model, with the first sequence of ``batch``."""
    first = {name: x[:1] if isinstance(x, Tensor) else x for name, x in batch.inputs.items()}
    finder = _Finder(model, InputBatch(first, batch.labels[:1]))
    linear = [module for module in model.modules() if matrix_of(module) is not None]
    hooks = [module.register_forward_pre_hook(finder.projection) for module in linear]
    with hooked(*hooks), observe(model, finder):
        run(**first)
    if not finder.calls:
        raise ValueError(
            f"inspect: {type(model).__name__} made no call through transformers' attention interface, so"
            " there is nothing to"
            " look at" + (f" ({'; '.join(finder.skipped)})" if finder.skipped else "")
        )
    layers = {}
    for number, (name, module, heads) in finder.calls.items():
        swapped, projection = swapped_in(module), finder.projections.get(number)
        label = "softmax" if swapped is None else swapped.label
        out_proj = _by_head(projection, heads)
        layers[number] = AttentionLayer(number, name, heads, label, out_proj, projection)
    return Layout(layers, _blocks(model, [layer.name for layer in layers.values()]), finder.skipped)


class _Finder:
    def __init__(self, model: nn.Module, batch: InputBatch) -> None:
        self.model, self.batch = model, batch
        self.calls: dict[int, tuple[str, nn.Module, int]] = {}
        self.projections: dict[int, nn.Module] = {}
        self.skipped: list[str] = []
        self._open: tuple[int, Tensor] | None = None

    def attention(self, call: AttentionCall) -> None:
        if not call.self_attention:
            self.skipped.append(
                f"{call.name}: {call.query.shape[-2]} queries look at {call.key.shape[-2]} keys that are not"
                " their own sequence"
            )
            return
        heads = _checked_heads(self.model, call, self.batch.real_positions(call.query.shape[-2])[:1])
        self.calls[call.number] = (call.name, call.module, heads)  # the structure, not the tensors
        self._open = (call.number, call.output)

    def stream(self, stack: str, depth: int, states: Tensor) -> None: ...

    def projection(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record the first linear map whose input is exactly the attention output: the output projection."""
        if self._open is None or not arguments:
            return
        number, output = self._open
        x = arguments[0]
        if x.numel() == output.numel() and torch.equal(x.reshape(-1), output.reshape(-1)):
            self.projections[number] = module
            self._open = None


def _checked_heads(model: nn.Module, call: AttentionCall, kept: list[Tensor | None]) -> int:
    """Return the number of heads; raise ValueError unless weights times values give the output."""
    sequence = next(iter(sequences(call, kept)))
    value = sequence.values_by_head()
    output = call.output[0] if kept[0] is None else call.output[0][kept[0]]
    output = output.to(value.dtype).transpose(0, 1)
    error, size = torch.zeros(2, dtype=torch.float64)
    for numbers, weights, _ in sequence.row_blocks():
        right = output[:, numbers]
        error += (weights @ value[:, : weights.shape[-1]] - right).double().square().sum().cpu()
        size += right.double().square().sum().cpu()
    if not error <= _TOLERANCE[call.query.dtype.itemsize] ** 2 * size:  # also if the error is NaN
        extra = sorted(name for name in ("s_aux", "position_bias") if call.options.get(name) is not None)
        reason = f", it adds {' and '.join(extra)}" if extra else ""
        raise ValueError(
            f"inspect: the attention of {call.name} in {type(model).__name__} is not what inspection would"
            f" compute{reason}: weights times values differ from its output by"
            f" {float((error / size).sqrt()):.1e} of its size"
        )
    return sequence.heads


def _by_head(module: nn.Module | None, heads: int) -> Tensor | None:
    matrix = None if module is None else matrix_of(module)
    if matrix is None or not matrix.dtype.is_floating_point:
        return None
    return matrix.detach().reshape(heads, -1, matrix.shape[-1])


def _blocks(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return the innermost members of module lists that contain the named attention modules."""
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}
    for name in names:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            inner, outer = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if isinstance(modules[outer], nn.ModuleList):
                blocks[inner] = modules[inner]
                break
    return blocks
