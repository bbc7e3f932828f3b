"""What one would use without unsoft: dense PyTorch, x-transformers' signed attention, compiled FlexAttention,
and on GPUs flash-attn and flash-linear-attention."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.bench.contender import Contender


def dense_pytorch() -> Contender:
    """Softmax attention as textbooks write it."""
    return Contender("dense PyTorch", "softmax", _dense)


def x_transformers() -> Contender | None:
    """The signed (cog) attention of x-transformers, or None where that package is not installed."""
    if importlib.util.find_spec("x_transformers") is None:
        return None
    return Contender("x-transformers", "cog", _signed)


def flex_attention() -> Contender:
    """FlexAttention compiled by inductor, which takes some 20 seconds; on a CPU it has no backward."""
    return Contender("FlexAttention", "softmax", _flex)


def flash_attn() -> Contender | None:
    """Dao's FlashAttention-2 (half precision, GPUs), or None where the package flash-attn is not
    installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return Contender("flash-attn", "softmax", _flash)


def fla() -> Contender | None:
    """The softmax kernel of flash-linear-attention (GPUs, causal only), or None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    return Contender("fla", "softmax", _fla)


def _fla(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    from fla.ops.attn import parallel_attn

    if not is_causal:
        raise ValueError("fla: its softmax attention is causal; measure it with is_causal=True")
    out: Tensor = parallel_attn(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    from flash_attn import flash_attn_func

    out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=is_causal)
    return out.transpose(1, 2)


def _dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    out: Tensor = logits.softmax(-1) @ v
    return out


def _signed(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    out: Tensor = _attend(is_causal)(q, k, v)[0]
    return out


@cache
def _attend(is_causal: bool) -> Any:
    from x_transformers.attend import Attend  # type: ignore[import-untyped,unused-ignore]

    return Attend(causal=is_causal, cog_signed=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    block_mask = _causal_blocks(q.shape[-2], k.shape[-2], q.device.type) if is_causal else None
    out: Tensor = _compiled_flex()(q, k, v, block_mask=block_mask)
    return out


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex)


@cache
def _causal_blocks(queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i, None, None, queries, keys, device=device)
