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
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest, interleaved
from unsoft.lab.compare.candidate import WIDTH, Candidate
from unsoft.lab.compare.jobs import Job, Results, Rows, matching
from unsoft.lab.compare.section import (
    BASELINE,
    COST,
    EXPERIMENT,
    PRICE,
    ROSIC,
    ComparisonLevel,
    Finding,
    Request,
    ScoreColumn,
    Section,
    claim,
)
from unsoft.lab.compare.store import outside_file
from unsoft.lab.evidence import UNDECIDED, Estimate, grade
from unsoft.lab.report.figure import Figure, bars, by_mechanism
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.iterative import truncated
from unsoft.magnitude.solver import Options
from unsoft.modules.module import Mechanism

PEER = "softmax of PyTorch (SDPA)"
HEADS = 4
GATED = "magnitude"
"""The mechanism whose price a claim is about: it is measured whatever else is compared."""
LONGEST = 4096
"""Keys at which the growth of the solver is fitted: below 1024 overhead dominates."""
TimedCall = Callable[[], object]


def jobs(request: Request) -> list[Job]:
    """Return jobs about all candidates at once: times depend on the machine and on what else is timed."""
    candidates, level = request.with_references(BASELINE, GATED), request.level
    identities: dict[str, Any] = {
        "mechanisms": [c.identity for c in candidates],
        "labels": [c.label for c in candidates],
    }
    jobs = []
    for n in level.lengths:
        expected = len(candidates) * level.rounds * 0.01 * (n / 512) ** 2 + 2
        question = identities | {"length": n}
        jobs.append(
            _timed(f"training at {n}", partial(training, candidates, n, level), expected, level, question)
        )
        jobs.append(_timed(f"decoding at {n}", partial(decoding, candidates, n, level), 2.0, level, question))
    question, call = identities | {"lengths": level.lengths}, partial(memory, candidates, level.lengths)
    return [*jobs, _timed("memory", call, 8.0, level, question, timed=False)]


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
    calls = {PEER: training_step(None, length)} | {s.label: training_step(s, length) for s in candidates}
    return _ratios(calls, level, {"what": "training", "length": length})


def decoding(candidates: Sequence[Candidate], length: int, level: ComparisonLevel) -> Rows:
    """Time one more token after ``length`` tokens, and the ratio to SDPA with a key-value cache."""
    calls = {PEER: sdpa_step(length)} | {s.label: cached_step(s, length) for s in candidates}
    return _ratios(calls, level, {"what": "decoding", "length": length})


def memory(candidates: Sequence[Candidate], lengths: Sequence[int]) -> Rows:
    """Measure peak bytes of training on top of the inputs, all in one separate process."""
    families = [s.family for s in candidates if s.family is not None]
    files = {str(file) for family in families if (file := outside_file(family.build)) is not None}
    task = {
        "lengths": list(lengths),
        "subjects": [[s.label, _portable(s.mechanism)] for s in candidates],
        "files": sorted(files),
    }
    rows = run_probe("-m", __name__, json.dumps(task), MALLOC_MMAP_THRESHOLD_="65536")["rows"]
    base = {row["length"]: max(row["bytes"], 1) for row in rows if row["mechanism"] == PEER}
    return [row | {"ratio": row["bytes"] / base[row["length"]], "low": None, "high": None} for row in rows]


def _ratios(calls: dict[str, TimedCall], level: ComparisonLevel, about: dict[str, Any]) -> Rows:
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


def training_step(candidate: Candidate | None, length: int) -> TimedCall:
    """Return a call of causal forward and backward, of PyTorch's softmax without a candidate."""
    generator = torch.Generator().manual_seed(0)
    module = None if candidate is None else candidate.module(length, HEADS)
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


def sdpa_step(length: int) -> TimedCall:
    """Return a cached step of PyTorch: copy the token into a preallocated cache, then SDPA."""
    generator = torch.Generator().manual_seed(0)
    room_k, room_v = (torch.randn(1, HEADS, length + 2, WIDTH, generator=generator) for _ in range(2))
    q, k, v = (torch.randn(1, HEADS, 1, WIDTH, generator=generator) for _ in range(3))

    def call() -> object:
        with torch.no_grad():
            room_k[:, :, length + 1 :] = k
            room_v[:, :, length + 1 :] = v
            return scaled_dot_product_attention(q, room_k, room_v)

    return call


def cached_step(candidate: Candidate, length: int) -> TimedCall:
    """Return a step with the mechanism's own cache, which is restored afterwards."""
    generator = torch.Generator().manual_seed(0)
    module = candidate.module(length + 2, HEADS)  # a first token and the one that is timed
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


def _portable(mechanism: str | Formula) -> Any:
    return mechanism if isinstance(mechanism, str) else mechanism.to_dict()


