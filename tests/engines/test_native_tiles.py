"""Tiles of the native engine: ragged last tiles of queries and keys, and rows cut into parts for threads."""

import pytest
import torch

from unsoft.modules.registry import resolve
from unsoft.testing.case import Case
from unsoft.testing.check import Check


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4099, 16, 8, 1, 1, 1, spread=8.0),  # parts of one row, whose peaks differ
        Case(3, 2500, 16, 8, 1, 2, 1, spread=8.0, mask="padding"),
        Case(521, 97, 16, 8, 1, 1, 1, causal=True),  # more than one tile of queries, and a ragged last one
        Case(200, 193, 16, 8, 1, 2, 1, mask="bool"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mechanism", ["softmax", "cog"])
def test_tiles_agree_with_the_dense_engine(two_threads, mechanism, case):
    for measure in Check(resolve(mechanism), "native").against_dense(case, torch.float32):
        assert measure.ok, str(measure)
