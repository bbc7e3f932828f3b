"""Jobs in several processes: the same answers as one after the other, and an interrupt keeps what is done.

In a process of their own, since copying one that has threads, as a test run may have, is not safe.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import HANG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from unsoft.lab.compare.jobs import Job, run
from unsoft.lab.compare.store import AnswerStore

os.setpgrp()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
here, found = os.getpid(), {}
store = AnswerStore(Path(sys.argv[1]))

def job(name, compute, expected=1.0, **more):
    return Job(name, "", {"name": name}, compute, expected, **more)

def slope(k):
    x = torch.full((3,), float(k), requires_grad=True)
    return [float(torch.autograd.grad((x**2).sum(), x)[0][0]), os.getpid() != here]

slope(1)
jobs = [job(str(k), lambda k=k: slope(k), expected=k) for k in range(6)]
jobs += [job("timed", lambda: slope(6), timed=True), job("prepared", lambda: slope(7), prepare=int)]
seen = []
answers, finished = run(jobs, store, lambda job, *more: seen.append((job.name, *more)), processes=2)
again, _ = run(jobs, store, processes=2)
found["order"] = [finished, [a.rows for a in answers], seen]
kept = all(a.cached for a in again if a.name != "timed")
found["again"] = [kept, [a.rows for a in answers] == [a.rows for a in again]]

def fails():
    raise ValueError("cannot")
def bug():
    raise ZeroDivisionError("a bug")
answers, _ = run([job("a", fails), job("b", lambda: ["b"])], store, processes=2)
found["failure"] = [a.problem for a in answers]
try:
    run([job("c", bug), job("d", lambda: ["d"])], store, processes=2)
except ZeroDivisionError as problem:
    found["bug"] = str(problem)

def dies():
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return ["alive"]
answers, finished = run([job("e", dies), job("f", lambda: ["f"])], store, processes=2)
found["death"] = [finished, [a.rows for a in answers]]

def interrupt():
    time.sleep(0.2)
    os.killpg(0, signal.SIGINT)
    time.sleep(600)
jobs = [job("first", lambda: [1], expected=9.0), job("stops", interrupt), job("x", lambda: time.sleep(600))]
kept = len(store.files())
answers, finished = run(jobs, store, processes=2)
found["interrupt"] = [finished, [a.name for a in answers], len(store.files()) - kept]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("store") / "kept")],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_answers_are_in_order_whoever_computes_them(found):
    """Also after the first process has used gradients; what takes time and what is prepared stays there."""
    finished, rows, seen = found["order"]
    assert finished and rows == [[2.0 * k, k < 6] for k in range(8)]
    names, numbers, left = zip(*seen, strict=True)
    assert names[0] == "5" and names[-2:] == ("timed", "prepared"), "the longest first, what is alone last"
    assert sorted(numbers) == list(numbers) and left[0] == 15 / 2 + 2
    assert found["again"] == [True, True]  # a time is not kept if others used the machine meanwhile


def test_one_failure_does_not_spoil_the_others_and_a_bug_is_not_hidden(found):
    assert found["failure"] == ["cannot", ""] and found["bug"] == "a bug"


def test_a_process_that_dies_leaves_its_work_to_the_first_one(found):
    assert found["death"] == [True, [["alive"], ["f"]]]


def test_an_interrupt_ends_all_processes_and_keeps_what_is_done(found):
    assert found["interrupt"] == [False, ["first"], 1]