def _probe(task: dict[str, Any]) -> Rows:
    for file in task["files"]:
        runpy.run_path(file)  # registers a mechanism of the user's own
    known = [
        Candidate(label, one if isinstance(one, str) else Formula.from_dict(one))
        for label, one in task["subjects"]
    ]
    rows = []
    for candidate in (None, *known):
        training_step(candidate, 128)()  # loads libraries, starts threads
        for length in task["lengths"]:
            call = training_step(candidate, length)
            before = reset_peak()
            call()
            rows.append(
                {
                    "mechanism": PEER if candidate is None else candidate.label,
                    "what": "memory",
                    "length": length,
                    "bytes": max(peak() - before, 0),
                }
            )
    return rows


def price(lengths: Sequence[int], rounds: int = 2) -> Rows:
    """Measure CPU seconds of five CG steps on all keys and of a forward pass of SDPA, four heads, by length.

    CPU time instead of elapsed time: a fit of the growth must not depend on what else the machine does.
    """
    rows = []
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, generator=generator)
        system, ones = System(k[0] / math.sqrt(WIDTH), None, 0.1), torch.ones(HEADS, length)
        calls: dict[str, TimedCall] = {
            "attention": partial(scaled_dot_product_attention, q, k, v),
            "solve": partial(truncated, system, ones, Options(1e-4, iterations=5, check=False)),
        }
        with torch.no_grad():
            seconds = fastest(calls, rounds=rounds, clock=time.process_time)
        rows.append({"length": length, **seconds, "ratio": seconds["solve"] / seconds["attention"]})
    return rows


def figures(results: Results) -> Iterator[Figure]:
    fair = "Causal, B=1 H=4 D=64 float32, against PyTorch's fused softmax in the same interleaved run."
    fair += " Hover for the range over rounds."
    kept = (
        "One more token, B=1 H=4 D=64 float32, against PyTorch's fused softmax with a cache that is given the"
        " token too. Hover for the range over rounds."
    )
    for what, title, note in (
        ("training", "Training: time of forward and backward", fair),
        ("decoding", "Decoding: time of one more token", kept),
        (
            "memory",
            "Memory: peak of training",
            "Causal, B=1 H=4 D=64 float32, on top of the inputs, in a process of its own.",
        ),
    ):
        rows = [row for row in results.starting_with(what) if row["mechanism"] in results.labels]
        if rows:
            rows = [{name: x for name, x in row.items() if name != "rounds"} for row in rows]
            more = ["bytes" if what == "memory" else "seconds", "low", "high"]
            chart = _chart(results.labels, rows, more)
            yield Figure(f"cost-{what}", title, note, rows, chart)


def _chart(labels: Sequence[str], rows: Rows, tooltip: Sequence[str]) -> Any:
    """Return bars for one or two lengths, where a line would show nothing more, and lines for others."""
    title = "times PyTorch's softmax (SDPA), dotted"
    if len({row["length"] for row in rows}) <= 2:
        return bars(labels, rows, "ratio", "length", x_title=title, tooltip=tooltip)
    return by_mechanism(
        labels,
        rows,
        "length",
        "ratio",
        x_title="N, keys",
        y_title=title.removesuffix(", dotted"),
        log_x=True,
        log_y=True,
        tooltip=tooltip,
        ends=("low", "high"),
    )


def _column(what: str, text: str, need: str, noise: float) -> ScoreColumn:
    """Return a column: yes for as much as PyTorch's softmax within noise, partly for up to twice as much."""

    def answer(results: Results, label: str) -> Estimate | None:
        rows = [row for row in results.starting_with(what) if row.get("mechanism") == label]
        if not rows:
            return None
        row = max(rows, key=lambda row: row["length"])
        return Estimate(row["ratio"], row["low"], row["high"])

    def rounds(results: Results, label: str) -> list[float | None]:
        rows = [row for row in results.starting_with(what) if row.get("mechanism") == label]
        return max(rows, key=lambda row: row["length"])["rounds"] if rows else []

    help = f"{text} at the largest N, of PyTorch's fused softmax; the range is that over rounds"
    why = (
        f"1 is PyTorch's fused softmax; repeated runs of the same code differ by {noise:.0%}, so ● costs no"
        " more than that as far as can be told; ◐ up to twice as much; ○ more."
    )
    return ScoreColumn(
        what,
        what if what == "memory" else f"{what} time",
        help,
        answer,
        1 + noise,
        2.0,
        low_is_good=True,
        noise=noise,
        unit="× SDPA",
        why=why,
        group=COST,
        need=need,
        draws=None if what == "memory" else rounds,
        is_ratio=True,
    )


@claim(ROSIC, EXPERIMENT, "The cost is that of standard attention, O(N²).")
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


SECTION = Section(
    name="cost",
    order=60,
    group=PRICE,
    title="Cost",
    question="What does it cost?",
    jobs=jobs,
    facts=facts,
    figures=figures,
    columns=[
        _column("training", "time of forward and backward", "train fast", noise=0.1),
        _column("decoding", "time of one more token", "decode fast", noise=0.2),
        _column("memory", "peak memory of training", "train in little memory", noise=0.05),
    ],
    claims=[_price],
)


if __name__ == "__main__":
    print(json.dumps({"rows": _probe(json.loads(sys.argv[1]))}))
