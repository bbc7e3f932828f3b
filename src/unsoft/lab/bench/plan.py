"""Steps of a benchmark run: quick (a first look), standard (every target), full (every case); CPU or GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from unsoft.engines.native import availability
from unsoft.lab.bench import fresh_process, workload
from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.timing import STEPS, Timing, measure, measure_step, step_workload
from unsoft.lab.bench.workload import MODES, Contender, Workload, engine
from unsoft.mechanisms import formulas as catalogue
from unsoft.modules.registry import resolve_formula as resolve

Measured = Timing | Memory | Startup
Contest = tuple[Workload, list[Contender]]
_COMPILE = "compile"
_ALL = (512, 2048, 4096)
_GPU_LENGTHS = {
    "quick": (1024, 4096),
    "standard": (1024, 4096, 16384),
    "full": (512, 1024, 2048, 4096, 8192, 16384),
}
_GPU_HEADS = 16
_LINEAR = ("linear-relu", "cosformer", "linear-exp", "performer")
_MAGNITUDE, _LONGEST_MAGNITUDE = "magnitude+cog", 4096


@dataclass(frozen=True, kw_only=True)
class BenchLevel:
    """Size of a benchmark run; ``mechanisms`` and ``tiled`` are None for every built-in."""

    name: str
    mechanisms: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = _ALL
    tiled: tuple[str, ...] | None = None
    tiled_lengths: tuple[int, ...] = _ALL
    half_lengths: tuple[int, ...] = _ALL
    peer_lengths: tuple[int, ...] = _ALL
    memory_modes: tuple[str, ...] = MODES
    flex: bool = False
    rounds: int = 5
    seconds: float = 0.5
    """Rounds continue until this many seconds have passed."""
    runs: int = 5
    """Fresh processes for each start-up figure."""

    @property
    def repeats(self) -> dict[str, Any]:
        """Rounds and seconds as keywords of what is timed."""
        return {"rounds": self.rounds, "seconds": self.seconds}


QUICK = BenchLevel(
    name="quick",
    mechanisms=("softmax", "cog", "relu2", "softpick"),
    lengths=(512, 2048),
    tiled=("cog",),
    tiled_lengths=(512,),
    half_lengths=(512,),
    peer_lengths=(512,),
    memory_modes=("forward",),
    runs=3,
)
STANDARD = BenchLevel(
    name="standard",
    tiled=("cog", "relu2"),
    tiled_lengths=(512, 2048),
    half_lengths=(512, 2048),
    peer_lengths=(2048,),
)
FULL = BenchLevel(name="full", flex=True, rounds=7, seconds=3.0, runs=9)


@dataclass(frozen=True)
class BenchStep:
    """A piece of work that is done as a whole."""

    group: str
    title: str
    measure: Callable[[], Sequence[Measured]]


def steps(level: BenchLevel, mechanisms: Sequence[str] | None = None) -> list[BenchStep]:
    """Return all steps of a level, for the given mechanisms or for the level's own.

    Where nothing can be compiled, the library warns and the steps that need the native engine are left out.
    """
    chosen = list(dict.fromkeys(mechanisms or level.mechanisms or catalogue()))
    formulas = [resolve(name) for name in chosen]
    native = availability.ready(formulas[0].key, double=False)
    timings = _timed(_contests(level, chosen, native), level)
    imports = BenchStep("startup", "import time", partial(fresh_process.measure_import, level.runs))
    if not native:
        return [*timings, imports]
    decoding = [
        BenchStep(
            "decode",
            f"decode, {name}, {step_workload(position).label}",
            partial(measure_step, name, position, **level.repeats),
        )
        for name, position in STEPS
        if mechanisms is None or name in chosen
    ]
    lone = "cog" if "cog" in chosen else chosen[0]
    memories = [
        BenchStep(
            "memory",
            f"peak memory, {mode}, {length} tokens",
            partial(fresh_process.measure_memory, lone, mode, length),
        )
        for mode, length in product(level.memory_modes, (4096, 16384))
    ]
    return [
        BenchStep(_COMPILE, f"compiling {len(chosen)} formulas", partial(_compile_all, chosen)),
        *timings,
        *decoding,
        *memories,
        imports,
        BenchStep("startup", "compile time", partial(fresh_process.measure_compile, level.runs)),
    ]


def gpu_steps(
    level: BenchLevel, mechanisms: Sequence[str] | None = None, device: str = "cuda"
) -> list[BenchStep]:
    """Return the steps on a GPU in bfloat16: the Triton engine against SDPA, FlexAttention, flash-attn, fla.

    Causal or not, forward and training, widths 64 and 128, and decoding. Unless mechanisms are named, also
    linear attention and magnitude, causal only.
    """
    chosen = list(dict.fromkeys(mechanisms or level.mechanisms or catalogue()))
    own = [engine("triton", name) for name in chosen]
    base = Workload("main", 0, 0, heads=_GPU_HEADS, dtype="bfloat16", device=device)
    lengths = _GPU_LENGTHS[level.name]
    contests: list[Contest] = []
    for length, causal, mode, width in product(lengths, (True, False), MODES, (64, 128)):
        work = replace(base, queries=length, keys=length, is_causal=causal, mode=mode, width=width)
        work = replace(work, group="main" if width == 64 else "wide")
        contests.append((work, own + _gpu_peers(causal)))
    for keys in (1024, 8192, 65536):
        contests.append((replace(base, group="decode", queries=1, keys=keys, batch=8), own))
    for length, mode in product(lengths, MODES) if mechanisms is None else ():
        work = replace(base, group="linear", is_causal=True, queries=length, keys=length, mode=mode)
        contests.append((work, [engine("triton", name) for name in _LINEAR]))
        if length <= _LONGEST_MAGNITUDE:
            contests.append((replace(work, group="magnitude"), [engine("triton", _MAGNITUDE)]))
    return _timed(contests, level)


def choose(todo: Sequence[BenchStep], groups: Sequence[str] | None) -> list[BenchStep]:
    """Return the steps of some groups and the compilation that they need; all steps if no group is given."""
    known = list(dict.fromkeys(step.group for step in todo))
    for group in groups or ():
        if group not in known:
            raise ValueError(f"group: unknown name {group!r} (known: {', '.join(known)})")
    return [step for step in todo if not groups or step.group in (*groups, _COMPILE)]


def _timed(contests: Iterable[Contest], level: BenchLevel) -> list[BenchStep]:
    return [
        BenchStep(work.group, work.title, partial(measure, work, contenders, **level.repeats))
        for work, contenders in contests
        if contenders
    ]


def _contests(level: BenchLevel, mechanisms: list[str], compiled: bool) -> list[Contest]:
    native = [engine("native", name) for name in mechanisms if compiled]
    contests = []
    for length, is_causal, mode in product(level.lengths, (False, True), MODES):
        work = Workload("main", length, length, is_causal=is_causal, mode=mode)
        contests.append((work, native + _tiled(level, mechanisms, work) + _peers(level, work)))
    others = [Workload("short", queries, 4096) for queries in (1, 16, 64)]
    small = Workload("small", 128, 128, batch=16, heads=12)
    others += [replace(small, mode=mode, is_causal=causal) for mode, causal in product(MODES, (False, True))]
    half = Workload("bfloat16", 0, 0, dtype="bfloat16", mode="training")
    for length, causal in product(level.half_lengths, (False, True)):
        others.append(replace(half, queries=length, keys=length, is_causal=causal))
    others += [Workload("decode", 1, keys) for keys in (64, 256, 1024)]
    others.append(Workload("decode", 1, 8192, batch=8))
    return contests + [(work, native) for work in others]


def _tiled(level: BenchLevel, mechanisms: list[str], work: Workload) -> list[Contender]:
    if work.mode != "training" or work.queries not in level.tiled_lengths:
        return []
    return [engine("tiled", name) for name in mechanisms if level.tiled is None or name in level.tiled]


def _peers(level: BenchLevel, work: Workload) -> list[Contender]:
    if work.queries not in level.peer_lengths:
        return []
    flex = workload.flex_attention() if level.flex and work.mode == "forward" else None
    return _present(workload.dense_pytorch(), workload.x_transformers(), flex)


def _gpu_peers(is_causal: bool) -> list[Contender]:
    fla = workload.fla() if is_causal else None
    return _present(workload.flex_attention(), workload.flash_attn(), fla)


def _present(*contenders: Contender | None) -> list[Contender]:
    return [contender for contender in contenders if contender is not None]


def _compile_all(mechanisms: list[str]) -> list[Measured]:
    """Compile the formulas in parallel; RuntimeError if one fails, since another engine would be timed."""

    def compile_one(name: str) -> None:
        if not availability.ready(resolve(name).key, double=False):
            raise RuntimeError(
                f"mechanism {name!r} cannot be compiled here, so its native times would not be its own"
            )

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(compile_one, mechanisms))
    return []
