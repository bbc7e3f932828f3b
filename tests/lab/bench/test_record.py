"""Bars, tables and files: no figure is shown that was not measured, no file is ever half written."""

import json
import math
import os
from dataclasses import replace

import pytest

from benchmarks.targets import bars
from unsoft import files
from unsoft.files import write_json
from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.record import record, tables
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import Workload

MAIN = Workload("main", 512, 512)
SDPA = Timing(MAIN, "sdpa", "softmax", 1e-7, 5, 0.001, 1.0)


def timing(mechanism: str, ratio: float | None, engine: str = "native", **changes) -> Timing:
    seconds = None if ratio is None else ratio * 0.001
    return Timing(replace(MAIN, **changes), engine, mechanism, 1e-7 if ratio else math.inf, 5, seconds, ratio)


def verdicts(results) -> dict[str, tuple[float | None, bool | None]]:
    judged = bars(record("quick", results, finished=True))
    return {bar["what"]: (bar["measured"], bar["passed"]) for bar in judged}


def test_bars_are_judged_by_mean_and_by_the_slowest():
    judged = verdicts([SDPA, timing("cog", 0.5), timing("relu", 1.125)])
    assert judged["native: forward, geometric mean"] == (pytest.approx(0.75), True)
    assert judged["native: forward, slowest"] == (1.125, False)
    assert judged["native: forward + backward, slowest"] == (None, None)


def test_training_and_other_groups_are_judged_apart():
    slow = [timing("cog", 0.99, mode="training"), timing("cog", 1.99, engine="tiled", mode="training")]
    judged = verdicts(
        [*slow, timing("cog", 1.2, group="short"), timing("cog", 1.05, group="bfloat16", mode="training")]
    )
    assert judged["native: forward + backward, geometric mean"] == (pytest.approx(0.99), False)
    assert judged["native: forward + backward, slowest"] == (0.99, True)
    assert judged["tiled: forward + backward, slowest"] == (1.99, True)
    assert judged["native: short queries, slowest"] == (1.2, False)
    assert judged["native: bfloat16, forward + backward, slowest"] == (1.05, True)


def test_decoding_is_judged_by_length_and_by_mechanism():
    decode = {"group": "decode", "queries": 1}
    results = [timing("cog", 1.7, keys=64, **decode), timing("cog", 1.7, keys=256, **decode)]
    results.append(timing("magnitude", 2.5, engine="module", keys=1024, mode="step", **decode))
    judged = verdicts(results)
    assert judged["native: decoding at 64, slowest"] == (1.7, True)
    assert judged["native: decoding at 256, slowest"] == (1.7, False)
    assert judged["native: decoding, slowest"] == (None, None)
    assert judged["magnitude: step of decoding at 1024"] == (2.5, True)
    assert judged["magnitude: step of decoding at 256"] == (None, None)


def test_a_wrong_result_takes_the_whole_bar_away():
    bar = bars(record("quick", [SDPA, timing("cog", 0.5), timing("relu", None)], finished=True))[0]
    assert (bar["measured"], bar["passed"]) == (None, None)
    assert "1 WRONG RESULTS" in bar["scope"]


def test_memory_is_judged_at_the_longest_length_and_by_its_growth():
    def memory(length, used, ratio):
        return Memory("native", "cog", "forward", length, used, ratio)

    judged = verdicts([memory(4096, 100, 3.0), memory(16384, 400, 1.7)])
    assert judged["peak extra memory at 16384 tokens"] == (1.7, True)
    assert judged["memory growth for 4 times the tokens"] == (4.0, True)
    assert verdicts([memory(4096, 100, 1.0), memory(16384, 1600, 1.0)])[
        "memory growth for 4 times the tokens"
    ] == (16.0, False)


def test_startup_bars():
    judged = verdicts(
        [Startup("cold compile", 2.0, 1), Startup("warm start", 0.02, 3), Startup("import unsoft", 0.1, 3)]
    )
    assert judged["cold compile of one formula"] == (2.0, True)
    assert judged["warm start adds to the first call"] == (0.02, False)
    assert judged["import unsoft, beyond torch"] == (0.1, True)


def test_tables_show_ratios_and_name_wrong_results():
    results = [
        SDPA,
        timing("cog", 0.75),
        timing("relu", None),
        timing("softmax", 3.0, engine="dense PyTorch"),
    ]
    decode = {"group": "decode", "queries": 1, "keys": 8192}
    results += [replace(SDPA, workload=replace(MAIN, **decode)), timing("relu", None, **decode)]
    shown_tables = {table.title: table for table in tables(results)}
    main = shown_tables["forward, time relative to SDPA"]
    assert main.header == ["engine", "mechanism", "512"]
    assert main.rows == [
        ["native", "cog", "0.75"],
        ["native", "relu", "wrong"],
        ["dense PyTorch", "softmax", "3.00"],
        ["x-transformers", "cog", "not installed"],
        ["SDPA", "softmax", "1 ms"],
    ]
    assert shown_tables["special shapes, time relative to SDPA"].rows[0][-2] == "wrong: relu"
    assert "forward + backward, time relative to SDPA" not in shown_tables


def test_record_is_plain_json_even_with_infinite_errors():
    content = record("quick", [SDPA, timing("relu", None)], finished=False)
    kept = json.loads(json.dumps(content, allow_nan=False))
    assert kept["timings"][1]["error"] is None and kept["timings"][1]["group"] == "main"
    assert kept["finished"] is False


def test_writing_replaces_the_file_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_json(path, {"run": 1})

    def broken(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert os.listdir(tmp_path) == ["results.json"]
