"""The calls whose time and memory are compared: a training step and a cached step, ours and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from unsoft.lab.compare.subject import WIDTH, Subject
from unsoft.modules.module import Mechanism

HEADS = 4
Call = Callable[[], object]


def training_step(subject: Subject | None, length: int) -> Call:
    """Causal forward and backward; of PyTorch's softmax without a subject."""
    generator = torch.Generator().manual_seed(0)
    module = None if subject is None else subject.module(length, HEADS)
    queries, heads = (HEADS, HEADS) if module is None else (module.query_heads, module.layer_spec.heads)
    q, k, v = (
        torch.randn(1, h, length, WIDTH, generator=generator).requires_grad_()
        for h in (queries, heads, heads)
    )

    def call() -> object:
        if module is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = module(q, k, v, is_causal=True)
        return torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)  # decay looks at no content

    return call


def sdpa_step(length: int) -> Call:
    """What a cached step costs in PyTorch: the token goes into room that was kept for it, then SDPA."""
    generator = torch.Generator().manual_seed(0)
    room_k, room_v = (torch.randn(1, HEADS, length + 2, WIDTH, generator=generator) for _ in range(2))
    q, k, v = (torch.randn(1, HEADS, 1, WIDTH, generator=generator) for _ in range(3))

    def call() -> object:
        with torch.no_grad():
            room_k[:, :, length + 1 :] = k
            room_v[:, :, length + 1 :] = v
            return scaled_dot_product_attention(q, room_k, room_v)

    return call


def cached_step(subject: Subject, length: int) -> Call:
    """One more token into the mechanism's own cache, which is put back afterwards."""
    generator = torch.Generator().manual_seed(0)
    module = subject.module(length + 2, HEADS)  # a first token and the one that is timed
    cache = module.new_cache(1)
    with torch.no_grad():
        module(*_random(module, length, generator), cache=cache)
        token = _random(module, 1, generator)
        module(*token, cache=cache)  # buffers grow now, not while the clock runs
    before = cache.snapshot()

    def call() -> object:
        with torch.no_grad():
            result = module(*token, cache=cache)
        cache.restore(before)  # the next step is at the same length again
        return result

    return call


def _random(module: Mechanism, length: int, generator: torch.Generator) -> list[torch.Tensor]:
    heads = (module.query_heads, module.layer_spec.heads, module.layer_spec.heads)
    return [torch.randn(1, h, length, WIDTH, generator=generator) for h in heads]
