"""Show every attention call of a forward pass to a visitor, without changing anything.

The model's own attention function runs as usual; the visitor gets its arguments and its output. So outputs
are bit-equal with and without observation, for any stock attention and for swapped mechanisms.

Supported are models whose attention goes through transformers' attention interface. Not supported: attention
written out inside a model's own forward, and models inside ``torch.export`` graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: queries, keys and values (batch, heads, length, dim) as the function got them."""

    number: int
    """Index of the call in its forward pass, which inspection uses as the layer number."""
    name: str
    """Name of the module in the model."""
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
    """cos and sin of the rotary embedding, if the block got one."""

    @property
    def self_attention(self) -> bool:
        """True if the keys are those of the queries' own sequence."""
        return self.query.shape[-2] == self.key.shape[-2]


class Visitor(Protocol):
    """Observer of a forward pass. It must not change tensors."""

    def attention(self, call: AttentionCall) -> None: ...

    def stream(self, stack: str, depth: int, states: Tensor) -> None:
        """Get the residual stream (batch, length, width) before block ``depth``, and after the last block."""


@dataclass
class _ForwardPass:
    """State of the current forward pass."""

    calls: int = 0
    states: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    depth: dict[str, int] = field(default_factory=dict)


@contextmanager
def observe(model: nn.Module, visitor: Visitor, blocks: dict[str, nn.Module] | None = None) -> Iterator[None]:
    """Show every attention call of ``model`` to ``visitor`` inside the ``with`` block.

    ``blocks`` are the model's blocks by name (``"layers.3"``), for visitors that need the residual stream.
    """
    from transformers import AttentionInterface

    names = {id(module): name for name, module in model.named_modules()}
    current = _ForwardPass()
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
            if (name := names.get(id(module))) is not None:  # another model may run at the same time
                scale = options.get("scaling")
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                tensors = (query, key, value, mask, scale, options, result[0], current.states, current.rotary)
                visitor.attention(AttentionCall(current.calls, name, module, *tensors))
                current.calls += 1
            return result

        return attention

    def begin(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        current.calls, current.states, current.rotary, current.depth = 0, None, None, {}

    def enter(stack: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            current.states = arguments[0] if arguments else options.get("hidden_states")
            current.rotary = options.get("position_embeddings")
            if isinstance(current.states, Tensor):
                visitor.stream(stack, current.depth.setdefault(stack, 0), current.states)
                current.depth[stack] += 1

        return hook

    def leave(stack: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            states = result if isinstance(result, Tensor) else result[0]
            visitor.stream(stack, current.depth[stack], states)

        return hook

    with ExitStack() as undo:
        # Patch the class, so that models with their own instance of the interface are observed too.
        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
        undo.callback(setattr, AttentionInterface, "get_interface", original)
        starts = {model, getattr(model, "base_model", model)}  # a pass may begin at either
        hooks = [start.register_forward_pre_hook(begin, with_kwargs=True) for start in starts]
        last = {stack_of(name): name for name in blocks or {}}
        for name, block in (blocks or {}).items():
            stack = stack_of(name)
            hooks.append(block.register_forward_pre_hook(enter(stack), with_kwargs=True))
            if last[stack] == name:
                hooks.append(block.register_forward_hook(leave(stack)))
        for hook in hooks:
            undo.callback(hook.remove)
        yield


def stack_of(name: str) -> str:
    """Return the name of the list that holds a block.

    >>> stack_of("model.layers.3")
    'model.layers'
    """
    return name.rpartition(".")[0]
