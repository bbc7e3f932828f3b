"""Figures of the mechanisms that are modules: ``python benchmarks/families.py [--out FILE.json]``,
about a minute.

Every time is a ratio to ``F.scaled_dot_product_attention`` of the same shape (B=1 H=8 D=64 float32) in the
same interleaved run, the fastest of at least five rounds. Memory is the peak of forward + backward in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.files import write_json
from unsoft.lab.bench import timing
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.machine import machine

HEADS, WIDTH, ROUNDS = 8, 64, 5
LINEAR = ("linear-relu", "linear-elu1", "cosformer(8192)", "retention")
SDPA = "softmax, SDPA"


def training(attend: Callable, query_heads: int, length: int) -> Callable[[], object]:
    """Forward and backward of a causal or full call on random inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, WIDTH, generator=generator).requires_grad_()
        for heads in (query_heads, HEADS, HEADS)
    )
    upstream = torch.randn(1, HEADS, length, WIDTH, generator=generator)
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), upstream)


def contenders(names: tuple[str, ...], length: int, is_causal: bool) -> dict[str, Callable[[], object]]:
    def run(module: torch.nn.Module) -> Callable:
        return lambda q, k, v: module(q, k, v, is_causal=is_causal)

    calls = {
        SDPA: training(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal), HEADS, length
        )
    }
    for name in names:
        module = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH)
        calls[name] = training(run(module), module.query_heads, length)
    return calls


def fastest(calls: dict[Any, Callable[[], object]], rounds: int = ROUNDS) -> dict[Any, float]:
    """Seconds of each call, all taking turns."""
    return timing.fastest(calls, rounds=rounds, seconds=1.0)


def affine_figures() -> list[dict]:
    figures = []
    for length in (512, 2048):
        for is_causal in (False, True):
            seconds = fastest(contenders(("gpam", "differential", "differential2"), length, is_causal))
            for name in ("gpam", "differential", "differential2"):
                what = f"{name}, forward + backward, {length}{' causal' if is_causal else ''}"
                figures.append({"what": what, "measured": seconds[name] / seconds[SDPA], "at_most": 1.9})
    return figures


def linear_figures() -> list[dict]:
    calls = {
        (name, length): call
        for length in (4096, 8192)
        for name, call in contenders(LINEAR, length, True).items()
    }
    seconds = fastest(calls)
    figures = []
    for name in LINEAR:
        growth = seconds[name, 8192] / seconds[name, 4096]
        figures.append({"what": f"{name}, time at 8192 / 4096", "measured": growth, "at_most": 2.2})
        ratio = seconds[name, 8192] / seconds[SDPA, 8192]
        figures.append({"what": f"{name}, 8192 causal", "measured": ratio, "at_most": 0.25})
    return figures


def step_figures() -> list[dict]:
    """One more token after 256: against SDPA over the keys and values that it would keep."""
    reach = {"gpam": 3.0, "linear-relu": 2.5, "cosformer": 3.0, "retention": 2.5}
    length, generator = 256, torch.Generator().manual_seed(0)

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, WIDTH, generator=generator)

    kept = [random(HEADS, n) for n in (1, length + 1, length + 1)]
    calls: dict[str, Callable[[], object]] = {SDPA: lambda: scaled_dot_product_attention(*kept)}
    with torch.no_grad():
        for name in reach:
            module = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH)
            cache = module.new_cache(1)
            module(*(random(HEADS, length) for _ in range(3)), cache=cache)
            token = [random(HEADS, 1) for _ in range(3)]
            module(*token, cache=cache)  # shapes are checked and buffers grow now, not while the clock runs

            def step(module=module, cache=cache, token=token) -> object:
                held = dict(vars(cache))
                result = module(*token, cache=cache)
                vars(cache).update(held)  # the next step is at the same length again
                return result

            calls[name] = step
        seconds = fastest(calls, 40)
    return [
        {"what": f"{name}, one step at {length}", "measured": seconds[name] / seconds[SDPA], "at_most": most}
        for name, most in reach.items()
    ]


def decode_figures() -> list[dict]:
    figures = []
    for name in ("linear-relu", "cosformer(32768)", "retention"):
        module, steps = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH), {}
        for position in (256, 16384):
            cache = module.new_cache(1)
            with torch.no_grad():
                module(*(torch.randn(1, HEADS, position, WIDTH) for _ in range(3)), cache=cache)
            token = [torch.randn(1, HEADS, 1, WIDTH) for _ in range(3)]

            def step(module=module, cache=cache, token=token) -> None:
                with torch.no_grad():
                    module(*token, cache=cache)

            steps[str(position)] = step
        seconds = fastest(steps, 40)
        figures.append(
            {
                "what": f"{name}, decode at 16384 / 256",
                "measured": seconds["16384"] / seconds["256"],
                "at_most": 1.1,
            }
        )
    return figures


def cumulative_sum_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal linear attention as it is often written: every prefix sum of k v^T at once."""
    q, k = q.relu(), k.relu()
    sums = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return torch.einsum("bhlf,bhlfv->bhlv", q, sums) / (q * k.cumsum(2)).sum(-1, keepdim=True).clamp(min=1e-6)


def memory_of(who: str) -> int:
    module = unsoft.mechanism("linear-relu", heads=HEADS, head_dim=WIDTH)
    attend = cumulative_sum_attention if who == "sum" else lambda q, k, v: module(q, k, v, is_causal=True)
    training(attend, HEADS, 64)()
    call = training(attend, HEADS, 2048)
    before = reset_peak()
    call()
    return peak() - before


def memory_figures() -> list[dict]:
    needed = {
        who: run_probe(__file__, "--memory", who, MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
        for who in ("sum", "ours")
    }
    what = "linear-relu, peak memory at 2048, of the cumulative sum's"
    return [{"what": what, "measured": needed["ours"] / needed["sum"], "at_most": 0.1}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", choices=("sum", "ours"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps({"bytes": memory_of(arguments.memory)}))
        return
    report((affine_figures, linear_figures, step_figures, decode_figures, memory_figures), arguments.out)


def report(groups: Iterable[Callable[[], list[dict]]], out: Path | None) -> None:
    """Measures, prints each figure beside its bar, and writes them to a file."""
    figures = []
    for group in groups:
        for figure in group():
            verdict = "pass" if figure["measured"] <= figure["at_most"] else "FAIL"
            print(
                f"{figure['what']:<60} {figure['measured']:6.2f}  <= {figure['at_most']:<5} {verdict}",
                flush=True,
            )
            figures.append(figure | {"passed": verdict == "pass"})
    if out:
        write_json(out, {"machine": machine(), "figures": figures})
        print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(main())
