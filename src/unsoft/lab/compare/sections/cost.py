"""Cost of training and decoding next to PyTorch's fused softmax, interleaved, and memory."""

from __future__ import annotations

import json
import math
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from unsoft.formula import Formula
from unsoft.lab.bench.fresh_process import extra_bytes, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest, interleaved
from unsoft.lab.bench.workload import Call, random_tokens, step_call, training_call
from unsoft.lab.compare.candidate import WIDTH, Candidate
from unsoft.lab.compare.jobs import Job, Results, Rows, matching
from unsoft.lab.compare.section import COST, PRICE, ROSIC, ComparisonLevel, Finding, Request, Section
from unsoft.lab.compare.store import outside_file
from unsoft.lab.evidence import UNDECIDED, Estimate, grade
from unsoft.lab.report.figure import Figure, bars, by_mechanism
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.iterative import truncated
from unsoft.magnitude.solver import Options

PEER = "softmax of PyTorch (SDPA)"
HEADS = 4
GATED = "magnitude"
"""The mechanism whose price a claim is about: it is measured whatever else is compared."""
WARM_UP = 127
"""Tokens of a first call that loads libraries and starts threads."""
LONGEST = 4096
"""Keys at which the growth of the solver is fitted: below 1024 overhead dominates."""
SECTION = Section(order=60, group=PRICE, question="What does it cost?")


@SECTION.jobs
def jobs(request: Request) -> list[Job]:
    """Return jobs about all candidates at once: times depend on the machine and on what else is timed."""
    candidates, level = request.with_references("softmax", GATED), request.level
    asked = {"mechanisms": [c.identity for c in candidates], "labels": [c.label for c in candidates]}
    jobs = []
    for n in level.lengths:
        expected = {training: len(candidates) * level.rounds * 0.01 * (n / 512) ** 2 + 2, decoding: 2.0}
        for measure, seconds in expected.items():
            name, call = f"{measure.__name__} at {n}", partial(measure, candidates, n, level)
            jobs.append(_timed(name, call, seconds, level, asked | {"length": n}))
    call = partial(memory, candidates, level.lengths)
    return [*jobs, _timed("memory", call, 8.0, level, asked | {"lengths": level.lengths}, timed=False)]


