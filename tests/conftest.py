"""Fixtures for all tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core has a worker already: a second thread of each would mostly wait, and OpenMP waits by
    # spinning, which doubled the time of the suite. Tests about threads set their number themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_report_header():
    return f"sizes are drawn from UNSOFT_TEST_SEED={os.environ.get('UNSOFT_TEST_SEED', '0')}"


HANG = 1800
"""Seconds after which a process that a test started is taken for hung.

No test depends on the clock otherwise.
"""


@pytest.fixture
def one_thread():
    """For many small calls: a second thread would only be waited for,
    and the other core has tests of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def browser():
    """Chromium, for what a page does; skipped with a reason where there is none."""
    from tests.lab.report.browser import Browser, needs_chromium

    needs_chromium()
    opened = Browser()
    yield opened
    opened.close()
