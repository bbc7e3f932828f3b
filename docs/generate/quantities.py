"""Write the numbers that several pages quote, each from one record: ``python docs/generate/quantities.py``.

A page marks a number as ``<!-- name -->0.70<!-- -->``; :func:`page` replaces what is between the marks.
:data:`STATEMENTS` recognises the same quantities in prose without marks: :func:`conflicts` finds a page that
states another value. tests/test_readme.py checks both.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unsoft.lab.evidence import AT_CEILING, NOT_SUPPORTED, PARTLY, SUPPORTED, UNDECIDED
from unsoft.lab.records import LANGUAGE, PACKAGED
from unsoft.lab.study import read_records, summarise
from unsoft.lab.study.summary import Difference
from unsoft.lab.tasks import tasks
from unsoft.mechanisms import mechanisms

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"<!-- (\w+) -->(.*?)<!-- -->")
STATEMENTS = {
    "inspect": [r"(\d+(?:\.\d+)?) times (?:the cost of )?a (?:plain )?forward pass"],
    "cog_training": [
        r"[Tt]raining with cog takes (\d+(?:\.\d+)?)",
        r"训练 cog 耗时为[^\d]*(\d+(?:\.\d+)?)",
    ],
    "generate": [
        r"generat\w+ in (\d+(?:\.\d+)?) of the time",
        r"`generate` of swapped SmolLM2 with cog: (\d+(?:\.\d+)?)",
    ],
    "original": [r"The original has (\d+(?:\.\d+)?)"],
    "gain": [r"census, magnitude on mass: over softmax (\+\d+(?:\.\d+)?) "],
}
"""For each quantity, patterns of sentences that state it; the group is the value."""


CLONES = {
    "clones": "50 magnitude",
    "density_clones": "50 density",
    "many_clones": "1000 magnitude",
    "many_density_clones": "1000 density",
}
CASES = {
    "initial": "at initialisation",
    "fitted": "fitted",
    "causal": "fitted, causal",
    "rotary": "fitted, rotary model",
    "rotated": "fitted, rotated keys",
}
"""Names of what clones count as: ``density_clones_causal``."""


def pages() -> dict[str, str]:
    """Return every page that a reader sees, by its path."""
    paths = [*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def record(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def figure(path: str, what: str) -> float:
    """Return one number of a benchmark's record."""
    content = record(path)
    return next(row["measured"] for row in content.get("bars") or content["figures"] if row["what"] == what)


@cache
def numbers() -> dict[str, str]:
    """Return every quoted quantity with its value as text."""
    board = {row["mechanism"]: row["cells"] for row in record("docs/choose.json")["scoreboard"]}
    clones = record("docs/choose.json")["clones"]
    converted = record("docs/converting.json")
    gains = {
        study: next(
            one.difference
            for one in summarise([run for run in read_records(path) if run.study == study])
            if one.mechanism == mechanism
        )
        for path, study, mechanism in (
            (PACKAGED, "census", "magnitude on mass"),
            (PACKAGED, "opposition", "cog"),
            (LANGUAGE, "language", "cog"),
        )
    }
    verdicts = Counter(claim["verdict"] for claim in record("docs/choose.json")["claims"])
    tested = (SUPPORTED, PARTLY, NOT_SUPPORTED, UNDECIDED, AT_CEILING)
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
        "cog_training": f"{board['cog']['training']['value']:.2f}",
        "peer": f"{peer['x-transformers'] / peer['native']:.1f}",
        "generate": f"{figure('benchmarks/hf.json', 'cog, generate 64 tokens after 32'):.2f}",
        **{
            f"{prefix}_{short}": f"{clones[key][case]:.3g}"
            for prefix, key in CLONES.items()
            for short, case in CASES.items()
            if case in clones[key]
        },
        "softmax_clones": f"{board['softmax']['clones']['value']:.0f}",
        "kept": f"{converted['magnitude+softmax']['perplexity']['swapped']:.1f}",
        "original": f"{converted['magnitude+softmax']['perplexity']['original']:.1f}",
        "inspect": f"{record('benchmarks/inspection.json')['figures']['ratio']:.1f}",
        "tasks": str(len(tasks())),
        "gain": _interval(gains["census"]),
        "opposition_gain": _interval(gains["opposition"]),
        "language_cog": _interval(gains["language"], digits=3),
        "claims": str(sum(verdicts[word] for word in tested)),
        "supported": str(verdicts[SUPPORTED]),
        "partly": str(verdicts[PARTLY]),
        "refuted": str(verdicts[NOT_SUPPORTED]),
        "error": f"{max(errors):.0e}",
        "items": str(len(re.findall(r"^\| \d+ \|", (ROOT / "docs/coverage.md").read_text(), re.MULTILINE))),
    }


def _interval(gain: Difference, digits: int = 2) -> str:
    mean, low, high = (f"{value:+.{digits}f}" for value in (gain.mean, gain.low, gain.high))
    return f"{mean} ({low} to {high})"


def page(text: str) -> str:
    """Return the page with the values of the records."""
    return QUOTED.sub(lambda mark: f"<!-- {mark[1]} -->{numbers()[mark[1]]}<!-- -->", text)


def conflicts(texts: Mapping[str, str]) -> list[str]:
    """Return one line for each sentence in ``texts`` that states another value than the record.

    A page may round further than the record does, so values are compared at the coarser of both precisions.

    >>> conflicts({"a.md": "Inspection takes 99.5 times a forward pass."})[0][:24]
    "a.md: inspect is '99.5',"
    """
    problems = []
    for name, text in texts.items():
        plain = QUOTED.sub(lambda mark: mark[2], text)
        for quantity, patterns in STATEMENTS.items():
            recorded = numbers()[quantity]
            for pattern in patterns:
                for stated in re.findall(pattern, plain, re.MULTILINE):
                    if not _same(stated, recorded.split()[0]):
                        problems.append(f"{name}: {quantity} is {stated!r}, the record has {recorded!r}")
    return problems


def _same(first: str, second: str) -> bool:
    digits = min(len(text.partition(".")[2]) for text in (first, second))
    return abs(float(first) - float(second)) <= 0.51 * 10.0**-digits


if __name__ == "__main__":
    for name, text in pages().items():
        if (new := page(text)) != text:
            (ROOT / name).write_text(new)
