"""Write the tables of docs/peers.md from the records of the benchmarks: ``python docs/generate/peers.py``."""

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
        "sdpa": "PyTorch's SDPA, softmax",
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
    return "\n".join([*lines, "", *_accuracy()]) + "\n"


def _accuracy() -> list[str]:
    """Return the section on errors of weights that come out of a softmax kernel by log(f + N)."""
    record = json.loads((BENCHMARKS / "cancellation.json").read_text())
    rows = record["errors"]
    lengths = sorted({row["keys"] for row in rows})
    error = {(row["mechanism"], row["offset"], row["keys"]): row for row in rows}
    lines = [
        "### Accuracy of the detour through softmax",
        "",
        "A softmax kernel with the score log(f + N) returns f v, after a multiplication by exp(LSE) and a"
        " subtraction of N times the sum of values. Where the weights f are small compared with N, that"
        " subtraction cancels. Relative error of the output in bfloat16 (lower is better):",
        "",
        "| weights, offset N | " + " | ".join(f"{n} keys" for n in lengths) + " |",
        "|---" * (1 + len(lengths)) + "|",
    ]
    for mechanism, offset in dict.fromkeys((row["mechanism"], row["offset"]) for row in rows):
        cells = [_percent(error[mechanism, offset, n]["log_route"]) for n in lengths]
        lines.append(f"| {mechanism}, N = {offset:g} | " + " | ".join(cells) + " |")
    for mechanism in dict.fromkeys(row["mechanism"] for row in rows):
        direct = [next(r for r in rows if (r["mechanism"], r["keys"]) == (mechanism, n)) for n in lengths]
        cells = [_percent(row["direct"]) for row in direct]
        lines.append(f"| {mechanism}, unsoft | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "N = 1 is the default of attention-gym. Weights that are never negative, such as those of sigmoid,"
        " also work with N = 0; signed ones need N above their most negative value. Those of hstu are divided"
        f" by n after the sum, so they are not small. torch {record['versions']['torch']},"
        " `benchmarks/cancellation.json`.",
    ]


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %" if error < 1 else f"{100 * error:.0f} %"


def page(text: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
