"""Judge a record of ``unsoft bench`` by the figures we want to reach, and add the verdicts to the file.

    python benchmarks/targets.py benchmarks/results.json

A missed figure is shown as FAIL but is no error: a busy machine is not a bug.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from unsoft.cli.terminal import show_table
from unsoft.files import write_json

Row = dict[str, Any]
LONG, SHORT = 16384, 4096
LINEAR = 1.25  # four times the tokens may need this much more than four times the memory


@dataclass(frozen=True)
class Target:
    """A limit on a statistic of the ratios of an engine in a group of workloads."""

    what: str
    group: str
    mode: str
    statistic: Callable[[Sequence[float]], float]
    limit: float
    engine: str = "native"
    keys: int | None = None
    """Keys of one workload of the group; None for all."""
    mechanism: str | None = None

    def judge(self, timings: Sequence[Row]) -> Row:
        wanted = {"engine": self.engine, "group": self.group, "mode": self.mode}
        wanted |= {} if self.keys is None else {"keys": self.keys}
        wanted |= {} if self.mechanism is None else {"mechanism": self.mechanism}
        rows = [x for x in timings if all(x[name] == value for name, value in wanted.items())]
        ratios = [x["ratio"] for x in rows if x["ratio"] is not None]
        # A wrong result must not flatter the rest: with one of them, the figure counts as not measured.
        measured = self.statistic(ratios) if ratios and len(ratios) == len(rows) else None
        names = list(dict.fromkeys(x["mechanism"] for x in rows))
        scope = ", ".join(names) if len(names) < 3 else f"{len(names)} mechanisms"
        if wrong := len(rows) - len(ratios):
            scope += f"; {wrong} WRONG RESULTS"
        what = f"{self.mechanism or self.engine}: {self.what}"
        return bar(what, self.limit, "x", measured, scope)


TARGETS = (
    Target("forward, geometric mean", "main", "forward", geometric_mean, 0.90),
    Target("forward, slowest", "main", "forward", max, 1.05),
    Target("forward + backward, geometric mean", "main", "training", geometric_mean, 0.82),
    Target("forward + backward, slowest", "main", "training", max, 1.00),
    Target("forward + backward, slowest", "main", "training", max, 2.00, engine="tiled"),
    Target("short queries, slowest", "short", "forward", max, 1.15),
    Target("small, forward, slowest", "small", "forward", max, 1.15),
    Target("small, forward + backward, slowest", "small", "training", max, 1.15),
    Target("bfloat16, forward + backward, slowest", "bfloat16", "training", max, 1.10),
    Target("decoding, slowest", "decode", "forward", max, 1.10, keys=8192),
    Target("decoding at 64, slowest", "decode", "forward", max, 1.8, keys=64),
    Target("decoding at 256, slowest", "decode", "forward", max, 1.3, keys=256),
    Target("decoding at 1024, slowest", "decode", "forward", max, 1.0, keys=1024),
    *(
        Target(f"step of decoding at {keys}", "decode", "step", max, limit, "module", keys, name)
        for name, keys, limit in (
            *(("cog", 256, 1.6), ("gpam", 256, 3.0), ("linear-relu", 256, 2.5), ("cosformer", 256, 3.0)),
            *(("retention", 256, 2.5), ("magnitude", 256, 4.0), ("magnitude", 1024, 3.0)),
            ("magnitude", 4096, 2.0),
        )
    ),
)


def bar(what: str, limit: float, unit: str, measured: float | None, scope: str = "") -> Row:
    """Return one verdict as plain data; ``measured`` is None if the run has no correct result for it."""
    passed = None if measured is None else measured <= limit
    return {
        "what": what,
        "limit": limit,
        "unit": unit,
        "measured": measured,
        "scope": scope,
        "passed": passed,
    }


def bars(record: Row) -> list[Row]:
    """Return every figure to reach, judged by the record of a run."""
    own = {(x["mode"], x["length"]): x for x in record["memory"] if x["engine"] != "sdpa"}
    scope, factor = ", ".join(dict.fromkeys(mode for mode, _ in own)), LONG // SHORT
    ratios = [x["ratio"] for (_, length), x in own.items() if length == LONG]
    modes = [mode for mode, length in own if length == LONG and (mode, SHORT) in own]
    growth = [own[mode, LONG]["bytes"] / own[mode, SHORT]["bytes"] for mode in modes]
    name = f"memory growth for {factor} times the tokens"
    seconds = {x["what"]: x["seconds"] for x in record["startup"]}
    return [
        *(target.judge(record["timings"]) for target in TARGETS),
        bar(f"peak extra memory at {LONG} tokens", 1.8, "x", max(ratios, default=None), scope),
        bar(name, factor * LINEAR, "x own", max(growth, default=None), scope),
        bar("cold compile of one formula", 5.0, "s", seconds.get("cold compile")),
        bar("warm start adds to the first call", 0.005, "s", seconds.get("warm start")),
        bar("import unsoft, beyond torch", 0.3, "s", seconds.get("import unsoft")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    path = parser.parse_args().record
    record = json.loads(path.read_text())
    judged = bars(record)
    write_json(path, record | {"bars": judged})
    verdicts = {True: "pass", False: "FAIL", None: "not measured"}
    columns = {"what": "left", "measured": "right", "at most": "right", "verdict": "left", "scope": "left"}
    shown = [x for x in judged if x["measured"] is not None or x["scope"]]
    rows = [
        [
            x["what"],
            "-" if x["measured"] is None else f"{x['measured']:.3g} {x['unit']}",
            f"{x['limit']:.3g} {x['unit']}",
            verdicts[x["passed"]],
            x["scope"],
        ]
        for x in shown
    ]
    show_table(columns, rows, title="figures to reach")


if __name__ == "__main__":
    main()
