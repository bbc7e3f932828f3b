"""What does it cost? Training and decoding beside PyTorch's fused softmax, in the same interleaved run, and memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from unsoft.bench.memory import peak, reset_peak
from unsoft.bench.probe import run_probe
from unsoft.bench.timing import interleaved
from unsoft.compare.level import Level
from unsoft.compare.subject import WIDTH, Subject
from unsoft.formula import Formula
from unsoft.mechanisms.core.module import Mechanism

HEADS = 4
PEER = "softmax of PyTorch (SDPA)"
Call = Callable[[], object]


def training(subjects: Sequence[Subject], length: int, level: Level) -> list[dict[str, Any]]:
    """Causal forward and backward, B=1 H=4 D=64 float32: seconds, and the ratio to SDPA."""
    calls = {PEER: _train(None, length)} | {s.label: _train(s, length) for s in subjects}
    return _ratios(calls, level, {"what": "training", "length": length})


def decoding(subjects: Sequence[Subject], length: int, level: Level) -> list[dict[str, Any]]:
    """One more token after ``length`` tokens: seconds, and the ratio to SDPA over kept keys and values."""
    calls = {PEER: _sdpa_step(length)} | {s.label: _step(s, length) for s in subjects}
    return _ratios(calls, level, {"what": "decoding", "length": length})


def memory(subjects: Sequence[Subject], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Peak bytes of training on top of the inputs, all in one process of its own."""
    task = {"lengths": list(lengths), "subjects": [[s.label, _portable(s.mechanism)] for s in subjects]}
    rows = run_probe("-m", __name__, json.dumps(task), MALLOC_MMAP_THRESHOLD_="65536")["rows"]
    base = {row["length"]: max(row["bytes"], 1) for row in rows if row["mechanism"] == PEER}
    return [row | {"ratio": row["bytes"] / base[row["length"]]} for row in rows]


def _ratios(calls: dict[str, Call], level: Level, about: dict[str, Any]) -> list[dict[str, Any]]:
    taken = interleaved(calls, rounds=level.rounds, seconds=level.seconds)
    seconds = {name: min(samples) for name, samples in taken.items()}
    return [
        about | {"mechanism": name, "seconds": s, "ratio": s / seconds[PEER]} for name, s in seconds.items()
    ]


def _train(subject: Subject | None, length: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    module = None if subject is None else subject.module(length, HEADS)
    queries, heads = (HEADS, HEADS) if module is None else (module.query_heads, module.place.heads)
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


def _sdpa_step(length: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, generator=generator) for n in (1, length + 1, length + 1))

    def call() -> object:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v)

    return call


def _step(subject: Subject, length: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    module = subject.module(length + 2, HEADS)  # a first token and the one that is timed
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
    heads = (module.query_heads, module.place.heads, module.place.heads)
    return [torch.randn(1, h, length, WIDTH, generator=generator) for h in heads]


def _portable(mechanism: str | Formula) -> Any:
    return mechanism if isinstance(mechanism, str) else mechanism.to_dict()


def _probe(task: dict[str, Any]) -> list[dict[str, Any]]:
    known = [
        Subject(label, given if isinstance(given, str) else Formula.from_dict(given))
        for label, given in task["subjects"]
    ]
    rows = []
    for subject in (None, *known):
        _train(subject, 128)()  # loads libraries, starts threads
        for length in task["lengths"]:
            call = _train(subject, length)
            before = reset_peak()
            call()
            rows.append(
                {"mechanism": PEER if subject is None else subject.label, "what": "memory", "length": length, "bytes": max(peak() - before, 0)}
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    print(json.dumps({"rows": _probe(json.loads(sys.argv[1]))}))
