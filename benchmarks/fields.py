"""What fields cost: the same formula with and without them, with and without gradients; FoX against PyTorch.

    python benchmarks/fields.py [--out benchmarks/fields.json] [--rounds 9]

Timed in turns in one process; the ratio is the median over rounds of the ratio within a round,
so that a busy machine slows both. "fields" is exp(s + c_i - c_j - m) with c given; "without" is exp(s - m) on
the native engine, which is what it would be without fields; "sdpa" is PyTorch's softmax.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.lab.bench.timing import seconds_per_call

WITH = unsoft.Formula(
    "exp(s + (c_i - c_j) - m)",
    "exp(s + (c_i - c_j) - m)",
    "s + (c_i - c_j)",
    fields={"c": "query+key"},
)
WITHOUT = unsoft.Formula("exp(s - m)", "exp(s - m)", "s")
HEADS, WIDTH = 8, 64


def calls(length: int, gradient: bool) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=gradient) for _ in range(3))
    log_gates = torch.nn.functional.logsigmoid(3 + torch.randn(1, HEADS, length))
    c = log_gates.cumsum(-1).requires_grad_(gradient)

    def run(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
        if not gradient:
            return attend
        return lambda: torch.autograd.grad(attend().sum(), leaves)

    def with_fields() -> Tensor:
        return unsoft.attention(q, k, v, WITH, is_causal=True, engine="native", fields={"c": c})

    def without() -> Tensor:
        return unsoft.attention(q, k, v, WITHOUT, is_causal=True, engine="native")

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        "fields": run(with_fields, (q, k, v, c)),
        "without": run(without, (q, k, v)),
        "sdpa": run(sdpa, (q, k, v)),
    }


def measure(length: int, gradient: bool, rounds: int) -> dict[str, object]:
    """Milliseconds of each, and the ratios."""
    timed = calls(length, gradient)
    for call in timed.values():  # compiles, and fills the caches
        call()
    rows = [{name: seconds_per_call(call) for name, call in timed.items()} for _ in range(rounds)]
    figures: dict[str, object] = {"length": length, "gradient": gradient}
    for name in timed:
        figures[f"{name} ms"] = round(1e3 * statistics.median(row[name] for row in rows), 3)
    for other in ("without", "sdpa"):
        ratios = sorted(row["fields"] / row[other] for row in rows)
        figures[f"fields / {other}"] = round(statistics.median(ratios), 3)
        figures[f"fields / {other} range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    given = parser.parse_args()
    rows = []
    for length in given.lengths:
        for gradient in (False, True):
            rows.append(measure(length, gradient, given.rounds))
            print(rows[-1], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
