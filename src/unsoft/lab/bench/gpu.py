"""The steps of a benchmark run on a GPU: the Triton engine against SDPA's flash kernel,
FlexAttention, flash-attn and flash-linear-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from unsoft.lab.bench import peers
from unsoft.lab.bench.contender import Contender, engine
from unsoft.lab.bench.plan import Level, Step
from unsoft.lab.bench.timing import measure
from unsoft.lab.bench.workload import MODES, Workload
from unsoft.mechanisms import formulas as catalogue

_LENGTHS = {
    "quick": (1024, 4096),
    "standard": (1024, 4096, 16384),
    "full": (512, 1024, 2048, 4096, 8192, 16384),
}
_HEADS = 16
_LINEAR = ("linear-relu", "cosformer", "linear-exp", "performer")
_MAGNITUDE = "magnitude+cog"
_LONGEST_MAGNITUDE = 4096


def gpu_steps(level: Level, mechanisms: Sequence[str] | None = None, device: str = "cuda") -> list[Step]:
    """All steps of a level: bfloat16, causal or not, forward and training, widths 64 and 128; decoding; and,
    unless mechanisms are named, linear attention and magnitude, causal, forward and training."""
    chosen = list(dict.fromkeys(mechanisms or level.mechanisms or catalogue()))
    own = [engine("triton", name) for name in chosen]
    base = Workload("main", 0, 0, heads=_HEADS, dtype="bfloat16", device=device)
    contests = []
    for length, causal, mode, width in product(_LENGTHS[level.name], (True, False), MODES, (64, 128)):
        group = "main" if width == 64 else "wide"
        work = replace(
            base, group=group, queries=length, keys=length, is_causal=causal, mode=mode, width=width
        )
        contests.append((work, own + _peers(causal)))
    contests += [
        (replace(base, group="decode", queries=1, keys=keys, batch=8), own) for keys in (1024, 8192, 65536)
    ]
    if mechanisms is None:
        contests += _families(replace(base, group="linear", is_causal=True), _LENGTHS[level.name])
    return [
        Step(
            work.group,
            f"{work.group}, {work.mode}, {work.label}",
            partial(measure, work, contenders, rounds=level.rounds, seconds=level.seconds),
        )
        for work, contenders in contests
    ]


def _families(base: Workload, lengths: Sequence[int]) -> list[tuple[Workload, list[Contender]]]:
    """What has kernels of its own."""
    contests = []
    for length, mode in product(lengths, MODES):
        work = replace(base, queries=length, keys=length, mode=mode)
        contests.append((work, [engine("triton", name) for name in _LINEAR]))
        if length <= _LONGEST_MAGNITUDE:
            contests.append((replace(work, group="magnitude"), [engine("triton", _MAGNITUDE)]))
    return contests


def _peers(is_causal: bool) -> list[Contender]:
    found = [peers.flex_attention(), peers.flash_attn(), peers.fla() if is_causal else None]
    return [peer for peer in found if peer is not None]
