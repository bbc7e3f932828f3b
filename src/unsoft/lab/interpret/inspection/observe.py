"""Observe attention calls without changing anything, and find the attention layers of a model that way.

The model's own attention function runs as usual; the observer gets its arguments and its output. So outputs
are bit-equal with and without observation, for any stock attention and for swapped mechanisms.

Supported are models whose attention goes through transformers' attention interface. Not supported: attention
written out inside a model's own forward, and models inside ``torch.export`` graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.hf.rotary import probing
from unsoft.lab.interpret.inspection.sequence import AttentionCall, sequences, swapped_in
from unsoft.lab.interpret.models import InputBatch, Positions, body_runner, hooked, matrix_of

_TOLERANCE = {4: 1e-3, 8: 1e-3, 2: 5e-2}
"""Allowed error of an output relative to it, both as root mean squares, by bytes of the dtype."""
_CHECKED = 64
"""Tokens on which the weights are verified."""
StreamObserver = Callable[[str, int, Tensor], None]
"""Called with the stack, a depth, and the residual stream (batch, length, width) before the block of that
depth; once more after the last block."""


@contextmanager
def observe(
    model: nn.Module,
    attention: Callable[[AttentionCall], None],
    blocks: Mapping[str, nn.Module] | None = None,
    stream: StreamObserver = lambda stack, depth, states: None,
) -> Iterator[None]:
    """Call ``attention`` with every attention call of ``model`` inside the ``with`` block.

    ``blocks`` are the model's blocks by name (``"layers.3"``). With them, ``stream`` gets the residual
    stream, and calls have ``states`` and ``rotary``.
    """
    from transformers import AttentionInterface

    names = {id(module): name for name, module in model.named_modules()}
    original = AttentionInterface.get_interface
    calls = 0
    states: Any = None
    rotary: Any = None
    depths: Counter[str] = Counter()

    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, implementation, default)

        def observed(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Any = None,
            *more: Any,
            **options: Any,
        ) -> Any:
            nonlocal calls
            mask = options.pop("attention_mask", mask)
            result = function(module, query, key, value, mask, *more, **options)
            name = None if probing(module) else names.get(id(module))
            if name is not None:  # another model may run at the same time
                scale = options.get("scaling")
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                tensors = (query, key, value, mask, scale, options, result[0], states, rotary)
                attention(AttentionCall(calls, name, module, *tensors))
                calls += 1
            return result

        return observed

    def begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal calls, states, rotary
        calls, states, rotary = 0, None, None
        depths.clear()

    def enter(stack: str, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal states, rotary
        states = arguments[0] if arguments else options.get("hidden_states")
        rotary = options.get("position_embeddings")
        if isinstance(states, Tensor):
            stream(stack, depths[stack], states)
            depths[stack] += 1

    def leave(stack: str, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        stream(stack, depths[stack], result if isinstance(result, Tensor) else result[0])

    starts = {model, getattr(model, "base_model", model)}  # a pass may begin at either
    hooks = [start.register_forward_pre_hook(begin) for start in starts]
    stacks = {name: name.rpartition(".")[0] for name in blocks or {}}
    last = {stack: name for name, stack in stacks.items()}
    for name, block in (blocks or {}).items():
        stack = stacks[name]
        hooks.append(block.register_forward_pre_hook(partial(enter, stack), with_kwargs=True))
        if last[stack] == name:
            hooks.append(block.register_forward_hook(partial(leave, stack)))
    # Patch the class, so that models with their own instance of the interface are observed too.
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
    try:
        with hooked(*hooks):
            yield
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention call of a forward pass."""

    number: int
    name: str
    heads: int
    mechanism: str
    """``softmax`` for stock attention."""
    projection: nn.Module | None = None
    """The output projection, None if there is none."""

    @property
    def out_proj(self) -> Tensor | None:
        """Matrix of the output projection by head (heads, head dim, width), None if it has none."""
        matrix = None if self.projection is None else matrix_of(self.projection)
        if matrix is None or not matrix.dtype.is_floating_point:
            return None
        return matrix.detach().reshape(self.heads, -1, matrix.shape[-1])


@dataclass(frozen=True)
class Layout:
    layers: dict[int, AttentionLayer]
    blocks: dict[str, nn.Module]
    """The blocks that contain attention, by name."""
    skipped: list[str]
    """Attention that is not inspected, with the reason."""


def find_layout(model: nn.Module, batch: InputBatch) -> Layout:
    """Find the attention layers by observing one pass over the beginning of the first sequence of ``batch``.

    No architecture is known by name. The pass also verifies the computation: the weights that inspection
    computes, times the values, must give the output of each call. Otherwise ValueError is raised.
    """
    sequence = batch.beginning(_CHECKED)
    layers: dict[int, AttentionLayer] = {}
    skipped: list[str] = []
    pending: tuple[int, Tensor] | None = None  # the call whose output projection has not run yet

    def attention(call: AttentionCall) -> None:
        nonlocal pending
        if not call.self_attention:
            sizes = f"{call.query.shape[-2]} queries look at {call.key.shape[-2]} keys"
            skipped.append(f"{call.name}: {sizes} that are not their own sequence")
            return
        heads = _checked_heads(model, call, sequence.real_positions(call.query.shape[-2])[0])
        swapped = swapped_in(call.module)
        label = "softmax" if swapped is None else swapped.label
        layers[call.number] = AttentionLayer(call.number, call.name, heads, label)
        pending = (call.number, call.output)

    def linear(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record the first linear map whose input is exactly the attention output: the output projection."""
        nonlocal pending
        if pending is None or not arguments:
            return
        number, output = pending
        x = arguments[0]
        if x.numel() == output.numel() and torch.equal(x.reshape(-1), output.reshape(-1)):
            layers[number] = replace(layers[number], projection=module)
            pending = None

    maps = [module for module in model.modules() if matrix_of(module) is not None]
    with hooked(*(module.register_forward_pre_hook(linear) for module in maps)), observe(model, attention):
        body_runner(model)(**sequence.inputs)
    if not layers:
        reasons = f" ({'; '.join(skipped)})" if skipped else ""
        raise ValueError(
            f"inspect: {type(model).__name__} made no call through transformers' attention interface, so"
            f" there is nothing to inspect{reasons}"
        )
    return Layout(layers, _blocks(model, [layer.name for layer in layers.values()]), skipped)


def _checked_heads(model: nn.Module, call: AttentionCall, kept: Positions) -> int:
    """Return the number of heads; raise ValueError unless weights times values give the output."""
    sequence = next(iter(sequences(call, [kept])))
    value = sequence.values_by_head()
    output = call.output[0][kept].to(value.dtype).transpose(0, 1)
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


def _blocks(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return the innermost members of module lists that contain the named attention modules."""
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}
    for name in names:
        inner = name
        while inner and not isinstance(modules[inner.rpartition(".")[0]], nn.ModuleList):
            inner = inner.rpartition(".")[0]
        if inner:
            blocks[inner] = modules[inner]
    return blocks
