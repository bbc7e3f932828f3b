"""Writes the numbers that README.md and README.zh-CN.md quote: ``python docs/generate/readme_table.py``.

A number stands in the text as ``<!-- name -->0.70<!-- -->``. Each is read from the record in which it was
measured; tests/test_readme.py says when one is stale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from unsoft.lab.records import PACKAGED
from unsoft.lab.study import read_records, summarise
from unsoft.lab.tasks import tasks
from unsoft.mechanisms import mechanisms

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "README.zh-CN.md")
QUOTED = re.compile(r"<!-- (\w+) -->.*?<!-- -->")


def record(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def figure(path: str, what: str) -> float:
    """One number of a benchmark's record."""
    content = record(path)
    return next(row["measured"] for row in content.get("bars") or content["figures"] if row["what"] == what)


def numbers() -> dict[str, str]:
    """What the table quotes."""
    board = {row["mechanism"]: row["cells"] for row in record("docs/choose.json")["scoreboard"]}
    clones = {name: board[name]["clones"]["value"] for name in ("softmax", "magnitude")}
    converted = record("docs/converting.json")
    census = [run for run in read_records(PACKAGED) if run.study == "census"]
    gain = next(one.difference for one in summarise(census) if one.mechanism == "magnitude on mass")
    errors = [
        row["measured"] for row in record("benchmarks/theory.json")["figures"] if "error" in row["what"]
    ]
    peers = record("benchmarks/peers.json")["timings"]
    peer = {
        row["engine"]: row["ratio"]
        for row in peers
        if (row["queries"], row["is_causal"], row["mode"]) == (2048, True, "training")
        and row["mechanism"] == "cog"
    }
    return {
        "mechanisms": str(len(mechanisms())),
        "training": f"{figure('benchmarks/results.json', 'native: forward + backward, geometric mean'):.2f}",
        "peer": f"{peer['x-transformers'] / peer['native']:.1f}",
        "generate": f"{figure('benchmarks/hf.json', 'cog, generate 64 tokens after 32'):.2f}",
        "clones": f"{clones['magnitude']:.1f}",
        "softmax_clones": f"{clones['softmax']:.0f}",
        "kept": f"{converted['magnitude+softmax']['perplexity']['swapped']:.1f}",
        "original": f"{converted['magnitude+softmax']['perplexity']['original']:.1f}",
        "inspect": f"{record('benchmarks/inspection.json')['figures']['ratio']:.1f}",
        "tasks": str(len(tasks())),
        "gain": f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})",
        "error": f"{max(errors):.0e}",
        "items": str(len(re.findall(r"^\| \d+ \|", (ROOT / "docs/coverage.md").read_text(), re.MULTILINE))),
    }


def page(text: str) -> str:
    """The page with today's numbers."""
    found = numbers()
    return QUOTED.sub(lambda mark: f"<!-- {mark[1]} -->{found[mark[1]]}<!-- -->", text)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(page((ROOT / name).read_text()))
