"""Plant small faults, one at a time, and check that the tests catch each of them.

    python tests/mutants/run.py                  run what is missing; a rerun resumes
    python tests/mutants/run.py sign causal      only the faults whose name contains one of these words
    python tests/mutants/run.py --no-baseline    assume that all tests pass without a fault

A fault is a record in tests/mutants/*.toml: a file, a text that occurs in it exactly once, its replacement,
and the tests that should fail. With ``cpu``, it is skipped on CPUs without that flag. Every worker
has a copy of the repository, plants a fault there, runs only those tests and restores the file. Before that,
the tests run once without any fault: a test that fails anyway catches nothing.

Results are kept in build/mutants/results.json under a digest of the record, the changed file and the test
files, so that a rerun repeats only faults for which one of these has changed. The exit code is 1 if a fault
survives, if a record no longer applies, or if a test fails without a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).parent
RESULTS = ROOT / "build" / "mutants" / "results.json"
WORKERS = 2
TIMEOUT = 600
"""Seconds after which a test run counts as hung; a fault that makes tests hang is caught."""


@dataclass(frozen=True)
class Fault:
    """A small mistake that tests should catch."""

    name: str
    file: str
    old: str
    """A text that occurs in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: files, or tests in them."""
    cpu: str = ""
    """A flag of /proc/cpuinfo without which the code is not used, or ""."""

    def applicable(self) -> bool:
        """Return False if this machine never runs the changed code."""
        path = Path("/proc/cpuinfo")
        return not self.cpu or (path.is_file() and self.cpu in path.read_text().split())

    def problem(self) -> str | None:
        """Explain why the record does not apply, or return None."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        if (count := path.read_text().count(self.old)) != 1:
            return f"the text occurs {count} times in {self.file}: {self.old!r}"
        if self.old == self.new:
            return "the replacement equals the text"
        missing = [test for test in self.tests if not (ROOT / test.partition("::")[0]).exists()]
        return f"no such test file: {', '.join(missing)}" if missing or not self.tests else None

    def digest(self) -> str:
        """Return a digest of everything that decides whether the fault is caught, as far as that is cheap."""
        files = [self.file, *(test.partition("::")[0] for test in self.tests)]
        contents = "".join((ROOT / file).read_text() for file in files if (ROOT / file).is_file())
        return hashlib.sha256(f"{self}{contents}".encode()).hexdigest()


def load_faults() -> list[Fault]:
    """Return the faults of all record files."""
    return [
        Fault(**fault | {"tests": tuple(fault["tests"])})
        for path in sorted(RECORDS.glob("*.toml"))
        for fault in tomllib.loads(path.read_text())["fault"]
    ]


class Copy:
    """A copy of the repository in which tests can run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def run(self, tests: tuple[str, ...], *, stop: bool = True) -> tuple[int | None, str]:
        """Run tests; return pytest's exit code (None: hung) and the end of its output."""
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "--tb=line",
            *(["-x"] if stop else []),
        ]
        environment = os.environ | {
            "PYTHONPATH": str(self.root / "src"),  # for processes that tests start
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "UNSOFT_CACHE_DIR": str(ROOT / "build" / "mutants" / "cache"),
        }
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return None, f"hung for {TIMEOUT} s"
        return done.returncode, "\n".join(done.stdout.splitlines()[-12:])

    def run_with(self, fault: Fault) -> tuple[int | None, str]:
        """Run the tests of a fault while it is planted."""
        path = self.root / fault.file
        original = path.read_text()
        path.write_text(original.replace(fault.old, fault.new))
        try:
            return self.run(fault.tests)
        finally:
            path.write_text(original)


def verdict(code: int | None) -> str:
    """Return "caught" when a test failed. Other exit codes mean that no test ran as intended."""
    return {0: "SURVIVED", 1: "caught", None: "caught"}.get(code, "BROKEN")


def main(arguments: list[str]) -> int:
    """Run the faults that have no result yet; return 1 unless all are caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument(
        "--no-baseline", action="store_true", help="assume that all tests pass without a fault"
    )
    given = parser.parse_args(arguments)
    words, skip_baseline = given.words, given.no_baseline
    faults = [fault for fault in load_faults() if not words or any(word in fault.name for word in words)]
    problems = {fault.name: problem for fault in faults if (problem := fault.problem())}
    for fault in [fault for fault in faults if not fault.applicable()]:
        print(f"skipped, since this CPU has no {fault.cpu}: {fault.name}")
        faults.remove(fault)
    for name, problem in problems.items():
        print(f"does not apply: {name}: {problem}")
    results: dict[str, dict] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    keys = {fault.digest(): fault for fault in faults if fault.name not in problems}
    missing = {key: fault for key, fault in keys.items() if results.get(key, {}).get("verdict") != "caught"}
    print(f"{len(faults)} faults, {len(missing)} to run", flush=True)
    copies: list[Copy] = []
    lock = threading.Lock()
    failing = False

    def attempt(key: str, fault: Fault) -> None:
        with lock:
            copy = copies.pop()
        start = time.monotonic()
        code, output = copy.run_with(fault)
        seconds = round(time.monotonic() - start, 1)
        result = {"name": fault.name, "verdict": verdict(code), "seconds": seconds, "output": output}
        with lock:
            copies.append(copy)
            results[key] = result
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{result['verdict']:8} {seconds:6.1f} s  {fault.name}", flush=True)
            if result["verdict"] != "caught":
                print(output, flush=True)

    def baseline(tests: tuple[str, ...]) -> None:
        nonlocal failing
        with lock:
            copy = copies.pop()
        code, output = copy.run(tests, stop=False) if tests else (0, "")
        with lock:
            copies.append(copy)
            if code != 0:
                failing = True
                print(f"tests fail without a fault:\n{output}", flush=True)

    with tempfile.TemporaryDirectory(prefix="unsoft-mutants-") as folder:
        copies += [Copy(Path(folder) / str(number)) for number in range(WORKERS)]
        tests = sorted({test for fault in missing.values() for test in fault.tests})
        with ThreadPoolExecutor(WORKERS) as pool:
            if not skip_baseline:
                list(pool.map(baseline, [tuple(tests[number::WORKERS]) for number in range(WORKERS)]))
            if not failing:
                list(pool.map(attempt, missing, missing.values()))
    survivors = [fault.name for key, fault in keys.items() if results.get(key, {}).get("verdict") != "caught"]
    caught = len(keys) - len(survivors)
    print(f"{caught} of {len(faults)} faults caught; not caught: {', '.join(survivors) or 'none'}")
    return 1 if survivors or problems or failing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
