"""Time and memory of the measures on a large weight tensor:
``python benchmarks/measures.py [--out FILE.json]``, about two minutes.

The tensor is (32 heads, 2048, 2048) float32, 512 MB. Every time is a ratio to ``weights.abs().sum()`` over it
in the same interleaved run, the fastest of at least three rounds; the bar is 3. That expression makes a copy;
the ratio to a pass that makes none (the same in blocks) is shown beside it, for information. Memory is the
peak of one call, as a share of the tensor's size.

Statistics without weights (``unsoft.attention(..., return_stats=True)``) are compared with the same call
without them, causal: 8 heads of 1024 and of 4096 tokens, one head of 32,768. The bar is 1.2 at 4096 tokens in
float32; other ratios are shown for information. Memory at 32,768 tokens must stay below 1 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import unsoft
from unsoft import measure
from unsoft.lab.bench.fresh_process import peak, reset_peak, run_probe
from unsoft.lab.bench.record import write_figures
from unsoft.lab.bench.timing import fastest
from unsoft.measure.rows import over_rows

HEADS, LENGTH, WIDTH = 32, 2048, 64
COPYING, WALKING = "weights.abs().sum()", "the same in blocks"
TIME_BAR, MEMORY_BAR = 3.0, 0.25
STATS_TIME_BAR, STATS_BYTES_BAR = 1.2, 10**9
STATS_SHAPES = (
    (1024, 8, torch.float32),
    (4096, 8, torch.float32),
    (4096, 8, torch.bfloat16),
    (32_768, 1, torch.float32),
)
"""Length, heads and dtype of the calls with statistics."""


def calls(heads: int = HEADS) -> dict[str, Callable[[], object]]:
    """Each measure of a weight tensor, on signed weights; whatever else it needs is made beforehand."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(heads, LENGTH, LENGTH)
    for head in weights:
        sizes = torch.randn(LENGTH, LENGTH, generator=generator).softmax(-1)
        head.copy_(sizes * torch.randn(LENGTH, generator=generator).sign())
    values, keys = (torch.randn(heads, LENGTH, WIDTH, generator=generator) for _ in range(2))
    worth = torch.rand(heads, LENGTH, generator=generator)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {
        COPYING: lambda: weights.abs().sum(),
        WALKING: lambda: over_rows(lambda block: block.abs().sum(-1), weights),
        "sparsity": lambda: measure.sparsity(weights),
        "sparsity, causal mask": lambda: measure.sparsity(weights, causal),
        "entropy": lambda: measure.entropy(weights),
        "entropy, causal mask": lambda: measure.entropy(weights, causal),
        "effective_keys": lambda: measure.effective_keys(weights),
        "participation": lambda: measure.participation(weights),
        "top_mass": lambda: measure.top_mass(weights),
        "top_mass, k=10": lambda: measure.top_mass(weights, k=10),
        "sink_mass": lambda: measure.sink_mass(weights),
        "distance_to_uniform": lambda: measure.distance_to_uniform(weights),
        "negative_share": lambda: measure.negative_share(weights),
        "row_sum": lambda: measure.row_sum(weights),
        "cancellation": lambda: measure.cancellation(weights),
        "summary (all of the above)": lambda: measure.summary(weights),
        "deletion": lambda: measure.deletion(weights, values),
        "head_similarity": lambda: measure.head_similarity(weights),
        "hijack, magnitude given": lambda: measure.hijack(weights, keys, magnitude_weights=worth),
    }


def memory() -> dict[str, int]:
    """Peak bytes of each call beyond its inputs."""
    for call in calls(heads=1).values():  # loads libraries and starts threads
        call()
    needed = {}
    for name, call in calls().items():
        before = reset_peak()
        call()
        needed[name] = max(peak() - before, 0)
    return needed


def with_statistics(
    name: str, length: int, heads: int, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[], object]]:
    """A causal call of a formula without and with statistics."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, WIDTH, generator=generator).to(dtype) for _ in range(3))
    return {
        "alone": lambda: unsoft.attention(q, k, v, name, is_causal=True),
        "return_stats": lambda: unsoft.attention(q, k, v, name, is_causal=True, return_stats=True),
    }


def statistics_memory() -> dict[str, int]:
    """Peak bytes of statistics of 32,768 tokens beyond the inputs."""
    with_statistics("softmax", 256, 1)["return_stats"]()
    call = with_statistics("softmax", 32_768, 1)["return_stats"]
    before = reset_peak()
    call()
    return {"bytes": max(peak() - before, 0)}


def statistics_figures() -> list[dict[str, object]]:
    """Time of statistics beside a forward pass, and their memory."""
    figures: list[dict[str, object]] = []
    for length, heads, dtype in STATS_SHAPES:
        for name in ("softmax", "cog"):
            seconds = fastest(with_statistics(name, length, heads, dtype), rounds=3 if length > 4096 else 7)
            ratio = seconds["return_stats"] / seconds["alone"]
            judged = length == 4096 and dtype == torch.float32
            figures.append(
                {
                    "what": f"attention, {name}, return_stats, {length} tokens, {str(dtype)[6:]}",
                    "seconds": seconds["return_stats"],
                    "ratio": ratio,
                    "at_most": STATS_TIME_BAR if judged else None,
                    "passed": not judged or ratio <= STATS_TIME_BAR,
                }
            )
    needed = run_probe(__file__, "--statistics-memory", MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
    figures.append(
        {
            "what": "attention, return_stats, bytes at 32,768 tokens",
            "bytes": needed,
            "at_most": STATS_BYTES_BAR,
            "passed": needed <= STATS_BYTES_BAR,
        }
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--statistics-memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.memory:
        print(json.dumps(memory()))
        return
    if arguments.statistics_memory:
        print(json.dumps(statistics_memory()))
        return
    size = HEADS * LENGTH * LENGTH * 4
    seconds = fastest(calls(), rounds=3)
    # A fixed threshold makes malloc give large blocks back to the system, so that none hide from the peak.
    needed = run_probe(__file__, "--memory", MALLOC_MMAP_THRESHOLD_="65536")
    figures: list[dict[str, object]] = []
    for name, taken in seconds.items():
        ratio = taken / seconds[COPYING]
        used = needed[name] / size
        passed = name == COPYING or (ratio <= TIME_BAR and used <= MEMORY_BAR)
        figures.append(
            {
                "what": name,
                "seconds": taken,
                "ratio": ratio,
                "at_most": TIME_BAR,
                "ratio_to_blocks": taken / seconds[WALKING],
                "memory": used,
                "memory_at_most": MEMORY_BAR,
                "passed": passed,
            }
        )
        print(
            f"{name:<28} {taken * 1e3:7.0f} ms  {ratio:5.2f}x (in blocks {taken / seconds[WALKING]:5.2f}x)"
            f"  memory {used:5.1%}  {'pass' if passed else 'FAIL'}",
            flush=True,
        )
    for figure in statistics_figures():
        print(
            f"{figure['what']:<60} {figure.get('ratio', figure.get('bytes')):.4g}"
            f" (at most {figure['at_most'] or '-'})  {'pass' if figure['passed'] else 'FAIL'}",
            flush=True,
        )
        figures.append(figure)
    if arguments.out:
        write_figures(arguments.out, figures)


if __name__ == "__main__":
    sys.exit(main())
