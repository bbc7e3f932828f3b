"""Fixtures for all tests."""

import pytest
import torch

HANG = 1800
"""Seconds after which a process that a test started is taken for hung. No test depends on the clock otherwise."""


@pytest.fixture
def one_thread():
    """For many small calls: a second thread would only be waited for, and the other core has tests of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
