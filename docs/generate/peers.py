"""Writes the table of docs/peers.md from the records of the benchmarks: ``python docs/generate/peers.py``."""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).parents[1] / "peers.md"
BENCHMARKS = PAGE.parents[1] / "benchmarks"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"


def table() -> str:
    """Return the times of peers, each a multiple of the time of unsoft's cog in the same run."""
    record = json.loads((BENCHMARKS / "peers.json").read_text())
    times = {
        (row["engine"], row["mode"], row["queries"], row["is_causal"]): row["ratio"]
        for row in record["timings"]
        if row["group"] == "main" and (row["engine"] != "native" or row["mechanism"] == "cog")
    }
    contenders = {
        "x-transformers": f"x-transformers {record['versions']['x-transformers']}, `cog_signed`",
        "FlexAttention": "FlexAttention, compiled, softmax",
        "dense PyTorch": "softmax written out in torch",
    }
    lengths = [(512, False), (512, True), (2048, False), (2048, True)]
    heads = [f"{n} causal" if causal else str(n) for n, causal in lengths]
    lines = [
        "| B=1 H=8 D=64 float32, time relative to unsoft's cog | " + " | ".join(heads) + " |",
        "|---" * 5 + "|",
    ]
    for engine, label in contenders.items():
        for mode, words in (("forward", "forward"), ("training", "forward + backward")):
            cells = []
            for length in lengths:
                ratio, own = times.get((engine, mode, *length)), times["native", mode, *length]
                cells.append("does not run" if ratio is None else f"{ratio / own:.2f}")
            lines.append(f"| {label}, {words} | " + " | ".join(cells) + " |")
    lines += ["", f"{record['machine']}, torch {record['versions']['torch']}, {record['written'][:10]}; "]
    lines[-1] += "`benchmarks/peers.json`. Below 1 is faster than unsoft."
    names = {"magnipy": "magnipy's Cholesky", "linear_operator": "linear_operator's conjugate gradients"}
    solvers = [  # those that were installed
        f"{words} takes {figure['measured']:.1f} times as long as ours"
        for figure in json.loads((BENCHMARKS / "magnitude.json").read_text())["figures"]
        for name, words in names.items()
        if name in figure["what"]
    ]
    lines += ["", f"The magnitude of 4096 points: {'; '.join(solvers)} (`benchmarks/magnitude.json`)."]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
