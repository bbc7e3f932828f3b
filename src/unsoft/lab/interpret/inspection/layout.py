"""Where a model has its attention, found by watching one forward pass; nothing is known by name.

The pass also proves that inspection sees the truth: the weights computed beside each call, times the values,
must give the call's own output. A model for which they do not is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret.inspection.batches import Batch
from unsoft.lab.interpret.inspection.observe import Seen, observe
from unsoft.lab.interpret.inspection.sequence import sequences
from unsoft.lab.interpret.inspection.weights import swapped_in

_WRONG = {
    4: 1e-3,
    8: 1e-3,
    2: 5e-2,
}  # RMS of the error of an output, of the RMS of the output, by bytes of the dtype


@dataclass(frozen=True)
class Layer:
    """One attention call of a forward pass."""

    number: int
    name: str
    heads: int
    mechanism: str
    """``softmax`` for stock attention."""
    out_proj: Tensor | None
    """(heads, head dim, width): what each head's output is multiplied with, None if no such projection was
    found."""
    projection: nn.Module | None = None
    """The module that does so."""


@dataclass(frozen=True)
class Layout:
    layers: dict[int, Layer]
    blocks: dict[str, nn.Module]
    """The blocks that hold attention, by name."""
    skipped: list[str]
    """Attention that is not looked at, with the reason."""


def find_layout(model: nn.Module, run: Any, batch: Batch) -> Layout:
    """``run`` calls the model with keyword arguments; the first sequence of ``batch`` is what it is given."""
    first = {
        name: x[:1] if isinstance(x, Tensor) else x for name, x in batch.inputs.items()
    }  # one sequence is enough to see the structure
    finder = _Finder(model, Batch(first, batch.labels[:1]))
    hooks = [
        module.register_forward_pre_hook(finder.projection)
        for module in model.modules()
        if matrix_of(module) is not None
    ]
    try:
        with observe(model, finder):
            run(**first)
    finally:
        for hook in hooks:
            hook.remove()
    if not finder.calls:
        raise ValueError(
            f"inspect: {type(model).__name__} made no call through transformers' attention interface, so"
            " there is nothing to"
            " look at" + (f" ({'; '.join(finder.skipped)})" if finder.skipped else "")
        )
    layers = {
        number: Layer(
            number,
            seen.name,
            heads,
            _label(seen.module),
            _by_head(finder.projections.get(number), heads),
            finder.projections.get(number),
        )
        for number, (seen, heads) in finder.calls.items()
    }
    return Layout(layers, _blocks(model, [seen.name for seen, _ in finder.calls.values()]), finder.skipped)


class _Finder:
    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.calls: dict[int, tuple[Seen, int]] = {}
        self.projections: dict[int, nn.Module] = {}
        self.skipped: list[str] = []
        self._open: tuple[int, Tensor] | None = None

    def attention(self, seen: Seen) -> None:
        if seen.query.shape[-2] != seen.key.shape[-2]:
            self.skipped.append(
                f"{seen.name}: {seen.query.shape[-2]} queries look at {seen.key.shape[-2]} keys that are not"
                " their own sequence"
            )
            return
        heads = _checked(self.model, seen, self.batch.kept(seen.query.shape[-2])[:1])
        # Only the structure is kept, not the tensors of the call.
        empty = seen.query.new_empty(0)
        self.calls[seen.number] = (
            Seen(seen.number, seen.name, seen.module, empty, empty, empty, None, seen.scale, {}, empty),
            heads,
        )
        self._open = (seen.number, seen.output)

    def stream(self, stack: str, depth: int, states: Tensor) -> None: ...

    def projection(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """The first linear map that is given exactly what attention returned is the output projection."""
        if self._open is None or not arguments:
            return
        number, output = self._open
        given = arguments[0]
        if given.numel() == output.numel() and torch.equal(given.reshape(-1), output.reshape(-1)):
            self.projections[number] = module
            self._open = None


def _checked(model: nn.Module, seen: Seen, kept: list[Tensor | None]) -> int:
    """The number of heads, if weights times values are the output of the call."""
    sequence = next(iter(sequences(seen, kept)))
    value = sequence.value.repeat_interleave(sequence.heads // len(sequence.value), 0)
    output = seen.output[0] if kept[0] is None else seen.output[0][kept[0]]
    output = output.to(value.dtype).transpose(0, 1)
    error, size = torch.zeros(2, dtype=torch.float64)
    for numbers, weights, _ in sequence.row_blocks():
        right = output[:, numbers]
        error += (weights @ value[:, : weights.shape[-1]] - right).double().square().sum().cpu()
        size += right.double().square().sum().cpu()
    if not error <= _WRONG[seen.query.dtype.itemsize] ** 2 * size:
        extra = sorted(name for name in ("s_aux", "position_bias") if seen.options.get(name) is not None)
        reason = f", it adds {' and '.join(extra)}" if extra else ""
        raise ValueError(
            f"inspect: the attention of {seen.name} in {type(model).__name__} is not what inspection would"
            f" compute{reason}: weights times values differ from its output by"
            f" {float((error / size).sqrt()):.1e} of its size"
        )
    return sequence.heads


def _label(module: nn.Module) -> str:
    swapped = swapped_in(module)
    return "softmax" if swapped is None else swapped.label


def matrix_of(module: nn.Module) -> Tensor | None:
    """The (inputs, outputs) matrix of a linear map, None for other modules."""
    if isinstance(module, nn.Linear):
        return module.weight.mT
    weight = getattr(module, "weight", None)
    return weight if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else None  # of GPT-2


def _by_head(module: nn.Module | None, heads: int) -> Tensor | None:
    matrix = None if module is None else matrix_of(module)
    if matrix is None or not matrix.dtype.is_floating_point:
        return None
    matrix = matrix.detach()
    return matrix.reshape(heads, -1, matrix.shape[-1])


def _blocks(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """The nearest members of module lists that hold the attention modules."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for name in names:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            inner, outer = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if isinstance(modules[outer], nn.ModuleList):
                found[inner] = modules[inner]
                break
    return found
