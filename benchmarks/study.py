"""How much faster a study is with two workers than with one: the same runs, both warm, in turn.

    python benchmarks/study.py            # about two minutes on a quiet machine

A worker imports torch once, before anything is timed.
"""

import tempfile
import time
from pathlib import Path

from unsoft.study.local import LocalWorkers
from unsoft.study.worker import code_digest
from unsoft.training import Spec

RUNS, ROUNDS = 6, 2


def seconds(workers: LocalWorkers, count: int, folder: Path) -> float:
    """For so many runs, each as long as those of a small study."""
    begin, left = time.perf_counter(), list(range(count))
    running = 0
    while left or running:
        while left and workers.free():
            spec = Spec(task="opposition", steps=60, seed=left.pop()).filled()
            job = {
                "spec": spec.to_dict(),
                "folder": str(folder / f"{spec.seed}"),
                "plugin": "",
                "code": code_digest(),
            }
            workers.submit(str(spec.seed), job)
            running += 1
        for _, outcome in workers.wait(1.0):
            assert outcome["status"] == "done", outcome
            running -= 1
    return time.perf_counter() - begin


def main() -> None:
    """Prints the ratio of each round."""
    pools = {count: LocalWorkers(count) for count in (1, 2)}
    with tempfile.TemporaryDirectory() as place:
        for count, pool in pools.items():
            seconds(pool, count, Path(place) / f"warm{count}")
        for number in range(ROUNDS):
            one, two = (seconds(pools[count], RUNS, Path(place) / f"{number}-{count}") for count in (1, 2))
            print(f"{RUNS} runs: 1 worker {one:.1f} s, 2 workers {two:.1f} s: {one / two:.2f} x")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
