"""Looks over a model's shoulder: every attention call of a forward pass is shown to a visitor, and nothing is
changed.

The model's own attention function runs as it would anyway; the visitor gets its arguments and its output. So
outputs are bit-equal with and without observation, on stock attention of any kind and on a swapped mechanism
alike.

Seen are models whose attention goes through transformers' attention interface. Not seen: attention written
out inside a model's own forward, and models inside ``torch.export`` graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Seen:
    """One attention call: (batch, heads, length, dim) of queries, keys and values, as the attention function
    got them."""

    number: int
    """Of the call in its forward pass, from 0: what inspection calls the layer."""
    name: str
    """Of the module in the model."""
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scale: float
    options: dict[str, Any]
    """Further keyword arguments of the call."""
    output: Tensor
    """(batch, length, heads, dim)."""
    states: Tensor | None = None
    """The residual stream (batch, length, width) that entered the block."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of the rotary embedding, if the block was given one."""


class Visitor(Protocol):
    """What is told about a forward pass. Tensors must not be changed."""

    def attention(self, seen: Seen) -> None: ...

    def stream(self, stack: str, depth: int, states: Tensor) -> None:
        """The residual stream (batch, length, width) before block ``depth`` of a stack, and after its
        last."""


@dataclass
class _Current:
    """What is known of the forward pass that is under way."""

    calls: int = 0
    states: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    depth: dict[str, int] = field(default_factory=dict)


@contextmanager
def observe(model: nn.Module, visitor: Visitor, blocks: dict[str, nn.Module] | None = None) -> Iterator[None]:
    """Shows ``visitor`` every attention call of ``model`` inside the ``with`` block.

    ``blocks`` are the model's blocks by name (``"layers.3"``), for those who want to see the residual stream
    too.
    """
    from transformers import AttentionInterface

    names = {id(module): name for name, module in model.named_modules()}
    current = _Current()
    original = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, implementation, default)

        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Any = None,
            *more: Any,
            **options: Any,
        ) -> Any:
            mask = options.pop("attention_mask", mask)
            result = function(module, query, key, value, mask, *more, **options)
            if id(module) in names:  # another model may run at the same time
                scale = options.get("scaling")
                visitor.attention(
                    Seen(
                        current.calls,
                        names[id(module)],
                        module,
                        query,
                        key,
                        value,
                        mask,
                        query.shape[-1] ** -0.5 if scale is None else scale,
                        options,
                        result[0],
                        current.states,
                        current.rotary,
                    )
                )
                current.calls += 1
            return result

        return attention

    def begin(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        current.calls, current.states, current.rotary, current.depth = 0, None, None, {}

    def enter(name: str) -> Callable[..., None]:
        stack = stack_of(name)

        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            current.states = arguments[0] if arguments else options.get("hidden_states")
            current.rotary = options.get("position_embeddings")
            if isinstance(current.states, Tensor):
                visitor.stream(stack, current.depth.setdefault(stack, 0), current.states)
                current.depth[stack] += 1

        return hook

    def leave(name: str) -> Callable[..., None]:
        stack = stack_of(name)

        def hook(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            states = result if isinstance(result, Tensor) else result[0]
            visitor.stream(stack, current.depth[stack], states)

        return hook

    with ExitStack() as undo:
        # All instances, so that models with an interface of their own are seen too.
        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
        undo.callback(setattr, AttentionInterface, "get_interface", original)
        starts = {model, getattr(model, "base_model", model)}  # a pass may begin at either
        hooks = [start.register_forward_pre_hook(begin, with_kwargs=True) for start in starts]
        last = {stack_of(name): name for name in blocks or {}}
        for name, block in (blocks or {}).items():
            hooks.append(block.register_forward_pre_hook(enter(name), with_kwargs=True))
            if last[stack_of(name)] == name:
                hooks.append(block.register_forward_hook(leave(name)))
        for hook in hooks:
            undo.callback(hook.remove)
        yield


def stack_of(name: str) -> str:
    """The list that a block stands in.

    >>> stack_of("model.layers.3")
    'model.layers'
    """
    return name.rpartition(".")[0]
