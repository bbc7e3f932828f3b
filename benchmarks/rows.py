"""Figures of row-coupled mechanisms and of the delta rule: ``python benchmarks/rows.py [--out FILE.json]``,
about two minutes.

Every time is a ratio to ``F.scaled_dot_product_attention`` of the same shape (B=1 H=8 D=64 float32),
forward + backward, in the same interleaved run. The package ``entmax`` (extra ``bench``), which writes all
weights out, stands beside ours where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from families import HEADS, SDPA, contenders, fastest, report, training

LENGTH, LONG = 2048, 8192
PEER = "that of package entmax"
BARS = {"entmax15": 2.5, "sparsemax": 2.5, "elastic": 2.5, "stick-breaking": 2.0}
DELTA = {"deltanet": 1 / 3, "gated-deltanet": 1 / 3, "kda": 1.0}


def package_entmax(is_causal: bool) -> dict[str, Callable[[], object]]:
    """Attention with the weights of the package, if it is installed."""
    if importlib.util.find_spec("entmax") is None:
        return {}
    from entmax import entmax15

    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        logits = logits.masked_fill(hidden, -1e9) if is_causal else logits
        return entmax15(logits, dim=-1) @ v

    return {PEER: training(attend, HEADS, LENGTH)}


def row_figures() -> list[dict]:
    figures = []
    for is_causal in (False, True):
        names = ("entmax15", "sparsemax", "elastic", *(("stick-breaking",) if is_causal else ()))
        seconds = fastest(contenders(names, LENGTH, is_causal) | package_entmax(is_causal))
        where = f"forward + backward, {LENGTH}{' causal' if is_causal else ''}"
        figures += [
            {"what": f"{name}, {where}", "measured": seconds[name] / seconds[SDPA], "at_most": BARS[name]}
            for name in names
        ]
        if PEER in seconds:
            ratio = seconds["entmax15"] / seconds[PEER]
            figures.append({"what": f"entmax15 / {PEER}, {where}", "measured": ratio, "at_most": 1.0})
    return figures


def delta_figures() -> list[dict]:
    seconds = fastest(contenders(tuple(DELTA), LONG, True))
    return [
        {
            "what": f"{name}, forward + backward, {LONG} causal",
            "measured": seconds[name] / seconds[SDPA],
            "at_most": most,
        }
        for name, most in DELTA.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    report((row_figures, delta_figures), parser.parse_args().out)


if __name__ == "__main__":
    main()
