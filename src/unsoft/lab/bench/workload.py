"""Calls to measure, and who computes them: SDPA, the engines and modules of unsoft, and other packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unsoft.attention import attention
from unsoft.modules.module import Mechanism

Call = Callable[[], Any]
SEED = 20_241_107
_PARTS = (slice(-2), slice(-2, -1), slice(-1, None))
MODES = ("forward", "training")
"""Modes of a call; a decoding step with a cache has the mode "step"."""


class Tensors(NamedTuple):
    """Inputs of a workload, each (batch, heads, length, width)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


@dataclass(frozen=True)
class Workload:
    """One attention problem. ``group`` names the set of measurements it belongs to; "training" is forward +
    backward.

    >>> Workload("main", queries=512, keys=512, is_causal=True).label
    '512 causal'
    >>> Workload("short", queries=16, keys=4096).label
    '16 x 4096'
    """

    group: str
    queries: int
    keys: int
    batch: int = 1
    heads: int = 8
    width: int = 64
    dtype: str = "float32"
    is_causal: bool = False
    mode: str = "forward"
    device: str = "cpu"

    @property
    def label(self) -> str:
        """Short name inside the group."""
        if self.mode == "step":
            return f"step at {self.keys}"
        size = f"{self.queries}" if self.queries == self.keys else f"{self.queries} x {self.keys}"
        return f"{size} causal" if self.is_causal else size

    @property
    def title(self) -> str:
        return f"{self.group}, {self.mode}, {self.label}"

    def inputs(self) -> Tensors:
        """Return normally distributed tensors, equal in every run; logits have about unit size."""
        generator = torch.Generator().manual_seed(SEED)
        lengths = (self.queries, self.keys, self.keys, self.queries)
        shapes = ((self.batch, self.heads, length, self.width) for length in lengths)
        drawn = (torch.randn(shape, generator=generator) for shape in shapes)
        tensors = Tensors(*(x.to(self.device, getattr(torch, self.dtype)) for x in drawn))
        for x in tensors.qkv if self.mode == "training" else ():
            x.requires_grad_()
        return tensors


@dataclass(frozen=True)
class Contender:
    """An implementation of attention and the mechanism whose definition it must meet."""

    engine: str
    mechanism: str
    attention: Callable[..., Tensor]
    """Maps q, k, v and the keyword is_causal to the output."""

    def compute(self, workload: Workload, inputs: Tensors) -> tuple[Tensor, ...]:
        """Return the output and, for training, the gradients of q, k and v."""
        out = self.attention(*inputs.qkv, is_causal=workload.is_causal)
        if workload.mode == "forward":
            return (out,)
        return (out, *torch.autograd.grad(out, inputs.qkv, inputs.grad_out))


def engine(name: str, mechanism: str) -> Contender:
    """Return a mechanism on one of unsoft's engines."""
    run: Any = partial(attention, mechanism=mechanism, engine=name)
    return Contender(name, mechanism, run)


def baseline() -> Contender:
    """Return ``scaled_dot_product_attention`` (SDPA), the denominator of every ratio."""
    return Contender("sdpa", "softmax", scaled_dot_product_attention)


def dense_pytorch() -> Contender:
    """Return textbook softmax attention in PyTorch."""

    def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(hidden, -torch.inf)
        out: Tensor = logits.softmax(-1) @ v
        return out

    return Contender("dense PyTorch", "softmax", dense)


def x_transformers() -> Contender | None:
    """Return the signed (cog) attention of x-transformers, or None if it is not installed."""
    if importlib.util.find_spec("x_transformers") is None:
        return None

    @cache
    def attend(is_causal: bool) -> Any:
        from x_transformers.attend import Attend  # type: ignore[import-untyped,unused-ignore]

        return Attend(causal=is_causal, cog_signed=True)

    return Contender("x-transformers", "cog", lambda q, k, v, is_causal: attend(is_causal)(q, k, v)[0])


def flash_attn() -> Contender | None:
    """Return Dao's FlashAttention-2 (half precision, GPUs), or None if flash-attn is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None

    def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        from flash_attn import flash_attn_func

        return _tokens_first(partial(flash_attn_func, causal=is_causal), q, k, v)

    return Contender("flash-attn", "softmax", flash)


def fla() -> Contender | None:
    """Return the causal softmax kernel of flash-linear-attention (GPUs), or None if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None

    def parallel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        from fla.ops.attn import parallel_attn

        if not is_causal:
            raise ValueError("fla: its softmax attention is causal; measure it with is_causal=True")
        return _tokens_first(parallel_attn, q, k, v)

    return Contender("fla", "softmax", parallel)


def _tokens_first(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call a package whose tensors are (batch, tokens, heads, width)."""
    return function(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)


def flex_attention() -> Contender:
    """Return FlexAttention compiled by inductor, which takes about 20 seconds; no backward on a CPU."""

    def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        blocks = _causal_blocks(q.shape[-2], k.shape[-2], q.device.type) if is_causal else None
        out: Tensor = _compiled_flex()(q, k, v, block_mask=blocks)
        return out

    return Contender("FlexAttention", "softmax", flex)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex)


@cache
def _causal_blocks(queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i, None, None, queries, keys, device=device)


def random_tokens(module: Mechanism | None, length: int, heads: int, width: int = 64) -> list[Tensor]:
    """Return queries, keys and values for a module, or for SDPA with that many heads."""
    keys = heads if module is None else module.layer_spec.heads
    shapes = (heads if module is None else module.query_heads, keys, keys)
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(1, count, length, width, generator=generator) for count in shapes]


def training_call(module: Mechanism | None, length: int, heads: int) -> Call:
    """Return a call of causal forward and backward of a module, or of SDPA."""
    qkv = [x.requires_grad_() for x in random_tokens(module, length, heads)]
    attend: Callable[..., Tensor] = scaled_dot_product_attention if module is None else module

    def call() -> object:
        out = attend(*qkv, is_causal=True)
        return torch.autograd.grad(out.sum(), qkv, allow_unused=True)  # decay looks at no content

    return call


@torch.no_grad()
def step_call(module: Mechanism | None, qkv: Sequence[Tensor]) -> Call:
    """Return a call that decodes the last token with a cache of the others, which is restored afterwards.

    The step of SDPA copies the token into a preallocated cache.
    """
    *before, token = ([x[:, :, part].contiguous() for x in qkv] for part in _PARTS)
    if module is None:
        keys, values = (x.clone() for x in qkv[1:])

        def sdpa_step() -> Tensor:
            with torch.no_grad():
                keys[:, :, -1:], values[:, :, -1:] = token[1:]
                return scaled_dot_product_attention(token[0], keys, values)

        return sdpa_step
    cache = module.new_cache(1)
    for tokens in before:  # the second makes buffers grow now, not while the clock runs
        module(*tokens, cache=cache)
    filled = cache.snapshot()

    def step() -> Any:
        with torch.no_grad():
            result = module(*token, cache=cache)
        cache.restore(filled)  # the next step is at the same length again
        return result

    return step
