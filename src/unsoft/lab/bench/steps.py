"""How long does one step of decoding take? A module with its cache against SDPA with as many keys."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unsoft.lab.bench import gate
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import Workload
from unsoft.modules.build import mechanism

STEPS: dict[tuple[str, int], float] = {
    ("cog", 256): 1.6,
    ("gpam", 256): 3.0,
    ("linear-relu", 256): 2.5,
    ("cosformer", 256): 3.0,
    ("retention", 256): 2.5,
    ("magnitude", 256): 4.0,
    ("magnitude", 1024): 3.0,
    ("magnitude", 4096): 2.0,
}
"""Mechanism and number of tokens before the step -> the ratio to reach."""
_CALLS = 8


def workload(position: int) -> Workload:
    """One new token after ``position`` others."""
    return Workload("decode", 1, position, mode="step")


@torch.no_grad()
def measure_step(name: str, position: int, *, rounds: int = 5, seconds: float = 0.0) -> list[Timing]:
    """The baseline's timing and the mechanism's.

    Every sample starts from the same cache, which grows by a few tokens only.
    """
    work = workload(position)
    module = mechanism(name, heads=work.heads, head_dim=work.width)
    tokens = position + 1 + _CALLS
    generator = torch.Generator().manual_seed(position)
    q, k, v = (
        torch.randn(1, heads, tokens, work.width, generator=generator)
        for heads in (module.query_heads, work.heads, work.heads)
    )
    filled = module.new_cache(1)
    module(*(x[:, :, :position] for x in (q, k, v)), cache=filled)
    error = gate.relative_error(
        _steps(module, q, k, v, position, tokens, filled), _whole(name, q, k, v, position)
    )

    def own() -> Callable[[], object]:
        cache = copy.deepcopy(filled)
        module(*_token(position, q, k, v), cache=cache)  # brings the copied memory close to the processor
        new = [_token(position + 1 + t, q, k, v) for t in range(_CALLS)]
        return lambda: [module(*x, cache=cache) for x in new]

    def baseline() -> Callable[[], object]:
        query = torch.randn(1, work.heads, 1, work.width, generator=generator)
        keys, values = (x[:, :, : position + 1].contiguous() for x in (k, v))
        scaled_dot_product_attention(query, keys, values)
        return lambda: [scaled_dot_product_attention(query, keys, values) for _ in range(_CALLS)]

    samples: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(samples) < rounds or time.perf_counter() - start < seconds:
        samples.append((_seconds(baseline()), _seconds(own())))
    reference, taken = (min(column) for column in zip(*samples, strict=True))
    right = gate.is_right(error, work)
    figures = (len(samples), taken, taken / reference) if right else ()
    return [
        Timing(work, "sdpa", "softmax", 0.0, len(samples), reference, 1.0),
        Timing(work, "module", name, error, *figures),
    ]


def _token(place: int, *tensors: Tensor) -> list[Tensor]:
    return [x[:, :, place : place + 1].contiguous() for x in tensors]


def _steps(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, position: int, tokens: int, filled: object
) -> Tensor:
    cache = copy.deepcopy(filled)
    return torch.cat([module(*_token(t, q, k, v), cache=cache) for t in range(position, tokens)], dim=2)


def _whole(name: str, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """The same rows by the same mechanism in float64, all tokens at once."""
    module = mechanism(name, heads=k.shape[1], head_dim=k.shape[3]).double()
    whole: Tensor = module(*(x.double() for x in (q, k, v)), is_causal=True)
    return whole[:, :, position:]


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) / _CALLS