@SECTION.facts
def facts(request: Request) -> list[Job]:
    level = request.level
    longest = min(4 * max(level.lengths), LONGEST)
    lengths = (longest // 4, longest // 2, longest)
    return [_timed("price of the solver", partial(price, lengths), 3.0, level, {"lengths": lengths})]


def _timed(
    name: str,
    compute: Callable[[], Rows],
    expected: float,
    level: ComparisonLevel,
    sizes: dict[str, Any],
    timed: bool = True,
) -> Job:
    """Return a job whose question includes what times depend on besides the code."""
    where = {"machine": machine(), "threads": torch.get_num_threads()}
    question = {"name": name, **sizes, **where, "rounds": level.rounds, "seconds": level.seconds}
    return Job(name, "", question, compute, expected, timed)


def training(candidates: Sequence[Candidate], length: int, level: ComparisonLevel) -> Rows:
    """Time causal forward and backward, B=1 H=4 D=64 float32, and the ratio to SDPA."""
    modules = {PEER: None} | {one.label: one.module(length, HEADS) for one in candidates}
    calls = {label: training_call(module, length, HEADS) for label, module in modules.items()}
    return _ratios(calls, level, {"what": "training", "length": length})


def decoding(candidates: Sequence[Candidate], length: int, level: ComparisonLevel) -> Rows:
    """Time one more token after ``length`` tokens, and the ratio to SDPA with a key-value cache."""
    calls = {PEER: step_call(None, random_tokens(None, length + 1, HEADS))}
    calls |= {one.label: cached_step(one, length) for one in candidates}
    return _ratios(calls, level, {"what": "decoding", "length": length})


def cached_step(candidate: Candidate, length: int) -> Call:
    """Return a step with the mechanism's own cache after ``length`` tokens."""
    module = candidate.module(length + 1, HEADS)
    return step_call(module, random_tokens(module, length + 1, HEADS))


def memory(candidates: Sequence[Candidate], lengths: Sequence[int]) -> Rows:
    """Measure peak bytes of training on top of the inputs, all in one separate process."""
    families = [s.family for s in candidates if s.family is not None]
    files = {str(file) for family in families if (file := outside_file(family.build)) is not None}
    task: dict[str, Any] = {"lengths": list(lengths), "files": sorted(files)}
    task["subjects"] = [
        [s.label, s.mechanism if isinstance(s.mechanism, str) else s.mechanism.to_dict()] for s in candidates
    ]
    rows = run_probe("-m", __name__, json.dumps(task), MALLOC_MMAP_THRESHOLD_="65536")["rows"]
    base = {row["length"]: max(row["bytes"], 1) for row in rows if row["mechanism"] == PEER}
    return [row | {"ratio": row["bytes"] / base[row["length"]], "low": None, "high": None} for row in rows]


def _ratios(calls: dict[str, Call], level: ComparisonLevel, about: dict[str, Any]) -> Rows:
    """Return ratios of the fastest samples; ``low`` and ``high`` are the range of ratios within a round."""
    taken = interleaved(calls, rounds=level.rounds, seconds=level.seconds)
    seconds = {name: min(samples) for name, samples in taken.items()}
    rows = []
    for name, samples in taken.items():
        ratio = seconds[name] / seconds[PEER]
        rounds = [ratio, *(ours / peer for ours, peer in zip(samples, taken[PEER], strict=True))]
        spread = {"ratio": ratio, "low": min(rounds), "high": max(rounds), "rounds": rounds[1:]}
        rows.append(about | {"mechanism": name, "seconds": seconds[name]} | spread)
    return rows


def _probe(task: dict[str, Any]) -> Rows:
    for file in task["files"]:
        runpy.run_path(file)  # registers a mechanism of the user's own
    known = [
        (label, one if isinstance(one, str) else Formula.from_dict(one)) for label, one in task["subjects"]
    ]
    rows = []
    for candidate in (None, *(Candidate(*one) for one in known)):
        who = {"mechanism": PEER if candidate is None else candidate.label, "what": "memory"}
        for length in (WARM_UP, *task["lengths"]):
            module = None if candidate is None else candidate.module(length, HEADS)
            rows.append(who | {"length": length, "bytes": extra_bytes(training_call(module, length, HEADS))})
    return [row for row in rows if row["length"] != WARM_UP]


def price(lengths: Sequence[int], rounds: int = 2) -> Rows:
    """Measure CPU seconds of five CG steps on all keys and of a forward pass of SDPA, four heads, by length.

    CPU time instead of elapsed time: a fit of the growth must not depend on what else the machine does.
    """
    rows = []
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, generator=generator)
        system, ones = System(k[0] / math.sqrt(WIDTH), None, 0.1), torch.ones(HEADS, length)
        calls: dict[str, Call] = {
            "attention": partial(scaled_dot_product_attention, q, k, v),
            "solve": partial(truncated, system, ones, Options(1e-4, iterations=5, check=False)),
        }
        with torch.no_grad():
            seconds = fastest(calls, rounds=rounds, clock=time.process_time)
        rows.append({"length": length, **seconds, "ratio": seconds["solve"] / seconds["attention"]})
    return rows


_TIMED = "B=1 H=4 D=64 float32, against PyTorch's fused softmax"
_FIGURES = {
    "training": (
        "Training: time of forward and backward",
        f"Causal, {_TIMED} in the same interleaved run. Hover for the range over rounds.",
    ),
    "decoding": (
        "Decoding: time of one more token",
        f"One more token, {_TIMED} with a cache that is given the token too. Hover for the range over"
        " rounds.",
    ),
    "memory": (
        "Memory: peak of training",
        "Causal, B=1 H=4 D=64 float32, on top of the inputs, in a process of its own.",
    ),
}


@SECTION.figures
def figures(results: Results) -> Iterator[Figure]:
    for what, (title, note) in _FIGURES.items():
        rows = [row for row in results.starting_with(what) if row["mechanism"] in results.labels]
        if rows:
            rows = [{name: x for name, x in row.items() if name != "rounds"} for row in rows]
            more = ["bytes" if what == "memory" else "seconds", "low", "high"]
            yield Figure(f"cost-{what}", title, note, rows, _chart(results.labels, rows, more))


