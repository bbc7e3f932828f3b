"""`make test-slow`: shards partition the tests, and finished shards are skipped."""

import json
import subprocess

import pytest

from tests import slow_shards


@pytest.mark.parametrize("count", [1, 2, 8])
def test_shards_partition_the_tests(count):
    tests = [f"test_{number}" for number in range(21)]
    parts = [slow_shards.select(tests, f"{index}/{count}") for index in range(1, count + 1)]
    assert all(parts) and sorted(sum(parts, [])) == sorted(tests)


def test_a_rerun_resumes_and_a_failed_shard_is_repeated(tmp_path, monkeypatch):
    started = []

    def run(command, env, **_):
        started.append((command[-1], env["UNSOFT_TEST_SEED"]))
        return subprocess.CompletedProcess(command, 1 if started == [("1/8", "7"), ("2/8", "7")] else 0)

    monkeypatch.setattr(slow_shards.subprocess, "run", run)
    monkeypatch.setattr(slow_shards, "RECORD", tmp_path / "build" / "finished.json")
    monkeypatch.setattr(slow_shards, "code_digest", lambda: "code")
    monkeypatch.setenv("UNSOFT_TEST_SEED", "7")
    assert slow_shards.main([]) == 1
    assert [shard for shard, _ in started] == [f"{index}/8" for index in range(1, 9)]
    assert slow_shards.main([]) == 0
    assert started[8:] == [("2/8", "7")]
    monkeypatch.setenv("UNSOFT_TEST_SEED", "8")
    assert slow_shards.main(["3/8"]) == 0
    assert started[9:] == [("3/8", "8")], "another seed starts again"
    assert json.loads(slow_shards.RECORD.read_text())["finished"] == ["3/8"]


@pytest.mark.parametrize("shard", ["0/8", "9/8", "3", "a/b"])
def test_a_wrong_shard_is_rejected(shard):
    with pytest.raises(SystemExit, match="expected a shard such as 3/8"):
        slow_shards.main([shard])
