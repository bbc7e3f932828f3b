"""Measures which tile sizes are fastest on this GPU, for the kernels of one formula; ``unsoft tune``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Upstream
from unsoft.engines.triton import binding
from unsoft.engines.triton.launch import CannotCompileError, Launch, compiled, run, sizes_for, watched
from unsoft.engines.triton.tile_sizes import TileSizes, keep_tuned, tuned_key
from unsoft.formula import Formula

Timer = Callable[[Launch, TileSizes], float | None]
"""Seconds of a launch; None if the GPU has no room for tiles of this size."""
_REPEATS = 20


@dataclass(frozen=True)
class Tuned:
    """What was found for one kernel."""

    kernel: str
    sizes: TileSizes
    seconds: float
    before: TileSizes
    seconds_before: float


def grid_of(kernel: str) -> list[TileSizes]:
    """All tile sizes that are tried.

    >>> len(grid_of("forward"))
    24
    """
    rows, keys = ((64, 128), (32, 64, 128)) if kernel != "key_gradients" else ((32, 64), (32, 64, 128))
    return [TileSizes(*x) for x in product(rows, keys, (4, 8), (2, 3))]


def tune(
    formula: Formula,
    *,
    width: int,
    dtype: torch.dtype,
    length: int,
    device: str = "cuda",
    heads: int = 16,
    timer: Timer | None = None,
) -> Iterator[Tuned]:
    """The fastest sizes of each kernel, measured on a causal call and kept for later ones,
    one after the other."""
    timer = timer or gpu_seconds
    for launch in _launches(formula, width, dtype, length, device, heads):
        before = sizes_for(launch)
        usual = timer(launch, before)
        if usual is None:
            raise CannotCompileError(f"{launch.name} does not run with its usual tile sizes")
        taken = {sizes: timer(launch, sizes) for sizes in grid_of(launch.name)}
        fits = {sizes: seconds for sizes, seconds in taken.items() if seconds is not None} | {before: usual}
        best = min(fits, key=lambda sizes: fits[sizes])
        name = torch.cuda.get_device_name() if device == "cuda" else device
        keep_tuned(tuned_key(launch.name, name, launch.formula, launch.width, str(dtype)), best)
        yield Tuned(launch.name, best, fits[best], before, usual)


def gpu_seconds(launch: Launch, sizes: TileSizes) -> float | None:
    """The median of some runs, by the GPU's own clock."""
    if compiled(launch, sizes) is None:
        return None
    times: list[float] = []
    run(launch, sizes)
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(launch, sizes)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def _launches(
    formula: Formula, width: int, dtype: torch.dtype, length: int, device: str, heads: int
) -> list[Launch]:
    """The kernels of a forward and a backward call, one of each kind."""
    q, k, v = (torch.randn(1, heads, length, width, dtype=dtype, device=device) for _ in range(3))
    call = checked_call(q, k, v, formula, is_causal=True)[0]
    found: list[Launch] = []
    with watched(found.append):
        rows = binding.forward(call)
        binding.backward(call, Upstream(torch.randn_like(q), rows, False, call.params.shape[0] > 0))
    return [launch for launch in found if not launch.only_for_nan]
