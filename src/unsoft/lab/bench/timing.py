"""How long does it take?

Contenders run in turn, so that a change in the machine's speed affects all of them equally.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unsoft.errors import CompilerWarning, one_line
from unsoft.lab.bench import gate
from unsoft.lab.bench.contender import Contender, baseline
from unsoft.lab.bench.workload import Inputs, Workload

_SAMPLE_SECONDS = 0.004  # short calls are repeated until a sample is this long
_MOST_CALLS, _MOST_ROUNDS = 200, 60


@dataclass(frozen=True)
class Timing:
    """The fastest of ``rounds`` samples of one contender, and the ratio to the baseline of the same
    interleaved run.

    A contender whose result is wrong (``error`` above the gate), or that cannot run, has neither.
    """

    workload: Workload
    engine: str
    mechanism: str
    error: float
    rounds: int = 0
    seconds: float | None = None
    ratio: float | None = None
    problem: str = ""
    """What it raised, if it cannot run."""

    def to_dict(self) -> dict[str, Any]:
        own = asdict(self)
        workload: dict[str, Any] = own.pop("workload")
        return workload | own | {"error": self.error if math.isfinite(self.error) else None}


def measure(
    workload: Workload, contenders: Sequence[Contender], *, rounds: int = 5, seconds: float = 0.0
) -> list[Timing]:
    """Times the contenders whose results are right; the first result is the baseline's, with ratio 1."""
    inputs = workload.inputs()
    everyone = [baseline(), *contenders]
    checked = [_checked(contender, workload, inputs) for contender in everyone]
    functions = {
        place: lambda contender=contender: contender.compute(workload, inputs)
        for place, (contender, (error, _)) in enumerate(zip(everyone, checked, strict=True))
        if gate.is_right(error, workload)
    }
    samples = interleaved(functions, rounds=rounds, seconds=seconds, wait=_waiting(workload.device))
    fastest = {place: min(taken) for place, taken in samples.items()}
    timings = []
    for place, (contender, (error, problem)) in enumerate(zip(everyone, checked, strict=True)):
        timing = Timing(workload, contender.engine, contender.mechanism, error, problem=problem)
        if place in fastest:
            ratio = fastest[place] / fastest[0] if 0 in fastest else None
            timing = replace(timing, rounds=len(samples[place]), seconds=fastest[place], ratio=ratio)
        timings.append(timing)
    return timings


def _checked(contender: Contender, workload: Workload, inputs: Inputs) -> tuple[float, str]:
    """The error of a contender's result, and what it raised: the others are measured all the same."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompilerWarning)  # or another engine would run under its name
            return gate.error_of(contender, workload, inputs), ""
    except Exception as error:  # whatever a compiler, a driver or a peer raises
        return math.inf, one_line(error)


def interleaved(
    functions: Mapping[Any, Callable[[], object]],
    *,
    rounds: int = 5,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> dict[Any, list[float]]:
    """Samples of the seconds each function takes: ``rounds`` of them, or more until ``seconds`` have passed.

    ``wait`` returns when what was started has been done; on a GPU calls return before that. In every round
    each function is sampled once. Every other round goes backwards, so that none always runs after the same
    one.
    """

    def sample(function: Callable[[], object], calls: int) -> float:
        wait()
        start = clock()
        for _ in range(calls):
            function()
        wait()
        return (clock() - start) / calls

    calls = {  # these first calls also warm up
        name: max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / max(sample(function, 1), 1e-9))))
        for name, function in functions.items()
    }
    samples: dict[Any, list[float]] = {name: [] for name in functions}
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


def _waiting(device: str) -> Callable[[], object]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that suits ratios.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, values)) / len(values))
