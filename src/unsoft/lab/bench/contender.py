"""Who computes it: PyTorch's fused softmax, the engines of unsoft,
and peers that a user might take instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.attention import attention
from unsoft.lab.bench.workload import Inputs, Workload

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v, is_causal -> output


@dataclass(frozen=True)
class Contender:
    """An implementation of attention and the name of the mechanism whose definition it has to meet."""

    engine: str
    mechanism: str
    attention: Attention

    def compute(self, workload: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
        """The output and, for a training workload, the gradients of q, k and v."""
        out = self.attention(*inputs.qkv, workload.is_causal)
        if workload.mode == "forward":
            return (out,)
        return (out, *torch.autograd.grad(out, inputs.qkv, inputs.grad_out))


def baseline() -> Contender:
    """What every ratio is a ratio to: ``torch.nn.functional.scaled_dot_product_attention``."""
    return Contender("sdpa", "softmax", _sdpa)


def engine(name: str, mechanism: str) -> Contender:
    """A mechanism on one of unsoft's engines."""

    def run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return attention(q, k, v, mechanism, engine=name, is_causal=is_causal)

    return Contender(name, mechanism, run)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
