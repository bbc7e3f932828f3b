"""What does it cost? Training and decoding beside PyTorch's fused softmax, in turn, and memory."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from unsoft.formula import Formula
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine
from unsoft.lab.bench.timing import fastest, interleaved
from unsoft.lab.compare.claim import EXPERIMENT, ROSIC, Claim, Finding
from unsoft.lab.compare.column import Column
from unsoft.lab.compare.jobs import Job, Missing, Results
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.section import Request, Section, job
from unsoft.lab.compare.store import outside_file
from unsoft.lab.compare.subject import WIDTH, Subject
from unsoft.lab.compare.timed_calls import Call, cached_step, sdpa_step, training_step
from unsoft.lab.evidence import Estimate, grade
from unsoft.lab.report.figure import Figure, by_mechanism
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.contract import Options
from unsoft.magnitude.solvers.truncated import truncated

PEER = "softmax of PyTorch (SDPA)"


def jobs(request: Request) -> list[Job]:
    """Of the mechanisms that were asked for; times depend on the machine and on what else is timed in
    turn.
    """
    subjects, level = request.subjects, request.level
    about = _where(level) | {
        "mechanisms": [s.identity for s in subjects],
        "labels": [s.label for s in subjects],
    }
    found = []
    for n in level.lengths:
        seconds, one = len(subjects) * level.rounds * 0.01 * (n / 512) ** 2 + 2, about | {"length": n}
        call = partial(training, subjects, n, level)
        found.append(job(f"training at {n}", None, call, seconds, one, timed=True))
        call = partial(decoding, subjects, n, level)
        found.append(job(f"decoding at {n}", None, call, 2.0, one, timed=True))
    sizes = about | {"lengths": level.lengths}
    return [*found, job("memory", None, partial(memory, subjects, level.lengths), 8.0, sizes)]


def facts(level: Level) -> list[Job]:
    sizes = _where(level) | {"lengths": level.lengths}
    return [job("price of the solver", None, partial(price, level), 2.0, sizes, timed=True)]


def _where(level: Level) -> dict[str, Any]:
    """What times depend on, besides what is timed."""
    machine_and_threads = {"machine": machine(), "threads": torch.get_num_threads()}
    return machine_and_threads | {"rounds": level.rounds, "seconds": level.seconds}


def training(subjects: Sequence[Subject], length: int, level: Level) -> list[dict[str, Any]]:
    """Causal forward and backward, B=1 H=4 D=64 float32: seconds, and the ratio to SDPA."""
    calls = {PEER: training_step(None, length)} | {s.label: training_step(s, length) for s in subjects}
    return _ratios(calls, level, {"what": "training", "length": length})


def decoding(subjects: Sequence[Subject], length: int, level: Level) -> list[dict[str, Any]]:
    """One more token after ``length`` tokens: seconds, and the ratio to SDPA with a cache of keys and values,
    which is given the token as well.
    """
    calls = {PEER: sdpa_step(length)} | {s.label: cached_step(s, length) for s in subjects}
    return _ratios(calls, level, {"what": "decoding", "length": length})


def memory(subjects: Sequence[Subject], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Peak bytes of training on top of the inputs, all in one process of its own."""
    families = [s.family for s in subjects if s.family is not None]
    files = {str(file) for family in families if (file := outside_file(family.build)) is not None}
    task = {
        "lengths": list(lengths),
        "subjects": [[s.label, _portable(s.mechanism)] for s in subjects],
        "files": sorted(files),
    }
    rows = run_probe("-m", __name__, json.dumps(task), MALLOC_MMAP_THRESHOLD_="65536")["rows"]
    base = {row["length"]: max(row["bytes"], 1) for row in rows if row["mechanism"] == PEER}
    return [row | {"ratio": row["bytes"] / base[row["length"]], "low": None, "high": None} for row in rows]