def _chart(labels: Sequence[str], rows: Rows, tooltip: Sequence[str]) -> Any:
    """Return bars for one or two lengths, where a line would show nothing more, and lines for others."""
    title = "times PyTorch's softmax (SDPA), dotted"
    if len({row["length"] for row in rows}) <= 2:
        return bars(labels, rows, "ratio", "length", x_title=title, tooltip=tooltip)
    axes: dict[str, Any] = {"x_title": "N, keys", "y_title": title.removesuffix(", dotted")}
    axes |= {"log_x": True, "log_y": True, "ends": ("low", "high")}
    return by_mechanism(labels, rows, "length", "ratio", tooltip=tooltip, **axes)


def _longest(what: str, results: Results, label: str) -> dict[str, Any]:
    """Return the row of a mechanism at the largest length, or {} if there is none."""
    rows = [row for row in results.starting_with(what) if row.get("mechanism") == label]
    return max(rows, key=lambda row: row["length"], default={})


def _ratio(what: str, results: Results, label: str) -> Estimate | None:
    row = _longest(what, results, label)
    return Estimate(row["ratio"], row["low"], row["high"]) if row else None


def _rounds(what: str, results: Results, label: str) -> list[float]:
    rounds: list[float] = _longest(what, results, label).get("rounds", [])
    return rounds


for _what, _text, _need, _noise in (
    ("training", "time of forward and backward", "train fast", 0.1),
    ("decoding", "time of one more token", "decode fast", 0.2),
    ("memory", "peak memory of training", "train in little memory", 0.05),
):
    SECTION.column(
        _what,
        _what if _what == "memory" else f"{_what} time",
        help=f"{_text} at the largest N, of PyTorch's fused softmax; the range is that over rounds",
        yes=1 + _noise,
        partly=2.0,
        low_is_good=True,
        noise=_noise,
        unit="× SDPA",
        why=(
            f"1 is PyTorch's fused softmax; repeated runs of the same code differ by {_noise:.0%}, so ● costs"
            " no more than that as far as can be told; ◐ up to twice as much; ○ more."
        ),
        group=COST,
        need=_need,
        draws=None if _what == "memory" else partial(_rounds, _what),
        is_ratio=True,
    )(partial(_ratio, _what))


@SECTION.experiment(ROSIC, "The cost is that of standard attention, O(N²).")
def _price(results: Results) -> Finding:
    """Four heads of width 64: supported if the CPU time of 5 truncated steps grows with an exponent below
    2.3 from 1024 to 4096 keys, and 5 steps, a causal training step and its peak memory each cost less than
    twice PyTorch's attention at the largest length; partly if only the exponent is. Undecided if the
    exponent is below 1.5, nearer to linear than to quadratic: then overhead dominates.

    Refuted: The exponent is 2.3 or more.
    """
    rows = results.rows("price of the solver")
    power, last = growth(rows, "solve"), rows[-1]
    memory = max(matching(results.rows("memory"), mechanism=GATED), key=lambda row: row["length"])
    (training,) = matching(results.rows(f"training at {memory['length']}"), mechanism=GATED)
    numbers = (
        f"5 steps of conjugate gradients grow like N^{power:.2f} from N = {rows[0]['length']} to"
        f" {last['length']}, attention like N^{growth(rows, 'attention'):.2f}; 5 steps take"
        f" {last['ratio']:.2f} times its forward pass at N = {last['length']}; at N = {memory['length']}"
        f" magnitude takes {training['ratio']:.2f} times its training time and {memory['ratio']:.2f} times"
        " its memory"
    )
    if power < 1.5:
        return UNDECIDED, numbers
    ratios = [row["ratio"] for row in (last, training, memory)]
    return grade(power < 2.3 and max(ratios) < 2, power < 2.3), numbers


def growth(rows: Sequence[dict[str, Any]], field: str) -> float:
    """Return the exponent p of seconds = c N^p, by least squares of the logarithms.

    >>> round(growth([{"length": n, "solve": 3.0 * n**2} for n in (2, 4, 8)], "solve"), 9)
    2.0
    """
    xs, ys = [math.log(row["length"]) for row in rows], [math.log(row[field]) for row in rows]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


if __name__ == "__main__":
    print(json.dumps({"rows": _probe(json.loads(sys.argv[1]))}))
