"""Fixtures for all tests."""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core already has a worker. A second thread per worker would mostly wait, and OpenMP waits by
    # spinning, which doubled the time of the suite. Tests about threads set the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402


def pytest_report_header():
    return f"sizes are drawn from UNSOFT_TEST_SEED={os.environ.get('UNSOFT_TEST_SEED', '0')}"


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the selected tests")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if shard := config.getoption("shard", None):
        from tests.slow_shards import select

        items[:] = select(items, shard)


def pytest_collection_finish(session):
    """Exempt the modules and tests that are loaded by now from garbage collection.

    They are millions of objects and live until the end. Every run of transformers' Trainer collects garbage,
    which took a third of its time in the tests.
    """
    gc.collect()
    gc.freeze()


HANG = 1800
"""Seconds after which a process started by a test counts as hung. No test depends on the clock otherwise."""


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Return ``make_once(name, fill)``: a folder that is filled once, for all workers of a test run.

    For module fixtures that take seconds: the tests of a file may be divided among workers.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_once(name, fill):
        import fcntl

        folder = base / name
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not (base / f"{name}.filled").exists():
                fill(folder)
                (base / f"{name}.filled").touch()
        return folder

    return make_once


@pytest.fixture
def one_thread():
    """Use one thread: for many small calls, a second one only adds waiting."""
    import torch  # not at the top: xdist's main process loads this file, and runs no test

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def few_examples():
    """Score training runs on a 64th of the usual examples, in as many batches: runs of a few steps otherwise
    spend most of their time on scores."""
    from unsoft.lab.training import trainer

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_TOKENS", "_AT_ONCE"):
            patch.setattr(trainer, name, getattr(trainer, name) // 64)
        patch.setattr(trainer, "_ANSWERS", 64)
        yield


@pytest.fixture(scope="session")
def browser():
    """Chromium for tests of page behaviour; skipped with a reason when it is not installed."""
    from tests.lab.report.browser import Browser, needs_chromium

    needs_chromium()
    opened = Browser()
    yield opened
    opened.close()