def _ratios(calls: dict[str, Call], level: Level, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratio of the fastest samples; ``low`` and ``high`` are the range of the ratios within a round."""
    taken = interleaved(calls, rounds=level.rounds, seconds=level.seconds)
    seconds = {name: min(samples) for name, samples in taken.items()}
    rows = []
    for name, samples in taken.items():
        ratio = seconds[name] / seconds[PEER]
        rounds = [ratio, *(ours / peer for ours, peer in zip(samples, taken[PEER], strict=True))]
        spread = {"ratio": ratio, "low": min(rounds), "high": max(rounds)}
        rows.append(about | {"mechanism": name, "seconds": seconds[name]} | spread)
    return rows


def _portable(mechanism: str | Formula) -> Any:
    return mechanism if isinstance(mechanism, str) else mechanism.to_dict()


def _probe(task: dict[str, Any]) -> list[dict[str, Any]]:
    for file in task["files"]:
        runpy.run_path(file)  # registers a mechanism of the user's own
    known = [
        Subject(label, given if isinstance(given, str) else Formula.from_dict(given))
        for label, given in task["subjects"]
    ]
    rows = []
    for subject in (None, *known):
        training_step(subject, 128)()  # loads libraries, starts threads
        for length in task["lengths"]:
            call = training_step(subject, length)
            before = reset_peak()
            call()
            rows.append(
                {
                    "mechanism": PEER if subject is None else subject.label,
                    "what": "memory",
                    "length": length,
                    "bytes": max(peak() - before, 0),
                }
            )
    return rows


def price(level: Level) -> list[dict[str, Any]]:
    """Seconds of five CG steps on all keys against a forward pass of
    SDPA, four heads: does the ratio grow with N?
    """
    rows = []
    for length in level.lengths:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 4, length, WIDTH, generator=generator) for _ in range(3))
        points, ones = k[0] / math.sqrt(WIDTH), torch.ones(4, length)

        def attention(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return scaled_dot_product_attention(q, k, v)

        def solve(points: torch.Tensor = points, ones: torch.Tensor = ones) -> object:
            return truncated(System(points, None, 0.1), ones, Options(1e-4, iterations=5, check=False))

        with torch.no_grad():
            seconds = fastest({"attention": attention, "solve": solve}, rounds=max(level.rounds, 5))
        rows.append({"length": length, **seconds, "ratio": seconds["solve"] / seconds["attention"]})
    return rows


def figures(results: Results) -> Iterator[Figure]:
    fair = "Causal, B=1 H=4 D=64 float32, against PyTorch's fused softmax in the same interleaved run."
    fair += " Bars: the range over rounds."
    kept = (
        "One more token, B=1 H=4 D=64 float32, against PyTorch's fused softmax with a cache that is given the"
        " token too. Bars: the range over rounds."
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
        rows = [row for row in results.matching(what) if row["mechanism"] in results.labels]
        if rows:
            chart = by_mechanism(
                results.labels,
                rows,
                "length",
                "ratio",
                x_title="N, keys",
                y_title="times PyTorch's softmax",
                log_x=True,
                log_y=True,
                tooltip=["bytes" if what == "memory" else "seconds", "low", "high"],
                ends=("low", "high"),
            )
            yield Figure(f"cost-{what}", title, note, rows, chart)


def _column(what: str, text: str, noise: float) -> Column:
    """As much as PyTorch's softmax, within what repeated runs of the same code differ by, or up to twice."""

    def answer(results: Results, label: str) -> Estimate | None:
        rows = [row for row in results.matching(what) if row.get("mechanism") == label]
        if not rows:
            return None
        row = max(rows, key=lambda row: row["length"])
        return Estimate(row["ratio"], row["low"], row["high"])

    help = f"{text} at the largest N, of PyTorch's fused softmax; the range is that over rounds"
    yes, partly = 1 + noise, 2.0
    why = (
        f"1 is PyTorch's fused softmax; repeated runs of the same code differ by {noise:.0%}, so ● costs no"
        " more than that as far as can be told; ◐ up to twice as much; ○ more."
    )
    return Column(what, what, help, answer, yes, partly, low_is_good=True, noise=noise, unit="times", why=why)


def _price(results: Results) -> Finding:
    rows = results.rows("price of the solver")
    if len(rows) < 2:
        raise Missing("it takes two lengths to see a growth")
    power, last = growth(rows, "solve"), rows[-1]
    quadratic = power < 2.3
    return grade(quadratic and last["ratio"] < 2, quadratic), (
        f"5 steps of conjugate gradients grow like N^{power:.2f}, attention like"
        f" N^{growth(rows, 'attention'):.2f}; at N = {last['length']} they take"
        f" {last['ratio']:.2f} times the forward pass of PyTorch's attention"
    )


def growth(rows: Sequence[dict[str, Any]], field: str) -> float:
    """The exponent p of seconds = c N^p, by least squares of the logarithms.

    >>> round(growth([{"length": n, "solve": 3.0 * n**2} for n in (2, 4, 8)], "solve"), 9)
    2.0
    """
    xs, ys = [math.log(row["length"]) for row in rows], [math.log(row[field]) for row in rows]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


SECTION = Section(
    name="cost",
    order=60,
    title="Cost",
    question="What does it cost?",
    jobs=jobs,
    facts=facts,
    figures=figures,
    columns=[
        _column("training", "time of forward and backward", noise=0.1),
        _column("decoding", "time of one more token", noise=0.2),
        _column("memory", "peak memory of training", noise=0.05),
    ],
    claims=[
        Claim(
            "price",
            ROSIC,
            "The cost is that of standard attention, O(N²).",
            EXPERIMENT,
            "Time of 5 truncated steps on all keys, four heads of width 64: holds if the fitted exponent is"
            " below 2.3 and the time less than twice"
            " that of PyTorch's attention at the largest N; with limits if only the exponent is.",
            "The exponent is 2.3 or more.",
            _price,
        )
    ],
)


if __name__ == "__main__":
    print(json.dumps({"rows": _probe(json.loads(sys.argv[1]))}))
