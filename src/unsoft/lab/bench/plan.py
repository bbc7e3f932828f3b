"""The list of all steps of a benchmark run: quick (a look), standard (every bar) and full (every case)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from unsoft.engines.native import availability
from unsoft.lab.bench import memory, peers, startup
from unsoft.lab.bench import steps as decoding
from unsoft.lab.bench.contender import Contender, engine
from unsoft.lab.bench.memory import Memory
from unsoft.lab.bench.startup import Startup
from unsoft.lab.bench.timing import Timing, measure
from unsoft.lab.bench.workload import MODES, Workload
from unsoft.mechanisms import formulas as catalogue
from unsoft.modules.registry import resolve_formula as resolve

Result = Timing | Memory | Startup
_COMPILE = "compile"


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much of everything; ``mechanisms`` and ``tiled`` None = every built-in."""

    name: str
    mechanisms: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = (512, 2048, 4096)
    tiled: tuple[str, ...] | None = None
    tiled_lengths: tuple[int, ...] = (512, 2048, 4096)
    half_lengths: tuple[int, ...] = (512, 2048, 4096)
    peer_lengths: tuple[int, ...] = (512, 2048, 4096)
    memory_modes: tuple[str, ...] = MODES
    flex: bool = False
    rounds: int = 5
    seconds: float = 0.5
    """Rounds go on until this many seconds have passed."""
    runs: int = 5
    """Fresh processes for each start-up figure."""


QUICK = Level(
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
STANDARD = Level(
    name="standard",
    tiled=("cog", "relu2"),
    tiled_lengths=(512, 2048),
    half_lengths=(512, 2048),
    peer_lengths=(2048,),
)
FULL = Level(name="full", flex=True, rounds=7, seconds=3.0, runs=9)


@dataclass(frozen=True)
class Step:
    """One piece of work that is done as a whole."""

    group: str
    title: str
    measure: Callable[[], Sequence[Result]]


def steps(level: Level, mechanisms: Sequence[str] | None = None) -> list[Step]:
    """All steps of a level, for the given mechanisms or for the level's own.

    Where nothing can be compiled, the library warns and the steps that need the native engine are left out.
    """
    chosen = list(dict.fromkeys(mechanisms or level.mechanisms or catalogue()))
    formulas = [resolve(name) for name in chosen]
    native = availability.ready(formulas[0].key, double=False)
    timings = [
        Step(
            workload.group,
            _title(workload),
            partial(measure, workload, contenders, rounds=level.rounds, seconds=level.seconds),
        )
        for workload, contenders in _contests(level, chosen, native)
        if contenders
    ]
    timings += [
        Step(
            "decode",
            f"decode, {name}, {decoding.workload(position).label}",
            partial(decoding.measure_step, name, position, rounds=level.rounds, seconds=level.seconds),
        )
        for name, position in decoding.STEPS
        if native and (mechanisms is None or name in chosen)
    ]
    imports = Step("startup", "import time", partial(startup.measure_import, level.runs))
    if not native:
        return [*timings, imports]
    lone = "cog" if "cog" in chosen else chosen[0]
    memories = [
        Step(
            "memory",
            f"peak memory, {mode}, {length} tokens",
            partial(memory.measure_memory, lone, mode, length),
        )
        for mode, length in product(level.memory_modes, (4096, 16384))
    ]
    return [
        Step(_COMPILE, f"compiling {len(chosen)} formulas", partial(_compile_all, chosen)),
        *timings,
        *memories,
        imports,
        Step("startup", "compile time", partial(startup.measure_compile, level.runs)),
    ]


def choose(todo: Sequence[Step], groups: Sequence[str] | None) -> list[Step]:
    """The steps of some groups, and the compilation that all of them need; all steps if no group is given."""
    known = list(dict.fromkeys(step.group for step in todo))
    for group in groups or ():
        if group not in known:
            raise ValueError(f"group: unknown name {group!r} (known: {', '.join(known)})")
    return [step for step in todo if not groups or step.group in (*groups, _COMPILE)]


def _contests(level: Level, mechanisms: list[str], compiled: bool) -> list[tuple[Workload, list[Contender]]]:
    native = [engine("native", name) for name in mechanisms if compiled]
    contests = []
    for length, is_causal, mode in product(level.lengths, (False, True), MODES):
        workload = Workload("main", length, length, is_causal=is_causal, mode=mode)
        contests.append((workload, native + _tiled(level, mechanisms, workload) + _peers(level, workload)))
    contests += [(Workload("short", queries, 4096), native) for queries in (1, 16, 64)]
    small = Workload("small", 128, 128, batch=16, heads=12)
    contests += [
        (replace(small, mode=mode, is_causal=c), native) for mode, c in product(MODES, (False, True))
    ]
    half = Workload("bfloat16", 0, 0, dtype="bfloat16", mode="training")
    for length, is_causal in product(level.half_lengths, (False, True)):
        contests.append((replace(half, queries=length, keys=length, is_causal=is_causal), native))
    contests += [(Workload("decode", 1, keys), native) for keys in (64, 256, 1024)]
    contests.append((Workload("decode", 1, 8192, batch=8), native))
    return contests


def _tiled(level: Level, mechanisms: list[str], workload: Workload) -> list[Contender]:
    if workload.mode != "training" or workload.queries not in level.tiled_lengths:
        return []
    return [engine("tiled", name) for name in mechanisms if level.tiled is None or name in level.tiled]


def _peers(level: Level, workload: Workload) -> list[Contender]:
    if workload.queries not in level.peer_lengths:
        return []
    found = [peers.dense_pytorch(), peers.x_transformers()]
    if level.flex and workload.mode == "forward":
        found.append(peers.flex_attention())
    return [peer for peer in found if peer is not None]


def _title(workload: Workload) -> str:
    return f"{workload.group}, {workload.mode}, {workload.label}"


def _compile_all(mechanisms: list[str]) -> list[Result]:
    """Compiles the formulas side by side, and makes sure that nothing else will run under the name of
    native."""

    def compile_one(name: str) -> None:
        if not availability.ready(resolve(name).key, double=False):
            raise RuntimeError(
                f"mechanism {name!r} cannot be compiled here, so its native times would not be its own"
            )

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(compile_one, mechanisms))
    return []
