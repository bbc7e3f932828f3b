"""Time of attention calls and of decoding steps, relative to SDPA in the same run.

Contenders run in turn, so that a change in the machine's speed affects all of them equally. A contender whose
result differs from the dense engine in float64 gets no time.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from unsoft.errors import CompilerWarning, one_line
from unsoft.lab.bench.workload import Contender, Tensors, Workload, baseline, engine, random_tokens, step_call
from unsoft.modules.build import mechanism

Name = TypeVar("Name")

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest relative RMS error: far above rounding (float32 1e-6, bfloat16 4e-3), far below any real defect."""
STEPS = (
    *((name, 256) for name in ("cog", "gpam", "linear-relu", "cosformer", "retention", "magnitude")),
    *(("magnitude", length) for length in (1024, 4096)),
)
"""Decoding steps to measure: mechanism and number of earlier tokens."""
_SAMPLE_SECONDS = 0.004  # short calls are repeated until a sample is this long
_MOST_CALLS, _MOST_ROUNDS = 200, 60


@dataclass(frozen=True)
class Timing:
    """Fastest of ``rounds`` samples of one contender, and its ratio to the baseline of the same run.

    Both are None for a contender that cannot run or whose ``error`` exceeds the limit.
    """

    workload: Workload
    engine: str
    mechanism: str
    error: float
    rounds: int = 0
    seconds: float | None = None
    ratio: float | None = None
    problem: str = ""
    """The error message of a contender that cannot run."""

    def to_dict(self) -> dict[str, Any]:
        own = asdict(self)
        workload: dict[str, Any] = own.pop("workload")
        return workload | own | {"error": self.error if math.isfinite(self.error) else None}


def measure(
    workload: Workload, contenders: Sequence[Contender], *, rounds: int = 5, seconds: float = 0.0
) -> list[Timing]:
    """Return one timing for SDPA (ratio 1) and one for each contender."""
    inputs = workload.inputs()
    everyone = [baseline(), *contenders]
    checked = [_checked(contender, workload, inputs) for contender in everyone]
    functions = {
        index: lambda contender=contender: contender.compute(workload, inputs)
        for index, contender in enumerate(everyone)
        if is_right(checked[index][0], workload)
    }
    wait = (lambda: None) if workload.device == "cpu" else torch.cuda.synchronize
    samples = interleaved(functions, rounds=rounds, seconds=seconds, wait=wait)
    timings = []
    for index, (contender, (error, problem)) in enumerate(zip(everyone, checked, strict=True)):
        timing = Timing(workload, contender.engine, contender.mechanism, error, problem=problem)
        if index in samples:
            fastest = min(samples[index])
            ratio = fastest / min(samples[0]) if 0 in samples else None
            timing = replace(timing, rounds=len(samples[index]), seconds=fastest, ratio=ratio)
        timings.append(timing)
    return timings


def _checked(contender: Contender, workload: Workload, inputs: Tensors) -> tuple[float, str]:
    """Return the error of a contender's result and the message of what it raised, if it raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompilerWarning)  # or another engine would run under its name
            return error_of(contender, workload, inputs), ""
    except Exception as error:  # of a compiler, a driver or another package: the others are still measured
        return math.inf, one_line(error)


def interleaved(
    functions: Mapping[Name, Callable[[], object]],
    *,
    rounds: int = 5,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Return samples of the seconds each function takes: ``rounds`` of them, or more until ``seconds`` have
    passed.

    ``wait`` returns when all work is done; GPU calls return earlier. In every round each function is sampled
    once, and every other round runs backwards, so that no function always runs after the same one.
    """

    def sample(function: Callable[[], object], calls: int) -> float:
        return seconds_per_call(function, calls, clock=clock, wait=wait)

    calls = {  # these first calls also warm up
        name: max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / max(sample(function, 1), 1e-9))))
        for name, function in functions.items()
    }
    samples: dict[Name, list[float]] = {name: [] for name in functions}
    order, start, done = list(functions), clock(), 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while done < rounds or (clock() - start < seconds and done < _MOST_ROUNDS):
            for name in order:
                samples[name].append(sample(functions[name], calls[name]))
            order.reverse()
            done += 1
    finally:
        if collecting:
            gc.enable()
    return samples


def fastest(functions: Mapping[Name, Callable[[], object]], **options: Any) -> dict[Name, float]:
    """Return the smallest sample of each function; ``options`` are those of :func:`interleaved`."""
    return {name: min(samples) for name, samples in interleaved(functions, **options).items()}


def seconds_per_call(
    function: Callable[[], object],
    calls: int = 1,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> float:
    """Return the mean time of ``calls`` calls in a row."""
    wait()
    start = clock()
    for _ in range(calls):
        function()
    wait()
    return (clock() - start) / calls


def error_of(contender: Contender, workload: Workload, inputs: Tensors) -> float:
    """Return the largest relative RMS error of output and gradients, for the first head of the first batch
    entry.

    Heads never mix, so one head suffices, and it keeps the float64 reference affordable at any length.
    """
    results = contender.compute(workload, inputs)
    references = _reference(contender.mechanism, replace(workload, group="", mode="training"))
    # A forward workload has one result; its reference is the first of those for training.
    return max(relative_error(x[:1, :1].detach(), r) for x, r in zip(results, references, strict=False))


@lru_cache(maxsize=64)
def _reference(mechanism: str, workload: Workload) -> tuple[Tensor, ...]:
    """Return output and gradients of q, k and v by the dense engine in float64."""
    first = Tensors(*(x[:1, :1].detach().double() for x in workload.inputs()))
    for x in first.qkv:
        x.requires_grad_()
    return tuple(x.detach() for x in engine("dense", mechanism).compute(workload, first))


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return RMS(result - reference) / RMS(reference); infinite if the result is not finite.

    >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    >>> relative_error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))
    inf
    """
    if not bool(result.isfinite().all()):
        return float("inf")
    difference = (result.double() - reference).square().mean().sqrt()
    return float(difference / reference.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny))


def is_right(error: float, workload: Workload) -> bool:
    """Return True if the error is within the limit of the workload's dtype."""
    return error <= LIMITS[workload.dtype]


def step_workload(position: int) -> Workload:
    """Return the workload of one new token after ``position`` others."""
    return Workload("decode", 1, position, mode="step")


def measure_step(name: str, position: int, *, rounds: int = 5, seconds: float = 0.0) -> list[Timing]:
    """Return the timings of a decoding step: SDPA and the mechanism, each with its cache."""
    work = step_workload(position)
    module = mechanism(name, heads=work.heads, head_dim=work.width)
    qkv = random_tokens(module, position + 1, work.heads, work.width)
    step = step_call(module, qkv)
    error = relative_error(step(), _all_at_once(name, qkv)[:, :, -1:])
    peer = step_call(None, random_tokens(None, position + 1, work.heads, work.width))
    samples = interleaved({"sdpa": peer, "module": step}, rounds=rounds, seconds=seconds)
    reference, taken = min(samples["sdpa"]), min(samples["module"])
    count = len(samples["sdpa"])
    figures = (count, taken, taken / reference) if is_right(error, work) else ()
    return [
        Timing(work, "sdpa", "softmax", 0.0, count, reference, 1.0),
        Timing(work, "module", name, error, *figures),
    ]


@torch.no_grad()
def _all_at_once(name: str, qkv: Sequence[Tensor]) -> Tensor:
    """Return the output for all tokens by the same mechanism in float64, without a cache."""
    _, heads, _, width = qkv[1].shape
    module = mechanism(name, heads=heads, head_dim=width).double()
    out: Tensor = module(*(x.double() for x in qkv), is_causal=True)
    return out
