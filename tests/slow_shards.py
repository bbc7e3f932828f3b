"""Run the slow tests in shards and remember which are finished: ``python tests/slow_shards.py [I/N]``.

Finished shards are recorded in build/slow-tests, so that a rerun resumes. A change of src or tests, or
another UNSOFT_TEST_SEED, starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "build" / "slow-tests" / "finished.json"
SHARDS = 8


def code_digest() -> str:
    """Return a digest of everything that a test could depend on in src and tests."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def load(digest: str, seed: str | None) -> dict:
    """Return the record of earlier shards, or an empty one when the code or the seed has changed."""
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
        if record["code"] == digest and seed in (None, record["seed"]):
            return record
    return {"code": digest, "seed": seed or time.strftime("%Y%m%d"), "finished": []}


def parse(arguments: list[str]) -> list[str]:
    """Return the shards to run: all of them, or the one that was given as ``I/N``."""
    if not arguments:
        return [f"{index}/{SHARDS}" for index in range(1, SHARDS + 1)]
    index, _, count = arguments[0].partition("/")
    if len(arguments) > 1 or not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise SystemExit(f"expected a shard such as 3/{SHARDS}; got {' '.join(arguments)!r}")
    return arguments


def select(tests: list, shard: str) -> list:
    """Return the tests of a shard. Neighbours, which tend to be equally slow, go to different shards."""
    index, count = map(int, shard.split("/"))
    return tests[index - 1 :: count]


def main(arguments: list[str]) -> int:
    """Run the missing shards; return 1 if one failed."""
    shards = parse(arguments)
    record = load(code_digest(), os.environ.get("UNSOFT_TEST_SEED"))
    failed = []
    for shard in shards:
        if shard in record["finished"]:
            print(f"shard {shard}: finished earlier with this code and seed")
            continue
        command = ["-m", "pytest", "-q", "-n", "auto", "-m", "slow and not gpu_check", "--shard", shard]
        environment = os.environ | {"UNSOFT_TEST_SEED": record["seed"]}
        code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode
        if code not in (0, 5):  # 5: the shard is empty
            failed.append(shard)
            continue
        record["finished"].append(shard)
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"failed shards: {', '.join(failed)}" if failed else "all shards passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
